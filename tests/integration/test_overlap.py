"""
Devices that overlap: a GPU and its partitions, shares of one interface, over the real sockets.

The driver is the simulated one: a GPU of 4 compute slices and 40 GiB, an interface of 100 Gbit/s.
The in-memory API server stores the main inventory, or the fallback if it does not support counters.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.fakes.kubelet import FakeKubelet, reference
from tests.integration.test_node_plugin import CLAIMS, NODE, SLICES, rig, stop  # noqa: F401

SIMULATED = "simulated.drakit.dev"
SHARES = [f"3f1c9a52-0000-4000-8000-00000000000{number}" for number in range(4)]


@pytest.fixture
def gpus(rig):  # noqa: F811
    """The node's directories with two simulated GPUs and one interface."""
    rig.config["drivers"] = [{"driver": "simulated", "config": {"gpu": {"count": 2}}}]
    return rig


def allocate(rig, uid, device, **fields) -> None:  # noqa: F811
    result = {"driver": SIMULATED, "pool": NODE, "request": "main", "device": device} | fields
    allocation = {"devices": {"results": [result]}}
    body = {"metadata": {"uid": uid}, "status": {"allocation": allocation}}
    rig.api_server.store(f"{CLAIMS}/claim-{uid}", body)


@contextlib.asynccontextmanager
async def kubelet_of(rig):  # noqa: F811
    """Run the plugin; yield a function that prepares claims and returns their errors in order."""
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: kubelet.sockets() and rig.api_server.objects(SLICES))
        dra = await kubelet.register()

        async def prepare(*uids: str) -> list[str]:
            answers = await kubelet.prepare(dra, *map(reference, uids))
            return [answers[uid].error for uid in uids]

        async def unprepare(*uids: str) -> list[str]:
            errors = await kubelet.unprepare(dra, *map(reference, uids))
            return [errors[uid] for uid in uids]

        yield prepare, unprepare
        await stop(process)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("gpu-0", "gpu-0-2g-0", id="a-partition-of-a-gpu-that-is-held"),
        pytest.param("gpu-0-2g-0", "gpu-0", id="a-gpu-of-which-a-partition-is-held"),
    ],
)
async def test_hardware_that_is_held_is_refused_with_its_holder_named(gpus, first, second):
    allocate(gpus, "uid-a", first)
    allocate(gpus, "uid-b", second)
    allocate(gpus, "uid-c", second.replace("gpu-0", "gpu-1"))
    async with kubelet_of(gpus) as (prepare, unprepare):
        assert await prepare("uid-a", "uid-c") == ["", ""]
        (error,) = await prepare("uid-b")
        assert (
            f"claim lab/claim-uid-b, request main: device {second} cannot be used together" in error
        )
        assert f"device {first} of claim lab/claim-uid-a" in error
        assert "counter set gpu-0" in error
        assert await prepare("uid-b") == [error], "Events of one cause are counted"
        assert await unprepare("uid-a") == [""]
        assert await prepare("uid-b") == [""]


async def test_partitions_that_fit_beside_each_other_are_prepared(gpus):
    names = {"uid-a": "gpu-0-2g-0", "uid-b": "gpu-0-1g-0", "uid-c": "gpu-0-1g-3"}
    for uid, device in names.items():
        allocate(gpus, uid, device)
    allocate(gpus, "uid-d", "gpu-0-1g-1")
    allocate(gpus, "uid-e", "gpu-0", adminAccess=True)
    async with kubelet_of(gpus) as (prepare, _):
        assert await prepare(*names) == ["", "", ""]
        (error,) = await prepare("uid-d")
        assert "device gpu-0-1g-1 cannot be used together with device gpu-0-2g-0" in error
        assert await prepare("uid-e") == [""], "admin access consumes nothing"


async def test_the_first_claim_of_a_batch_gets_the_hardware(gpus):
    allocate(gpus, "uid-a", "gpu-0")
    allocate(gpus, "uid-b", "gpu-0-1g-0")
    async with kubelet_of(gpus) as (prepare, _):
        first, second = await prepare("uid-a", "uid-b")
        assert (first == "") != (second == "")


async def test_shares_that_exceed_a_capacity_are_refused(gpus):
    for number, amount in enumerate(["80G", "20G", "1G"]):
        share = {"shareID": SHARES[number], "consumedCapacity": {"bandwidth": amount}}
        allocate(gpus, f"uid-{number}", "nic-0", **share)
    async with kubelet_of(gpus) as (prepare, unprepare):
        assert await prepare("uid-0", "uid-1") == ["", ""]
        (error,) = await prepare("uid-2")
        assert (
            "device nic-0 cannot be used together with device nic-0 of claim lab/claim-uid-0"
            in error
        )
        assert "capacity bandwidth" in error
        assert await unprepare("uid-1") == [""]
        assert await prepare("uid-2") == [""]


async def test_holds_survive_a_restart_of_the_plugin(gpus):
    allocate(gpus, "uid-a", "gpu-0")
    allocate(gpus, "uid-b", "gpu-0-1g-0")
    async with kubelet_of(gpus) as (prepare, _):
        assert await prepare("uid-a") == [""]
    async with kubelet_of(gpus) as (prepare, _):
        (error,) = await prepare("uid-b")
        assert "claim lab/claim-uid-a" in error
        assert await prepare("uid-a") == [""], "a repeat is answered from the checkpoint"


async def test_a_device_that_is_not_listed_is_refused_until_it_is(gpus):
    allocate(gpus, "uid-a", "gpu-7")
    async with kubelet_of(gpus) as (prepare, _):
        (error,) = await prepare("uid-a")
        assert "device gpu-7" in error
        assert "does not list" in error
