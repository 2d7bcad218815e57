from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drakit import (
    Condition,
    DeviceNode,
    DeviceParameters,
    DriverError,
    Edits,
    NetworkData,
    ParameterVersion,
    PreparedDevice,
    ReleasePendingError,
)
from drakit_driver.runtime.contract import traits_of
from drakit_driver.runtime.failures import BadParametersError
from drakit_nodeplugin.claims.prepare import Preparing
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.claims.source import ApiClaims
from tests.fakes.checkpoints import delete
from tests.fakes.claims import DRIVER, NODE, claim_body, opaque, reference
from tests.fakes.direct import DirectEndpoint
from tests.unit.claims.conftest import EmptyDriver

A, B, C = "uid-a", "uid-b", "uid-c"


async def test_a_prepared_claim_has_its_devices_its_file_and_its_row(plugin, claims):
    claims.store(claim_body(A, "cam-0", {"device": "cam-1", "request": "spare/small"}))

    answer = (await plugin.prepare(reference(A)))[A]

    assert answer.error is None
    first, second = answer.devices
    assert (first.requests, first.pool, first.device) == (("main",), NODE, "cam-0")
    assert second.requests == ("spare",), "pods refer to base names"
    assert first.cdi_ids == (f"{DRIVER}/claim={A}-0",)
    spec = json.loads((plugin.cdi / f"{DRIVER}-claim_{A}.json").read_text())
    assert [device["name"] for device in spec["devices"]] == [f"{A}-0", f"{A}-1"]
    assert await plugin.states() == {A: "prepared"}


async def test_a_repeat_is_answered_without_the_driver_and_writes_a_lost_file(
    plugin, claims, devices
):
    claims.store(claim_body(A, "cam-0"))
    first = await plugin.prepare(reference(A))
    (plugin.cdi / f"{DRIVER}-claim_{A}.json").unlink()

    assert await plugin.prepare(reference(A)) == first
    assert devices.prepares == 1
    assert plugin.files() == {f"{DRIVER}-claim_{A}.json"}


@pytest.mark.parametrize(
    ("status", "reason", "told"),
    [
        (401, "Unauthorized", "does not accept the client's credentials"),
        (403, "Forbidden", 'the RBAC role of the client lacks the verb "get"'),
        (400, "BadRequest", "(400 BadRequest)"),
        (503, "ServiceUnavailable", "does not respond"),
    ],
)
async def test_a_known_claim_is_answered_from_the_checkpoint_while_the_api_server_refuses(
    plugin, claims, session, api_server, status, reason, told
):
    claims.store(claim_body(A, "cam-0"))
    first = await plugin.prepare(reference(A))
    future = asyncio.get_running_loop().create_future()
    future.set_result(session)
    claims.fetch = ApiClaims(future).fetch
    for name in (f"claim-{A}", f"claim-{B}"):
        path = f"/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims/{name}"
        api_server.fail("GET", path, status=status, reason=reason, times=10)

    assert await plugin.prepare(reference(A)) == first
    assert told in (await plugin.prepare(reference(B)))[B].error


async def test_a_claim_that_was_allocated_again_gets_its_new_device_and_frees_the_old(
    plugin, claims, devices
):
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))
    claims.store(claim_body(A, "cam-1"))

    answer = (await plugin.prepare(reference(A)))[A]

    assert [device.device for device in answer.devices] == ["cam-1"]
    assert devices.prepared == {"cam-1": A}


@pytest.mark.parametrize(
    ("sentence", "body"),
    [
        ("does not exist", None),
        (
            "the claim with this name has UID uid-other",
            claim_body("uid-other", "cam-9", name=f"claim-{B}"),
        ),
        ("is not allocated", claim_body(B, allocated=False)),
        ("the claim is allocated on another node, not on", claim_body(B, "cam-9", node="node-2")),
        (
            f"the allocation has no device of driver {DRIVER}",
            claim_body(B, {"device": "gpu-0", "driver": "gpu.example.com"}),
        ),
        ("broken is broken; unplug it", claim_body(B, "broken")),
        (f"still prepared for claim lab/claim-{A}", claim_body(B, "cam-0")),
    ],
)
async def test_a_bad_claim_fails_alone(plugin, claims, devices, sentence, body):
    devices.failing.add("broken")
    claims.store(claim_body(A, "cam-0"), claim_body(C, "cam-2"))
    await plugin.prepare(reference(A))
    if body is not None:
        claims.store(body)

    answers = await plugin.prepare(reference(B), reference(C))

    assert sentence in answers[B].error
    assert answers[B].devices == ()
    assert answers[C].error is None
    assert plugin.files() == {f"{DRIVER}-claim_{A}.json", f"{DRIVER}-claim_{C}.json"}


