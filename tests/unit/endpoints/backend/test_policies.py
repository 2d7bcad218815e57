"""Policies and held devices of a backend, also of one that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest

from drakit.device import ClaimReference, HeldDevice, HeldNode, RejectedDevice
from drakit.driver import Policy
from drakit_driver.runtime import endpoint as endpoint_module
from drakit_driver.runtime.contract import MAX_DEVICES
from drakit_driver.runtime.latest_value import LatestValue
from drakit_driver.runtime.policies import PolicyFeed
from drakit_nodeplugin.endpoints.backend.connection import BackendPolicies
from drakit_nodeplugin.endpoints.backend.convert import (
    MAX_CONFLICTS,
    InventoryReader,
    outcome_of,
    rejected_of,
)
from drakit_nodeplugin.endpoints.wire import CallFailedError, GarbageError, Turns
from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.unit.endpoints.camera import until

DRIVER = "lamps.example.com"
HALL = Policy(
    name="hall", created=datetime(2026, 1, 1, tzinfo=UTC), generation=3, spec={"lamps": 2}
)
CLAIM = ClaimReference(namespace="lab", name="desk", uid="uid-a")


class Client:
    """A backend's answers to the two methods."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.apply: Callable[[], bytes] = lambda: b""
        self.held: Callable[[], bytes] = lambda: b""

    async def call(self, method: str, request: bytes, *, timeout_seconds: float) -> bytes:
        kind = {
            "ApplyPolicies": (pb.ApplyPoliciesRequest, self.apply),
            "UpdateHeldDevices": (pb.UpdateHeldDevicesRequest, self.held),
        }
        parse, answer = kind[method]
        self.calls.append((method, parse.FromString(request)))
        return answer()


def failing(text: str, code: grpc.StatusCode) -> Callable[[], bytes]:
    def fail() -> bytes:
        raise CallFailedError(text, code=code)

    return fail


class Rig:
    def __init__(self) -> None:
        self.client, self.feed, self.latest = Client(), PolicyFeed(), LatestValue[bytes]()
        self.invalid: list[dict[str, str]] = []
        self.feed.on_invalid = lambda policies, problems: self.invalid.append(dict(problems))
        self.feed.offer({"hall": HALL})
        node = HeldNode(type="c", major=1, minor=2, identity="a")
        self.feed.stored({"hall-0": {CLAIM: HeldDevice(claims=(CLAIM,), nodes=(node,))}})
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        policies = BackendPolicies(DRIVER, self.client, self.feed, self.latest)
        self.tasks.add(asyncio.create_task(policies.run()))

    def called(self, method: str) -> list[Any]:
        return [request for name, request in self.client.calls if name == method]


@pytest.fixture
async def rig(monkeypatch):
    monkeypatch.setattr(endpoint_module, "POLICIES_PACE_SECONDS", 0.0)
    rig = Rig()
    yield rig
    for task in rig.tasks:
        task.cancel()
    await asyncio.wait(rig.tasks)


async def test_held_devices_come_before_policies_and_the_spec_is_json(rig):
    rig.start()
    await until(lambda: rig.feed.in_force is not None)
    (first, held), (second, applied) = rig.client.calls[:2]
    assert (first, second) == ("UpdateHeldDevices", "ApplyPolicies")
    (claim,) = held.claims
    assert (claim.uid, claim.devices[0].name, claim.devices[0].nodes[0].minor) == (
        "uid-a",
        "hall-0",
        2,
    )
    (policy,) = applied.policies
    assert (policy.name, policy.generation, policy.spec) == ("hall", 3, '{"lamps":2}')
    assert datetime.fromtimestamp(policy.created, UTC) == HALL.created


REFUSALS = {
    "refused": (
        lambda: pb.ApplyPoliciesResponse(error="no lamp\nin the hall").SerializeToString(),
        "no lamp in the hall",
    ),
    "garbage": (lambda: b"\xff", "with a malformed protobuf message"),
    "too-large": (lambda: b"\0" * (1024 * 1024 + 1), "with more than 1 MiB"),
    "unimplemented": (
        failing("does not implement ApplyPolicies", grpc.StatusCode.UNIMPLEMENTED),
        "its backend does not implement ApplyPolicies",
    ),
}


@pytest.mark.parametrize(("answer", "reason"), REFUSALS.values(), ids=REFUSALS)
async def test_policies_that_are_not_applied_are_refused_with_the_reason(rig, answer, reason):
    rig.client.apply = answer
    rig.start()
    await until(lambda: rig.feed.refusal is not None)
    assert reason in rig.feed.refusal
    assert rig.feed.in_force is None
    assert rig.feed.stop_reason == f"it refuses its policies: {rig.feed.refusal}"


async def test_invalid_policies_are_passed_on_but_only_those_of_the_request(rig):
    long = "spec.lamps: " + "x" * 5000
    rig.client.apply = lambda: pb.ApplyPoliciesResponse(
        invalid=[
            pb.InvalidPolicy(name="hall", problem=long),
            pb.InvalidPolicy(name="other", problem="a"),
        ]
    ).SerializeToString()
    rig.start()
    await until(lambda: rig.invalid)
    assert rig.invalid[0].keys() == {"hall"}
    assert len(rig.invalid[0]["hall"]) <= 1024
    assert rig.feed.in_force is None


async def test_a_backend_that_does_not_get_the_held_devices_is_disconnected(rig):
    rig.client.held = failing("failed in UpdateHeldDevices: no", grpc.StatusCode.INTERNAL)
    rig.start()
    await until(lambda: rig.latest.over is not None)
    assert rig.latest.over.reason == "its backend failed in UpdateHeldDevices: no"
    assert rig.called("ApplyPolicies") == []


async def test_a_backend_can_lack_held_devices(rig):
    rig.client.held = failing("does not implement it", grpc.StatusCode.UNIMPLEMENTED)
    rig.start()
    await until(lambda: rig.feed.in_force is not None)


# ---------------------------------------------------------------- reports


def test_reports_are_cut_and_unknown_reasons_become_other():
    long = "x" * 5000
    rejected = rejected_of(pb.RejectedDevice(device=long, reason="Refused", message=long))
    assert (rejected.reason, len(rejected.device), len(rejected.message)) == ("Other", 1024, 1024)
    assert rejected_of(pb.RejectedDevice(device="a", reason="InUse")) == RejectedDevice(
        device="a", reason="InUse"
    )
    conflicts = [pb.PolicyConflict(device=long, policy=long)] * (MAX_CONFLICTS + 1)
    outcome = outcome_of(pb.PolicyOutcome(policy="hall", matched=2, conflicts=conflicts))
    assert len(outcome.conflicts) == MAX_CONFLICTS
    assert len(outcome.conflicts[0].policy) == 1024


async def test_too_many_reports_are_refused():
    message = pb.WatchDevicesResponse(withdrawn=["a"] * (MAX_DEVICES + 1))
    with pytest.raises(GarbageError, match="more than 16,384 withdrawn devices"):
        await InventoryReader().read(message.SerializeToString(), Turns())
