"""Writes and removals of reports."""

from __future__ import annotations

import asyncio
import itertools
import logging
from types import SimpleNamespace

import pytest

from drakit import Device, Health, RejectedDevice
from drakit.device import Inventory, PolicyOutcome
from drakit_daemon.kube import NotFoundError, UnavailableError
from drakit_nodeplugin.changes import Revision
from drakit_nodeplugin.devices.counts import DeviceCounts
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.devices.model import EndpointStatus
from drakit_nodeplugin.host import report
from drakit_nodeplugin.host.node import PluginNode
from drakit_nodeplugin.host.policies import PolicyState
from drakit_nodeplugin.host.report import (
    DriverReport,
    ReportSources,
    remove_former_reports,
)
from drakit_nodeplugin.kubelet.server import RegistrationStatus
from drakit_nodeplugin.state.checkpoint import CheckpointError
from drakit_nodeplugin.state.lock import DriverLock
from tests.fakes.tasks import running, until
from tests.unit.devices.conftest import DRIVER as CAMERA
from tests.unit.devices.conftest import Node

DRIVER, NODE = "lamps.example.com", "node-1"
MISSING = NotFoundError(status=404, reason="NotFound", message="no", method="PATCH", path="/x")
DOWN = UnavailableError.no_response("PATCH", "/x", why="nothing")


class Api:
    """The requests of reports, with their times."""

    def __init__(self) -> None:
        self.applied: list[tuple[float, dict]] = []
        self.attempts = 0
        self.deleted: list[str] = []
        self.created: list[dict] = []
        self.stored: dict | None = None
        self.failure: Exception | None = None
        self.status_failure: Exception | None = None

    async def apply(self, path, body, *, field_manager):
        name = body["metadata"]["name"]
        if path.endswith(f"/nodedevicereports/{name}"):
            self.attempts += 1
            if self.failure is not None:
                raise self.failure
            assert "status" not in body, "the API server ignores it"
            self.created.append(body)
            self.stored = (self.stored or {}) | body
            return self.stored
        assert path.endswith(f"/nodedevicereports/{name}/status")
        if failure := self.failure or self.status_failure:
            raise failure
        if self.stored is None:
            raise MISSING
        self.stored = self.stored | body
        self.applied.append((asyncio.get_running_loop().time(), body))
        return self.stored

    async def delete(self, path):
        if self.failure is not None:
            raise self.failure
        self.deleted.append(path.rpartition("/")[2])


class Sources:
    """The sources of a report."""

    def __init__(self) -> None:
        self.endpoint = EndpointStatus(name=DRIVER, state="Running")
        self.manager = SimpleNamespace(
            revision=Revision(),
            endpoint_changes=Revision(),
            rejected_by_drivers=[],
            policy_outcomes=[],
            rejected={},
            rejected_policies={},
            rejected_count=0,
            health_states=list,
            endpoint_statuses=lambda: [self.endpoint],
        )
        self.policies = SimpleNamespace(revision=Revision(), refusal=None, states=list)
        self.publisher = SimpleNamespace(
            listed=asyncio.Event(), rejected={}, explain_dropped=dict, published_count=2
        )
        self.publisher.listed.set()
        self.states_: dict[str, int] = {}
        self.uids_: set[str] = set()
        self.registration = SimpleNamespace(status=RegistrationStatus(state="registered"))
        self.count = 1
        self.broken = False

    async def counts(self):
        return {NODE: DeviceCounts(free=self.count), "yard": DeviceCounts(unhealthy=1)}

    async def states(self):
        if self.broken:
            raise CheckpointError("no space")
        return self.states_

    async def uids(self, *, state):
        return self.uids_ if state == "unpreparing" else set()

    async def find(self, uids):
        return {
            uid: SimpleNamespace(namespace="lab", name=uid, state="unpreparing") for uid in uids
        }


