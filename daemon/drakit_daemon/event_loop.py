"""
The event loop of all daemons, and of the threads in which drivers run: uvloop if it is installed.

It takes a quarter of a prepare's processor time off. The standard loop does the same work, and
serves a driver whose image leaves uvloop out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

try:
    from uvloop import new_event_loop
except ImportError:  # pragma: no cover - the images of this project have it
    from asyncio import new_event_loop

__all__ = ("new_event_loop", "run")

ResultT = TypeVar("ResultT")


def run(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine as :func:`asyncio.run` does, in a loop of :func:`new_event_loop`."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
