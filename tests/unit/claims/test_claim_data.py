"""The rest of a claim, for drivers that need it: what they get, its limits, and where it lasts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drakit import (
    ClaimConfig,
    ClaimConsumer,
    ClaimData,
    ClaimOwner,
    Device,
    Edits,
    Inventory,
    OtherDevice,
)
from drakit_driver.runtime.contract import DriverTraits
from drakit_nodeplugin.claims.allocation import (
    APPLIED,
    MAX_DATA_BYTES,
    MAX_DATA_ENTRIES,
    allocated_claim,
)
from drakit_nodeplugin.claims.errors import ClaimTooLargeError
from tests.fakes.claims import DRIVER, NODE, claim_body, opaque, reference
from tests.fakes.direct import DirectEndpoint, result_of
from tests.unit.claims.conftest import EmptyDriver, stopped, wanted

A, B = "uid-a", "uid-b"
OTHER = "nic.example.com"


def body(uid: str = A, **metadata: Any) -> dict[str, Any]:
    """A claim with two devices of the driver and one of another driver."""
    found = claim_body(
        uid,
        "cam-0",
        {"device": "cam-1", "request": "spare/small"},
        {"driver": OTHER, "pool": "fabric", "device": "nic-7", "request": "link", "shareID": "s1"},
        config=[
            opaque({"mode": "fast"}, "spare"),
            opaque({"mode": "slow"}, source="FromClass"),
            opaque({"vlan": 7}, driver=OTHER),
            opaque({"mode": "none"}, "link"),
        ],
    )
    found["metadata"] |= metadata
    found["status"]["reservedFor"] = [
        {"resource": "pods", "name": "train", "uid": "pod-1"},
        {"apiGroup": "batch.example.com", "resource": "trains", "name": "t", "uid": "train-1"},
    ]
    return found


def data_of(found: dict[str, Any]) -> ClaimData:
    first, second = allocated_claim(wanted(found, data=True)).devices
    assert first.claim_data is second.claim_data, "one object for all devices"
    assert first.claim_data is not None
    return first.claim_data


def test_a_driver_gets_what_users_and_the_scheduler_wrote():
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "train", "uid": "pod-1", "controller": True}
    data = data_of(
        body(
            labels={"team": "vision"},
            annotations={"camera.example.com/exposure": "long", APPLIED: "{}"},
            ownerReferences=[owner],
        )
    )
    assert data == ClaimData(
        labels={"team": "vision"},
        annotations={"camera.example.com/exposure": "long"},
        owners=(
            ClaimOwner(api_version="v1", kind="Pod", name="train", uid="pod-1", controller=True),
        ),
        reserved_for=(
            ClaimConsumer(resource="pods", name="train", uid="pod-1"),
            ClaimConsumer(
                api_group="batch.example.com", resource="trains", name="t", uid="train-1"
            ),
        ),
        configs=(
            ClaimConfig(source="FromClass", parameters={"mode": "slow"}),
            ClaimConfig(source="FromClaim", parameters={"mode": "fast"}, requests=("spare",)),
        ),
        other_devices=(
            OtherDevice(driver=OTHER, pool="fabric", name="nic-7", request="link", share_id="s1"),
        ),
    )


def test_missing_parts_are_empty():
    found = claim_body(A, "cam-0")
    (device,) = allocated_claim(wanted(found, data=True)).devices
    assert device.claim_data == ClaimData()


def test_other_drivers_get_nothing_and_store_nothing():
    claim = wanted(body(labels={"team": "vision"}))
    assert claim.data is None
    assert {device.claim_data for device in allocated_claim(claim).devices} == {None}


@pytest.mark.parametrize(
    ("metadata", "limit"),
    [
        pytest.param({"annotations": {"a": "x" * MAX_DATA_BYTES}}, "64 KiB", id="bytes"),
        pytest.param(
            {"labels": {f"l{n}": "" for n in range(MAX_DATA_ENTRIES)}}, "1,024 entries", id="labels"
        ),
    ],
)
def test_a_claim_over_a_limit_is_refused_with_the_remedy_and_nothing_is_cut(metadata, limit):
    with pytest.raises(ClaimTooLargeError) as raised:
        wanted(body(**metadata), data=True)
    assert str(raised.value) == (
        f"claim lab/claim-{A}: driver {DRIVER} reads the claim's metadata, which exceeds the limit "
        f"of {limit}; remove labels or annotations of the claim or its template, and recreate the "
        "pod"
    )
    assert wanted(body(**metadata)), "other drivers do not mind"


def test_what_kubectl_applied_does_not_count():
    assert data_of(body(annotations={APPLIED: "x" * MAX_DATA_BYTES})).annotations == {}


@pytest.fixture
def devices(devices):
    devices.traits = replace(devices.traits, claim_data=True, checks=True)
    return devices


def labels_seen(devices) -> list[str | None]:
    return [
        None if each.claim_data is None else each.claim_data.labels.get("team")
        for each in devices.seen
    ]


async def test_a_hostile_claim_fails_beside_a_good_one(plugin, claims):
    claims.store(body(A, labels={"team": "vision"}))
    hostile = claim_body(B, "cam-9")
    hostile["metadata"]["annotations"] = {"a": "x" * MAX_DATA_BYTES}
    claims.store(hostile)
    answers = await plugin.prepare(reference(A), reference(B))
    assert (answers[A].error, answers[B].reason) == (None, "ClaimTooLarge")


async def test_a_label_that_changes_does_not_take_devices_from_a_pod(plugin, claims, devices):
    claims.store(body(labels={"team": "vision"}))
    await plugin.prepare(reference(A))
    claims.store(body(labels={"team": "sound"}))
    assert (await plugin.prepare(reference(A)))[A].error is None
    assert labels_seen(devices) == ["vision"] * 2
    assert devices.unprepares == 0


async def test_what_is_written_into_a_prepared_claim_does_not_take_it_from_a_pod(
    plugin, claims, devices, start
):
    claims.store(body(labels={"team": "vision"}))
    await plugin.prepare(reference(A))
    claims.store(body(annotations={"a": "x" * MAX_DATA_BYTES}))
    assert (await plugin.prepare(reference(A)))[A].error is None
    assert labels_seen(devices) == ["vision"] * 2
    # Other devices need their driver, and so does the first prepare after a boot.
    other = claim_body(A, "cam-5")
    other["metadata"]["annotations"] = {"a": "x" * MAX_DATA_BYTES}
    claims.store(other)
    assert (await plugin.prepare(reference(A)))[A].reason == "ClaimTooLarge"
    claims.store(body(annotations={"a": "x" * MAX_DATA_BYTES}))
    plugin = await start(boot_id="boot-2")
    assert (await plugin.prepare(reference(A)))[A].reason == "ClaimTooLarge"


async def test_a_repeat_without_the_api_server_has_the_same_data(plugin, claims, devices, start):
    claims.store(body(labels={"team": "vision"}))
    await plugin.prepare(reference(A))
    claims.answers = False
    plugin = await start()

    await plugin.queue.prepare_again(reference(A))
    devices.out_of_order.add("cam-1")
    await plugin.prepare(reference(A))

    assert labels_seen(devices) == ["vision"] * 6


async def test_a_repeat_after_a_reboot_reads_the_claim_again(plugin, claims, devices, start):
    claims.store(body(labels={"team": "vision"}))
    await plugin.prepare(reference(A))
    claims.store(body(labels={"team": "sound"}))
    plugin = await start(boot_id="boot-2")
    await plugin.prepare(reference(A))
    assert labels_seen(devices) == ["vision"] * 2 + ["sound"] * 2


async def test_a_claim_of_a_version_that_did_not_need_it_has_none_until_it_is_read(
    plugin, claims, devices, start
):
    devices.traits = DriverTraits()
    claims.store(body(labels={"team": "vision"}))
    await plugin.prepare(reference(A))
    devices.traits = DriverTraits(claim_data=True, checks=True)
    plugin = await start()
    await plugin.queue.prepare_again(reference(A))
    devices.out_of_order.add("cam-0")
    await plugin.prepare(reference(A))
    assert labels_seen(devices) == [None] * 4 + ["vision"] * 2


async def test_a_driver_that_is_stopped_leaves_the_data_with_the_claim(plugin, claims, devices):
    claims.store(body(labels={"team": "vision"}))
    await plugin.prepare(reference(A))
    devices.reason_away = stopped
    assert await plugin.unprepare(reference(A)) == {A: None}
    (entry,) = (await plugin.checkpoint.find([A])).values()
    assert allocated_claim(entry).devices[0].claim_data.labels == {"team": "vision"}


class Readers(EmptyDriver):
    """A driver that shows in its edits what it gets of a claim."""

    claim_data = True
    side_effects = False

    async def devices(self):
        yield [LISTED]

    async def prepare(self, claim, device):
        assert device.claim_data is not None
        model = "" if device.published is None else str(device.published.attributes["model"])
        return Edits(env={"TEAM": device.claim_data.labels["team"], "MODEL": model})


LISTED = Device(name="cam-0", attributes={"model": "wide"})


async def test_a_python_driver_gets_it_with_the_device_that_it_published():
    endpoint = DirectEndpoint(Readers(), node=NODE)
    endpoint._driver_calls.published(Inventory(devices=[LISTED]))
    (item,) = [allocated_claim(wanted(body(labels={"team": "vision"}), data=True))]
    first, second = result_of(await endpoint.prepare([item]))
    assert first.edits.env == {"TEAM": "vision", "MODEL": "wide"}
    assert second.edits.env == {"TEAM": "vision", "MODEL": ""}, "it does not list the second one"