class Rig:
    def __init__(self, manager: DeviceManager | None = None) -> None:
        self.api, self.sources = Api(), Sources()
        self.node = PluginNode(NODE)
        self.node.uid = "node-uid"
        self.session = asyncio.get_running_loop().create_future()
        self.session.set_result(self.api)
        self.report = DriverReport(
            DRIVER,
            ReportSources(
                manager=manager or self.sources.manager,
                publisher=self.sources.publisher,
                checkpoint=self.sources,
                counts=self.sources.counts,
                registration=self.sources.registration,
                policies=self.sources.policies,
            ),
            node=self.node,
            session=self.session,
        )

    @property
    def published(self) -> list[int]:
        return [body["status"]["devices"]["free"] for _, body in self.api.applied]


@pytest.fixture
async def rig():
    rig = Rig()
    async with running(rig.report.run()):
        yield rig


@pytest.mark.looptime
async def test_a_thousand_changes_are_a_write_in_ten_seconds_and_the_last_one_counts(rig):
    for count in range(1000):
        rig.sources.count = count
        rig.sources.manager.revision.advance()
        await asyncio.sleep(0.06)
    await asyncio.sleep(15)
    times = [at for at, _ in rig.api.applied]
    assert rig.published[-1] == 999
    assert all(b - a >= report.PACE_SECONDS for a, b in itertools.pairwise(times))
    assert len(times) <= 8


@pytest.mark.looptime
async def test_without_a_change_nothing_is_written_but_twice_an_hour(rig):
    await asyncio.sleep(800)
    assert len(rig.api.applied) == 1
    await asyncio.sleep(2800)
    assert 2 <= len(rig.api.applied) <= 5


@pytest.mark.looptime
async def test_a_change_without_a_notification_is_found_within_ten_seconds(rig):
    await asyncio.sleep(30)
    rig.sources.states_ = {"prepared": 1}
    await asyncio.sleep(11)
    assert rig.api.applied[-1][1]["status"]["claims"]["prepared"] == 1


@pytest.mark.looptime
async def test_reports_other_than_devices_are_written_within_seconds(rig):
    await asyncio.sleep(33)
    rig.sources.manager.rejected_by_drivers = [RejectedDevice(device="/dev/sda", reason="InUse")]
    rig.sources.manager.endpoint_changes.advance()
    await asyncio.sleep(2)
    assert rig.api.applied[-1][1]["status"]["rejectedDevices"][0]["device"] == "/dev/sda"
    await asyncio.sleep(30)
    rig.sources.policies.refusal = "it is too old"
    rig.sources.policies.revision.advance()
    await asyncio.sleep(2)
    assert rig.api.applied[-1][1]["status"]["policiesRefused"] == "it is too old"


@pytest.mark.looptime
async def test_devices_that_the_api_server_refuses_are_a_problem_of_their_policy(rig):
    """The driver has applied the policy, and counts them as published."""
    sources = rig.sources
    sources.manager.device = lambda pool, name: Device(name=name, attributes={"policy": name[:3]})
    sources.manager.policy_outcomes = [
        PolicyOutcome(policy="kvm", matched=2, published=2),
        PolicyOutcome(policy="tty", matched=1, published=1),
    ]
    sources.policies.states = lambda: [
        PolicyState(name=name, uid=name, observed_generation=1, generation=1)
        for name in ("kvm", "tty")
    ]
    sources.publisher.rejected = {"kvm-1": "no", "usb/kvm-0": "the step is too large"}
    await asyncio.sleep(33)
    status = rig.api.applied[-1][1]["status"]
    kvm, tty = status["policies"]
    assert (kvm["published"], tty["published"]) == (0, 1)
    assert kvm["problem"] == "2 of its devices cannot be published, such as kvm-1: no"
    assert "problem" not in tty
    assert {each["policy"] for each in status["rejectedDevices"]} == {"kvm"}


