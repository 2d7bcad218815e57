"""An update of a backend: the new process serves its socket before the previous one ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from drakit.device import PreparedDevice
from drakit_driver.runtime import endpoint as lifecycle
from drakit_driver.runtime.failures import EndpointStoppedError
from tests.fakes.backend import FakeBackend
from tests.fakes.direct import call
from tests.unit.endpoints.backend.conftest import CLAIM, GPU, OTHER
from tests.unit.endpoints.camera import until


@pytest.fixture
async def new(sockets, served) -> AsyncIterator[FakeBackend]:
    """The next process: with a socket of its own, it waits for the driver's name."""
    async with FakeBackend(sockets / "new.sock") as new:
        await until(lambda: new.called("GetInfo"))
        yield new


async def end(backend: FakeBackend) -> None:
    """End the previous process in order: its socket first, and its streams last."""
    backend.path.unlink()
    backend.send(None)


async def test_calls_wait_for_the_new_process_and_nothing_is_reported(
    backend, new, served, listener
):
    before = served.connection
    await end(backend)
    # The new process may be connected before the next look.
    await until(lambda: served.connection is not before)
    assert served.unavailable() is None
    await asyncio.gather(*(call(served.prepare, CLAIM, [GPU]) for _ in range(3)))
    assert [len(each.called("prepare")) for each in (backend, new)] == [0, 3]
    # The first report since is the new list: no stop came before it.
    assert not isinstance(await listener.hear(), str)


async def test_the_previous_process_still_answers_its_calls(backend, new, served, listener):
    """No other process works on their claims meanwhile: the order of calls is that of claims."""
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow(request):
        begun.set()
        await release.wait()
        return await backend._prepare(request)

    backend.prepare = slow
    calling = asyncio.create_task(call(served.prepare, CLAIM, [GPU]))
    await begun.wait()
    await end(backend)
    await listener.names()
    await call(served.unprepare, OTHER, [GPU])
    assert len(new.called("unprepare")) == 1
    release.set()
    await calling
    assert new.called("prepare") == []


async def test_a_call_that_the_previous_process_did_not_answer_is_repeated(backend, new, served):
    begun = asyncio.Event()

    async def hang(request):
        begun.set()
        await asyncio.Event().wait()

    backend.prepare = hang
    calling = asyncio.create_task(call(served.prepare, CLAIM, [GPU]))
    await begun.wait()
    await backend.stop()
    (prepared,) = await calling
    assert isinstance(prepared, PreparedDevice)
    assert len(new.called("prepare")) == 1


async def test_calls_fail_and_the_stop_is_reported_if_the_new_process_lists_no_devices(
    backend, new, served, listener, monkeypatch
):
    monkeypatch.setattr(lifecycle, "HAND_OVER_SECONDS", 0.3)
    new.listed = None
    await end(backend)
    await until(lambda: served.connection is None)
    with pytest.raises(EndpointStoppedError, match="its backend ended its stream of devices"):
        await call(served.prepare, CLAIM, [GPU])
    assert await listener.reason() == "its backend ended its stream of devices"


async def test_a_process_that_ends_without_a_successor_is_reported_at_once(
    backend, served, listener
):
    await end(backend)
    assert await listener.reason() == "its backend ended its stream of devices"
    with pytest.raises(EndpointStoppedError):
        await call(served.prepare, CLAIM, [GPU])