@pytest.mark.parametrize("all_named", [False, True])
async def test_a_holder_in_another_namespace_is_named_where_that_is_allowed(
    plugin, claims, caplog, all_named
):
    caplog.set_level("INFO")
    engine = Preparing(replace(plugin.parts, name_all_holders=all_named))
    plugin.queue = ClaimQueue(DRIVER, engine, order=plugin.parts.order)
    body = claim_body(A, "cam-0", name="secret")
    body["metadata"]["namespace"] = "other"
    claims.store(body, claim_body(B, "cam-0"))
    await plugin.prepare(replace(reference(A, name="secret"), namespace="other"))

    answers = await plugin.prepare(reference(B))

    named = "other/secret" if all_named else f"{A} in another namespace"
    assert f"still prepared for claim {named}; " in answers[B].error
    assert ("secret" in answers[B].error) is all_named
    logged = [record.holder for record in caplog.records if hasattr(record, "holder")]
    assert logged == ([] if all_named else ["other/secret"])


async def test_two_claims_of_one_pod_cannot_have_one_device(plugin, claims):
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-0"))

    answers = await plugin.prepare(reference(A), reference(B))

    assert [answers[A].error is None, answers[B].error is None] == [True, False]


async def test_unprepare_of_an_unknown_claim_is_success_and_removes_a_stray_file(plugin, claims):
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))
    await delete(plugin.checkpoint, (await plugin.checkpoint.find([A])).values())

    assert await plugin.unprepare(reference(A), reference(B)) == {A: None, B: None}
    assert plugin.files() == set()


async def test_an_unprepare_that_the_driver_refuses_keeps_the_device_and_can_be_repeated(
    plugin, claims, devices
):
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))
    devices.failing.add("cam-0")

    error = (await plugin.unprepare(reference(A)))[A]
    assert "lab/claim-uid-a, request main, device cam-0: cam-0 is broken" in error
    assert await plugin.states() == {A: "unpreparing"}

    devices.failing.clear()
    assert await plugin.unprepare(reference(A)) == {A: None}
    assert await plugin.states() == {}


async def test_a_cdi_directory_that_cannot_be_written_is_an_error_of_the_claim(plugin, claims):
    plugin.cdi.parent.mkdir(exist_ok=True)
    plugin.cdi.write_text("a file where the directory should be")
    claims.store(claim_body(A, "cam-0"))

    error = (await plugin.prepare(reference(A)))[A].error

    assert "the node plugin cannot write the CDI file of the claim" in error
    assert await plugin.states() == {A: "unpreparing"}
    plugin.cdi.unlink()
    assert await plugin.recovery.recover() == 0
    assert await plugin.states() == {}


async def test_a_restore_does_not_wait_for_a_claim_that_is_worked_on(plugin, claims):
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    await plugin.prepare(reference(A), reference(B))
    for uid in (A, B):
        (plugin.cdi / f"{DRIVER}-claim_{uid}.json").unlink()

    assert plugin.queue.take(A)
    async with asyncio.timeout(5):
        assert await plugin.restorer.restore() == 1
    plugin.queue.release(A)
    assert await plugin.restorer.restore() == 1
    assert plugin.files() == {f"{DRIVER}-claim_{uid}.json" for uid in (A, B)}


async def test_edits_of_wrong_types_are_an_error_of_their_claim_alone(plugin, claims, devices):
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-1"))
    right = devices.prepare_device

    async def prepare(claim, device):
        if claim.uid == B:
            edits = Edits(device_nodes=(DeviceNode(path=Path("/dev/cam-1")),))
            return PreparedDevice(edits=edits)
        return await right(claim, device)

    devices.prepare_device = prepare
    answers = await plugin.prepare(reference(A), reference(B))

    assert answers[A].error is None
    assert "deviceNodes[0].path must be a string, not PosixPath" in answers[B].error


