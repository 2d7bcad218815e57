"""What holds for every test, with or without a cluster."""

from __future__ import annotations

import asyncio


def pytest_sessionstart() -> None:
    # looptime asks for the current loop even in tests without one. The default policy would make
    # one that nobody closes; after this it answers that there is none.
    asyncio.set_event_loop(None)