@pytest.mark.looptime
async def test_devices_that_cannot_be_published_are_a_problem_of_their_policy():
    """The node plugin's own validation rejects them."""
    node = Node()
    async with node.plugin() as manager:
        rig = Rig(manager)
        rig.sources.policies.states = lambda: [
            PolicyState(name="cams", uid="cams", observed_generation=1, generation=1)
        ]
        of_policy = {"policy": "cams"}
        devices = [
            Device(name="fine", attributes=of_policy),
            Device(name="odd", pool="yard", attributes=of_policy | {"no name": 1}),
            Device(name="odd", attributes={"no name": 1}),
        ]
        outcome = PolicyOutcome(policy="cams", matched=2, published=2)
        manager.replaced(CAMERA, Inventory(devices=devices, policies=[outcome]))
        async with running(rig.report.run()):
            await asyncio.sleep(15)
    status = rig.api.applied[-1][1]["status"]
    (cams,) = status["policies"]
    assert cams["published"] == 1
    assert cams["problem"].startswith("1 of its devices cannot be published, such as yard/odd: ")
    of = {each["device"]: each.get("policy") for each in status["rejectedDevices"]}
    assert of == {"odd": None, "yard/odd": "cams"}


@pytest.mark.looptime
async def test_unhealthy_devices_are_named_with_their_messages_and_gone_ones_are_not():
    def camera(name: str, pool: str, message: str = "") -> Device:
        health = Health.unhealthy(message) if message else Health.healthy()
        return Device(name=name, pool=pool, health=health)

    node = Node()
    node.store.used = {NODE: {"held"}}
    async with node.plugin() as manager:
        rig = Rig(manager)
        held, front = camera("held", "", "dark"), camera("front", "", "no signal")
        back, fine = camera("back", "yard", "too hot"), camera("fine", "yard")
        manager.replaced(CAMERA, Inventory(devices=[held, front, back, fine]))
        async with running(rig.report.run()):
            await asyncio.sleep(15)
            manager.replaced(CAMERA, Inventory(devices=[front, back, fine]))
            await asyncio.sleep(15)
            manager.stopped(CAMERA, "its process has ended")
            await asyncio.sleep(15)
    found = [body["status"]["unhealthyDevices"] for _, body in rig.api.applied]
    others = [
        {"pool": NODE, "device": "front", "message": "no signal"},
        {"pool": f"{NODE}/yard", "device": "back", "message": "too hot"},
    ]
    assert found == [
        [others[0], {"pool": NODE, "device": "held", "message": "dark"}, others[1]],
        others,
        [],
    ]


@pytest.mark.looptime
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda s: setattr(s.registration, "status", RegistrationStatus()), id="not-registered"
        ),
        pytest.param(
            lambda s: setattr(s, "endpoint", EndpointStatus(name=DRIVER, state="Waiting")),
            id="not-listed",
        ),
        pytest.param(lambda s: s.publisher.listed.clear(), id="slices-not-listed"),
    ],
)
async def test_a_restart_keeps_the_old_report_until_the_driver_is_back_or_half_a_minute(change):
    rig = Rig()
    change(rig.sources)
    async with running(rig.report.run()):
        await asyncio.sleep(25)
        assert rig.api.applied == []
        await asyncio.sleep(20)
        assert len(rig.api.applied) == 1


@pytest.mark.looptime
async def test_a_report_is_not_written_before_its_numbers_are_known():
    rig = Rig()
    rig.sources.broken = True
    async with running(rig.report.run()):
        await asyncio.sleep(60)
        assert rig.api.applied == []
        rig.sources.broken = False
        await asyncio.sleep(11)
        assert len(rig.api.applied) == 1


@pytest.mark.looptime
async def test_without_the_resource_it_is_logged_once_and_tried_with_backoff(caplog):
    caplog.set_level(logging.WARNING)
    rig = Rig()
    rig.api.failure = MISSING
    async with running(rig.report.run()):
        await asyncio.sleep(3600)
        assert 10 <= rig.api.attempts <= 40
        assert [each.message for each in caplog.records] == ["report cannot be written"]
        rig.api.failure = None
        await asyncio.sleep(300)
        assert len(rig.api.applied) == 1