async def test_the_answer_has_what_the_driver_returned_beside_edits(plugin, claims, devices):
    claims.store(claim_body(A, "cam-0", "cam-1"), claim_body(B, "cam-2"))
    claims.bodies[f"claim-{B}"]["status"]["devices"] = [{"driver": DRIVER}]
    ready = Condition(type="Ready", status="True", reason="Configured")
    network = NetworkData(interface_name="net1", ips=("192.0.2.5/24",))
    devices.results["cam-1"] = PreparedDevice(conditions=(ready,), network_data=network)
    answers = await plugin.prepare(reference(A), reference(B))

    first, second = answers[A].prepared
    assert (first.conditions, first.network_data) == ((), None)
    assert (second.conditions, second.network_data) == ((ready,), network)
    assert answers[B].prepared == ()
    assert [answers[uid].had_status for uid in (A, B)] == [False, True]
    # The checkpoint does not store it.
    assert (await plugin.prepare(reference(A)))[A].prepared is None


# ------------------------------------------------------------ what a driver is asked for at once


def use(driver, devices) -> None:
    """Let the fake pass its calls to a driver."""
    calls = DirectEndpoint(driver, node=NODE)
    devices.traits = traits_of(type(driver))
    devices.prepare, devices.unprepare = calls.prepare, calls.unprepare


class Former(DeviceParameters):
    mode: str = "slow"


class Present(DeviceParameters):
    frames: int = 30


class Before(EmptyDriver):
    """A driver before its parameters had versions; it notes the parameters of each call."""

    parameters_type: ClassVar[Any] = Former

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, DeviceParameters | None]] = []

    def prepare(self, claim, device):
        self.seen.append(("prepare", device.parameters))
        return Edits()

    def unprepare(self, claim, device):
        self.seen.append(("unprepare", device.parameters))


class After(Before):
    """The same, after an update."""

    parameters_type = Present
    parameter_versions = (
        ParameterVersion(
            "", type=Former, convert=lambda old: Present(frames=60 if old.mode == "fast" else 30)
        ),
        ParameterVersion("camera.example.com/v2", "Camera"),
    )


async def test_stored_parameters_of_an_earlier_version_are_converted_after_an_update(
    plugin, claims, devices, start
):
    claims.store(claim_body(A, "cam-0", config=[opaque({"mode": "fast"})]))
    before, after = Before(), After()
    use(before, devices)
    assert (await plugin.prepare(reference(A)))[A].error is None

    plugin = await start()
    use(after, devices)
    claims.answers = False
    assert (await plugin.queue.prepare_again(reference(A))).error is None
    assert await plugin.unprepare(reference(A)) == {A: None}

    assert before.seen == [("prepare", Former(mode="fast"))]
    assert after.seen == [("prepare", Present(frames=60)), ("unprepare", Present(frames=60))]


