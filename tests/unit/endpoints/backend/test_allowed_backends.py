"""Backends under an allow list: the permitted ones, and the edits that fail their claim."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from drakit_driver.runtime.failures import DeviceFailedError
from drakit_nodeplugin.endpoints.backend.directory import BackendSocket
from drakit_nodeplugin.endpoints.host_paths import OpenSocket
from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.fakes.backend import FakeBackend
from tests.fakes.direct import call
from tests.unit.endpoints.backend.conftest import (
    CLAIM,
    DRIVER,
    GPU,
    OTHER,
    OWN,
    SECOND,
    Found,
    allowed_backends,
    call_both,
    new_endpoint,
)
from tests.unit.endpoints.camera import running, until

ENTRY = "backends.allowed.gpu"


@asynccontextmanager
async def served(sockets, listener, **entry: Any) -> AsyncIterator[Any]:
    """A backend that is on the list, and its endpoint."""
    found = Found(sockets.parent, allowed_backends(gpu={**OWN, **entry}))
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(FakeBackend(sockets / "gpu.sock"))
        await stack.enter_async_context(found.watched())
        endpoint = await stack.enter_async_context(running(new_endpoint(found, listener)))
        await listener.names()
        yield backend, endpoint
    assert found.diagnostics == []


def gives(**edits: Any):
    """A prepare that returns these edits for the second device of the first claim only."""

    async def prepare(request):
        claims = [
            pb.PreparedClaim(uid=claim.uid, edits=[pb.Edits() for _ in claim.devices])
            for claim in request.claims
        ]
        for claim in claims:
            if claim.uid == "uid-a":
                claim.edits[-1].CopyFrom(pb.Edits(**edits))
        return pb.PrepareClaimsResponse(claims=claims)

    return prepare


# ------------------------------------------------------------ registration


@pytest.mark.parametrize(
    ("owner", "problem"),
    [
        pytest.param(
            {"uid": os.getuid() + 1},
            f"it belongs to user {os.getuid()} and group {os.getgid()}, not to user "
            f"{os.getuid() + 1}; change the socket's owner, or correct owner in {ENTRY}",
            id="another-user",
        ),
        pytest.param(
            {"uid": os.getuid(), "gid": os.getgid() + 1},
            f"it belongs to user {os.getuid()} and group {os.getgid()}, not to user "
            f"{os.getuid()} and group {os.getgid() + 1}; change the socket's owner, or correct "
            f"owner in {ENTRY}",
            id="another-group",
        ),
    ],
)
async def test_a_backend_of_another_owner_is_refused(sockets, quick, owner, problem):
    found = Found(sockets.parent, allowed_backends(gpu={"owner": owner}))
    async with FakeBackend(sockets / "gpu.sock") as backend, found.watched():
        await until(lambda: found.diagnostics)
        await asyncio.sleep(0.1)
    assert found.notes == [f"the backend at DIR/gpu.sock is refused: {problem}"]
    assert found.diagnostics[0].reason == "BackendRefused"
    assert found.appeared == []
    assert backend.calls == []


async def test_a_socket_that_is_replaced_while_it_gives_its_name_is_not_admitted(
    sockets, quick, listener
):
    evil, good = sockets / "gpu.sock", sockets / ".good"
    found = Found(sockets.parent, allowed_backends(gpu=OWN))
    async with FakeBackend(evil) as first, FakeBackend(good) as second:

        def replace() -> None:
            evil.rename(sockets / ".aside")
            good.rename(evil)

        async def info(request):
            await asyncio.to_thread(replace)
            return pb.GetInfoResponse(driver_name=DRIVER)

        first.info = info
        async with found.watched(), running(new_endpoint(found, listener)):
            assert await listener.names() == ["gpu-0"]
    assert {name for name, _ in first.calls} == {"GetInfo"}, "the one that is there is used"
    assert second.called("WatchDevices")


async def test_a_socket_that_is_replaced_before_it_is_opened_is_not_used(
    sockets, listener, quick, monkeypatch
):
    opened: list[str] = []
    usual = BackendSocket.open

    def open_it(socket: BackendSocket) -> OpenSocket:
        # In the directory, and then twice in the endpoint: replaced, and as it was.
        opened.append(socket.path.name)
        if len(opened) == 2:
            raise OSError(errno.ESTALE, "replaced")
        return usual(socket)

    monkeypatch.setattr(BackendSocket, "open", open_it)
    async with served(sockets, listener) as (_, endpoint):
        await until(lambda: endpoint.unavailable() is None)
        assert len(opened) > 2
        assert listener.told[0] == ("it could not be started: its socket was replaced or removed")


# ------------------------------------------------------------ edits


@pytest.mark.parametrize(
    ("edits", "what", "setting"),
    [
        pytest.param(
            {"device_nodes": [pb.DeviceNode(path="/dev/null", host_path="/dev/mem")]},
            "device node /dev/mem",
            "devices",
            id="device-node",
        ),
        pytest.param(
            {"hooks": [pb.Hook(name="prestart", path="/bin/sh")]},
            "hook /bin/sh",
            "hooks",
            id="hook",
        ),
    ],
)
async def test_edits_outside_the_entry_fail_their_claim_alone(
    sockets, quick, listener, edits, what, setting
):
    async with served(sockets, listener, devices=["/dev/null"], env=["GPU"]) as (backend, endpoint):
        backend.listed = None
        backend.prepare = gives(**edits)
        bad, good = await call_both(endpoint.prepare, (CLAIM, SECOND, GPU), (OTHER, GPU))
        assert endpoint.unavailable() is None
    assert len(good) == 1
    assert isinstance(bad, DeviceFailedError)
    assert str(bad) == (
        f"its backend asks for {what}, which is not allowed; to allow it, extend {setting} in "
        f"{ENTRY}"
    )
    assert bad.index == 1, "the device is named as well"


async def test_a_long_answer_is_checked_as_well(sockets, quick, listener):
    async with served(sockets, listener, env=["GPU_*"]) as (backend, endpoint):
        backend.prepare = gives(env={f"GPU_{number}": "x" for number in range(200)})
        (prepared,) = await call(endpoint.prepare, CLAIM, [GPU])
        assert len(prepared.edits.env) == 200
        many = {f"GPU_{number}": "x" for number in range(200)}
        backend.prepare = gives(env={**many, "BASH_ENV": "/x"})
        with pytest.raises(DeviceFailedError, match="environment variable BASH_ENV"):
            await call(endpoint.prepare, CLAIM, [GPU])