@pytest.mark.looptime
async def test_a_report_that_another_client_deletes_is_created_with_the_next_change(rig):
    await asyncio.sleep(33)
    rig.api.stored = None
    rig.sources.count = 2
    await asyncio.sleep(15)
    assert [each["spec"]["nodeName"] for each in rig.api.created] == [NODE, NODE]
    assert rig.api.stored["status"]["devices"]["free"] == 2


@pytest.mark.looptime
async def test_after_a_crash_between_the_two_writes_the_next_process_writes_the_status():
    rig = Rig()
    rig.api.status_failure = DOWN
    async with running(rig.report.run()):
        await asyncio.sleep(33)
    assert "status" not in rig.api.stored
    again = Rig()
    again.api.stored = rig.api.stored
    async with running(again.report.run()):
        await asyncio.sleep(33)
    assert again.api.stored["status"]["devices"]["free"] == 1
    assert again.api.stored["spec"] == rig.api.stored["spec"]


@pytest.mark.looptime
async def test_a_new_process_keeps_the_times_of_conditions_and_sets_that_of_the_report():
    rig = Rig()
    old = {"status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"}
    kinds = ("Registered", "EndpointsRunning")
    rig.api.stored = {"status": {"conditions": [{"type": kind, **old} for kind in kinds]}}
    rig.sources.endpoint = EndpointStatus(name=DRIVER, state="Stopped", reason="it crashed")
    async with running(rig.report.run()):
        await asyncio.sleep(33)
        rig.sources.count = 2
        await asyncio.sleep(15)
    for _, body in rig.api.applied:
        registered, running_, _ = body["status"]["conditions"]
        assert registered["lastTransitionTime"] == "2020-01-01T00:00:00Z"
        assert running_["lastTransitionTime"] > "2026"
        assert body["status"]["lastUpdateTime"] >= running_["lastTransitionTime"]
    assert len(rig.api.applied) == 2


@pytest.mark.looptime
async def test_a_claim_is_stuck_after_a_minute_and_only_the_first_ones_are_named(rig):
    rig.sources.states_ = {"unpreparing": 30}
    rig.sources.uids_ = {f"uid-{n:02}" for n in range(30)}
    await asyncio.sleep(45)
    assert rig.api.applied[-1][1]["status"]["claims"]["stuck"] == 0
    await asyncio.sleep(40)
    status = rig.api.applied[-1][1]["status"]
    assert status["claims"]["stuck"] == 30
    assert [each["uid"] for each in status["stuckClaims"]] == [f"uid-{n:02}" for n in range(20)]
    assert status["stuckClaimsOmitted"] == 10
    rig.sources.states_, rig.sources.uids_ = {}, set()
    await asyncio.sleep(25)
    assert rig.api.applied[-1][1]["status"]["claims"]["stuck"] == 0


async def test_only_reports_of_unserved_drivers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "FORMER_SECONDS", (0.01, 0.01))
    for name in ("former.example.com", "hosted.example.com", "other.example.com"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.db").touch()
    (tmp_path / "no-driver").mkdir()
    rig = Rig()
    rig.api.failure = DOWN
    other = DriverLock("other.example.com", tmp_path / "other.example.com", instance_uid="other")
    assert await other.try_acquire()
    hosted = {"hosted.example.com"}
    removal = remove_former_reports(tmp_path, hosted=lambda: hosted, node=NODE, session=rig.session)
    async with running(removal):
        await asyncio.sleep(0.1)
        assert rig.api.deleted == []
        rig.api.failure = None
        await until(lambda: rig.api.deleted)
        await asyncio.sleep(0.1)
        assert rig.api.deleted == [f"{NODE}.former.example.com"]
    await other.release()
