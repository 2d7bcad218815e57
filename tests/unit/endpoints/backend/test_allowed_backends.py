"""Backends under an allow list: the permitted ones, and the edits that fail their claim."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drakit.device import AllocatedDevice, ClaimReference
from drakit_nodeplugin.config import Backends
from drakit_nodeplugin.endpoints.allowlist import AllowList, allow_list
from drakit_nodeplugin.endpoints.backend.directory import BackendSocket
from drakit_nodeplugin.endpoints.failures import DeviceFailedError
from drakit_nodeplugin.endpoints.host_paths import HostDevices
from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.fakes.backend import FakeBackend
from tests.unit.endpoints.backend.conftest import DRIVER, Found, call, call_both, new_endpoint
from tests.unit.endpoints.camera import NODE, running, until

CLAIM = ClaimReference(namespace="lab", name="train", uid="uid-a")
OTHER = ClaimReference(namespace="lab", name="infer", uid="uid-b")
GPU = AllocatedDevice(name="gpu-0", pool=NODE, request="main")
SECOND = AllocatedDevice(name="gpu-1", pool=NODE, request="main")
THIRD = AllocatedDevice(name="gpu-2", pool=NODE, request="main")
OWN = {"owner": {"uid": os.getuid()}}
ENTRY = f'backends.allowed["{DRIVER}"]'


def listed(**entries: Any) -> AllowList | None:
    """A list with these entries, by driver."""
    named = {name.replace("_", "."): entry for name, entry in entries.items()}
    config = Backends.model_validate({"allowed": named})
    return allow_list("backends.allowed", config.allowed, devices=HostDevices(root=Path("/dev")))


@asynccontextmanager
async def served(sockets, listener, **entry: Any) -> AsyncIterator[Any]:
    """A backend that is on the list, and its endpoint."""
    found = Found(sockets, listed(gpu_example_com={**OWN, **entry}))
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
    ("entries", "problem"),
    [
        pytest.param(
            {},
            "it reports the name gpu.example.com, and backends.allowed has no entry for "
            "gpu.example.com; add one, or remove the program",
            id="an-empty-list-allows-nothing",
        ),
        pytest.param(
            {"tpu_example_com": OWN},
            "it reports the name gpu.example.com, and backends.allowed has no entry for "
            "gpu.example.com; add one, or remove the program",
            id="another-driver",
        ),
        pytest.param(
            {"gpu_example_com": {"owner": {"uid": os.getuid() + 1}}},
            f"it belongs to user {os.getuid()} and group {os.getgid()}, not to user "
            f"{os.getuid() + 1}; change the socket's owner, or correct owner in {ENTRY}",
            id="another-user",
        ),
        pytest.param(
            {"gpu_example_com": {"owner": {"uid": os.getuid(), "gid": os.getgid() + 1}}},
            f"it belongs to user {os.getuid()} and group {os.getgid()}, not to user "
            f"{os.getuid()} and group {os.getgid() + 1}; change the socket's owner, or correct "
            f"owner in {ENTRY}",
            id="another-group",
        ),
    ],
)
async def test_a_backend_that_the_list_does_not_allow_is_refused(sockets, quick, entries, problem):
    found = Found(sockets, listed(**entries))
    async with FakeBackend(sockets / "gpu.sock") as backend, found.watched():
        await until(lambda: found.diagnostics)
        await asyncio.sleep(0.1)
    assert found.notes == [f"the backend at DIR/gpu.sock is refused: {problem}"]
    assert found.diagnostics[0].reason == "BackendRefused"
    assert found.appeared == []
    assert {name for name, _ in backend.calls} == {"GetInfo"}


async def test_a_socket_that_is_replaced_while_it_gives_its_name_is_not_admitted(
    sockets, quick, listener
):
    evil, good = sockets / "gpu.sock", sockets / ".good"
    found = Found(sockets, listed(gpu_example_com=OWN))
    async with FakeBackend(evil) as first, FakeBackend(good, driver="good.example.com"):

        def replace() -> None:
            evil.rename(sockets / ".aside")
            good.rename(evil)

        async def info(request):
            await asyncio.to_thread(replace)
            return pb.GetInfoResponse(driver_name=DRIVER)

        first.info = info
        async with found.watched():
            await until(lambda: found.diagnostics)
    assert found.appeared == []
    assert "reports the name good.example.com" in found.notes[0]


async def test_a_socket_that_is_replaced_while_it_is_connected_to_is_not_used(
    sockets, listener, quick, monkeypatch
):
    tried: list[str] = []

    def is_in_place(socket: BackendSocket) -> bool:
        # In the directory, and then twice in the endpoint: replaced, and as it was.
        tried.append(socket.path.name)
        return len(tried) != 2

    monkeypatch.setattr(BackendSocket, "is_in_place", is_in_place)
    async with served(sockets, listener) as (_, endpoint):
        await until(lambda: endpoint.unavailable() is None)
        assert len(tried) > 2
        assert listener.reports[0] == (
            "it could not be started: its socket was replaced while the node plugin connected to it"
        )


# ------------------------------------------------------------ edits


async def test_containers_get_the_edits_that_the_entry_lists(sockets, quick, listener):
    entry = {"devices": ["/dev/null"], "mounts": {"/opt/gpu": "ro"}}
    async with served(sockets, listener, **entry) as (backend, endpoint):
        backend.prepare = gives(
            env={"GPU": "1"},
            device_nodes=[pb.DeviceNode(path="/dev/null")],
            mounts=[pb.Mount(host_path="/opt/gpu/lib", container_path="/gpu")],
        )
        (edits,) = await call(endpoint.prepare, CLAIM, [GPU])
    assert edits.env == {"GPU": "1"}
    assert [node.path for node in edits.device_nodes] == ["/dev/null"]
    assert [mount.host_path for mount in edits.mounts] == ["/opt/gpu/lib"]


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
            {"mounts": [pb.Mount(host_path="/etc", container_path="/etc")]},
            "a mount of /etc",
            "mounts",
            id="mount",
        ),
        pytest.param(
            {"hooks": [pb.Hook(name="prestart", path="/bin/sh")]},
            "hook /bin/sh",
            "hooks",
            id="hook",
        ),
        pytest.param(
            {"cdi_devices": ["tpu.example.com/claim=uid-b"]},
            "CDI device tpu.example.com/claim=uid-b",
            "cdiDevices",
            id="cdi-device",
        ),
        pytest.param(
            {"intel_rdt": pb.IntelRdt(clos_id="a")}, "Intel RDT settings", "intelRdt", id="rdt"
        ),
    ],
)
async def test_edits_outside_the_entry_fail_their_claim_alone(
    sockets, quick, listener, edits, what, setting
):
    async with served(sockets, listener, devices=["/dev/null"]) as (backend, endpoint):
        backend.listed = None
        backend.prepare = gives(**edits)
        bad, good = await call_both(endpoint.prepare, (CLAIM, SECOND, GPU), (OTHER, THIRD))
        assert endpoint.unavailable() is None
    assert len(good) == 1
    assert isinstance(bad, DeviceFailedError)
    assert str(bad) == (
        f"its backend asks for {what}, which is not allowed; to allow it, extend {setting} in "
        f"{ENTRY}"
    )
    assert bad.index == 1, "the device is named as well"


async def test_without_a_list_everything_is_allowed(sockets, quick, endpoint, listener):
    async with FakeBackend(sockets / "gpu.sock") as backend:
        await listener.names()
        backend.prepare = gives(hooks=[pb.Hook(name="prestart", path="/bin/sh")])
        (edits,) = await call(endpoint.prepare, CLAIM, [GPU])
    assert edits.hooks
