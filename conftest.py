"""Configuration of all tests, with or without a cluster."""

from __future__ import annotations

import asyncio


def pytest_sessionstart() -> None:
    # looptime gets the current loop even in tests without one. By default, the event loop policy
    # would create a loop that is never closed. After this call, it raises an error instead.
    asyncio.set_event_loop(None)