class Batches(EmptyDriver):
    """A driver that takes the claims of a pod together."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []

    def prepare_claims(self, claims):
        self._note(claims)
        return {
            item.claim.uid: [Edits() for _ in item.devices]
            if item.claim.uid != B
            else DriverError("the bus is gone")
            for item in claims
        }

    def unprepare_claims(self, claims):
        self._note(claims)
        return {item.claim.uid: None for item in claims}

    def _note(self, claims) -> None:
        self.asked.append([str(device.name) for item in claims for device in item.devices])


async def test_the_claims_of_a_pod_come_to_a_driver_of_batches_in_one_call(plugin, claims, devices):
    driver = Batches()
    use(driver, devices)
    claims.store(claim_body(A, "cam-0", "cam-1"), claim_body(B, "cam-2"), claim_body(C, "cam-3"))

    answers = await plugin.prepare(*(reference(uid) for uid in (A, B, C)))

    assert driver.asked == [["cam-0", "cam-1", "cam-2", "cam-3"], ["cam-2"]], "and the rollback"
    assert [answers[A].error, answers[C].error] == [None, None]
    assert answers[B].error == f"claim lab/claim-uid-b: driver {DRIVER}: the bus is gone"
    driver.asked.clear()
    assert await plugin.unprepare(reference(A), reference(C)) == {A: None, C: None}
    assert driver.asked == [["cam-0", "cam-1", "cam-3"]]


class Slow(EmptyDriver):
    """A driver whose reset continues after its call."""

    wiping = True

    def prepare(self, claim, device):
        return Edits()

    def reset(self, device):
        if self.wiping:
            raise ReleasePendingError(f"{device.name} is being wiped")


async def test_the_pod_terminates_while_the_driver_continues_and_its_device_is_held_until_then(
    plugin, claims, devices
):
    driver = Slow()
    use(driver, devices)
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-0"))
    assert (await plugin.prepare(reference(A)))[A].error is None

    assert await plugin.unprepare(reference(A)) == {A: None}
    assert (plugin.files(), await plugin.states()) == (set(), {A: "unpreparing"})
    assert await plugin.recovery.recover() == 1
    assert "still prepared for claim" in (await plugin.prepare(reference(B)))[B].error

    driver.wiping = False
    assert await plugin.recovery.recover() == 0
    assert (await plugin.prepare(reference(B)))[B].error is None


async def test_parameters_that_do_not_fit_are_an_error_of_the_claim_with_request_and_device(
    plugin, claims, devices
):
    claims.store(claim_body(A, "cam-0", "cam-1"))

    async def refuse(claim, allocated):
        raise BadParametersError("the opaque parameters are invalid: mode: ...", index=1)

    devices.prepare_claim = refuse
    answer = (await plugin.prepare(reference(A)))[A]
    assert (answer.error, answer.reason) == (
        "claim lab/claim-uid-a, request main, device cam-1: the opaque parameters are invalid: "
        "mode: ...",
        "BadConfig",
    )


HELD_SECONDS = 0.06


async def hold(devices, name: str) -> None:
    """Let calls for a device take until `HELD_SECONDS` from now."""
    devices.held[name] = asyncio.Event()
    asyncio.get_running_loop().call_later(HELD_SECONDS, devices.held[name].set)


async def test_the_steps_of_a_prepare_add_up_to_its_time_and_the_slow_one_is_the_drivers(
    plugin, claims, devices
):
    claims.store(claim_body(A, "cam-0"))
    await hold(devices, "cam-0")
    await plugin.prepare(reference(A))
    (steps,) = plugin.steps
    assert steps.keys() == {"queue", "checkpoint", "fetch", "wait", "driver"}
    assert sum(steps.values()) == pytest.approx(plugin.seconds[0], abs=0.001)
    assert steps.pop("driver") > HELD_SECONDS / 2 > max(steps.values())

    await plugin.prepare(reference(A))
    assert plugin.steps[1].keys() == {"queue", "checkpoint", "fetch"}, "the driver is not called"
    await plugin.unprepare(reference(A))
    assert len(plugin.steps) == 2


async def test_the_wait_for_the_hardware_of_another_claim_is_a_step(plugin, claims, devices):
    claims.store(claim_body(A, "cam-0"), claim_body(B, "cam-0"))
    devices.traits = replace(devices.traits, side_effects=False)
    await hold(devices, "cam-0")
    first = asyncio.create_task(plugin.prepare(reference(A)))
    while not devices.prepares:
        await asyncio.sleep(0)
    await plugin.prepare(reference(B))
    await first
    of_first, of_second = plugin.steps
    assert of_first["driver"] > HELD_SECONDS / 2 > of_first["wait"]
    assert of_second["wait"] > HELD_SECONDS / 2 > of_second["driver"]


async def test_the_rollback_of_a_prepare_that_fails_is_a_step(plugin, claims, devices):
    claims.store(claim_body(A, "cam-0"))
    devices.failing.add("cam-0")
    assert (await plugin.prepare(reference(A)))[A].error is not None
    assert plugin.steps[0].keys() == {"queue", "checkpoint", "fetch", "wait", "driver", "undo"}


async def test_a_claim_that_waits_for_earlier_work_on_it_is_in_the_queue(plugin, claims, devices):
    claims.store(claim_body(A, "cam-0"))
    await plugin.prepare(reference(A))
    await hold(devices, "cam-0")
    unprepare = asyncio.create_task(plugin.unprepare(reference(A)))
    while not devices.unprepares:
        await asyncio.sleep(0)
    await plugin.prepare(reference(A))
    await unprepare
    assert plugin.steps[1]["queue"] > HELD_SECONDS / 2
