"""Fixtures of all tests: no blocking call in an event loop, and an API server in memory."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from blockbuster import BlockBuster, BlockBusterFunction
from hypothesis import settings

from drakit_daemon.event_loop import new_event_loop
from tests.fakes.kube import FakeApiServer

if TYPE_CHECKING:
    from drakit_daemon.kube import Session

# Tests share the cores with each other: the wall time of one example proves nothing.
settings.register_profile("drakit", deadline=None)
settings.load_profile("drakit")

# Only calls that our own packages make, directly or through a library, count: tests may write their
# files in the loop. So may drivers: each has a loop and a thread of its own, where it may block.
_PACKAGES = [
    *("drakit", "drakit_formats", "drakit_daemon", "drakit_explain"),
    *("drakit_nodeplugin", "drakit_operator", "drakit_cli"),
]
_OF_TESTS = ["drakit.testing"]


def _detector() -> BlockBuster:
    detector = BlockBuster(_PACKAGES, excluded_modules=_OF_TESTS)
    for name in ("fsync", "fdatasync"):  # what a checkpoint or a CDI file waits for
        function = BlockBusterFunction(
            os, name, scanned_modules=_PACKAGES, excluded_modules=_OF_TESTS
        )
        detector.functions[f"os.{name}"] = function
    for function in detector.functions.values():
        # A loop of its own in a thread, for the client library's reading of kubeconfigs.
        function.can_block_in("drakit_daemon/kube/client_library.py", {"run_apart"})
        # The host's /dev is in memory, and what is read of it is bounded.
        function.can_block_in("drakit_nodeplugin/endpoints/host_paths.py", {"node", "nodes"})
        # A command has the loop to itself, and the kit within it is a test.
        function.can_block_in("drakit_cli/conformance.py", {"conformance"})
        # A command has nothing else to do while it asks its evaluator.
        function.can_block_in("drakit_cli/kubectl/capabilities.py", {"evaluate_selectors"})
    # A log line takes the handler's lock and may write to a terminal or file: the cost of logging.
    for name in ("io.TextIOWrapper.write", "io.BufferedWriter.write", "os.write"):
        detector.functions[name].can_block_in("logging/__init__.py", {"emit", "flush"})
    # gRPC joins its poller thread when its last object is freed, which may be in any later test.
    join = detector.functions["threading.Lock.acquire"]
    join.can_block_in("threading.py", {"_wait_for_tstate_lock"})
    return detector


_blocking = _detector()


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Fail where our code blocks the loop that it runs in."""
    _blocking.activate()
    yield
    _blocking.deactivate()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Restore the level that a command sets for its process: `caplog` of later tests needs it."""
    logger = logging.getLogger("drakit_daemon")
    level = logger.level
    yield
    logger.setLevel(level)


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run tests in the loop that daemons have, except for those that set the time of their loop."""
    marker = item.get_closest_marker("looptime")
    if marker is not None and marker.args != (False,):
        return {"standard": asyncio.new_event_loop}
    return {"uvloop": new_event_loop}


@pytest.fixture
async def api_server() -> AsyncIterator[FakeApiServer]:
    async with FakeApiServer() as server:
        yield server


@pytest.fixture
async def session(api_server: FakeApiServer, tmp_path: Path) -> AsyncIterator[Session]:
    """A session with the API server in memory, through a kubeconfig."""
    from drakit_daemon.kube import connect

    kubeconfig = api_server.write_kubeconfig(tmp_path)
    async with await connect(kubeconfig, user_agent="drakit-tests") as connected:
        yield connected
