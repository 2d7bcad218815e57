"""A kubelet with an incomplete list: the node plugin unprepares nothing that is in use."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.kubelet import FakeKubelet, reference
from tests.fakes.podresources import FakePodResources
from tests.integration.test_node_plugin import CLAIMS, DRIVER, rig, stop  # noqa: F401

SOON = {"period": "200ms", "gracePeriod": "200ms", "unconfirmedGracePeriod": "1s"}
LONG_SECONDS = 4.0
"""Several periods, longer than any grace period. A response of the kubelet is shared for 1 s."""


@pytest.fixture
async def used(rig):  # noqa: F811
    """A claim that a container uses, and whose object was force-deleted."""
    rig.config["staleClaims"] = SOON
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    async with (
        FakePodResources(rig.root / "pod-resources" / "kubelet.sock") as pods,
        FakeKubelet(rig.root) as kubelet,
        rig.plugin() as process,
    ):
        pods.add("claim-uid-a", "atlas", uid="uid-a", driver=DRIVER)
        await rig.until(kubelet.sockets)
        dra = await kubelet.register()
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error == ""
        yield pods
        await stop(process)


async def test_a_kubelet_that_lists_nothing_or_not_our_own_pod_frees_no_claim(rig, used):  # noqa: F811
    files = rig.files()
    assert files
    used.synced = False
    await asyncio.sleep(1.2)  # the last response with the claim expires
    rig.api_server.remove(f"{CLAIMS}/claim-uid-a")
    await asyncio.sleep(LONG_SECONDS)
    assert rig.files() == files
    # Once it has read its pods, the claim is among them, or is not used.
    used.synced = True
    await asyncio.sleep(LONG_SECONDS)
    assert rig.files() == files
    used.pods.clear()
    await rig.until(lambda: not rig.files())
