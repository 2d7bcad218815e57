"""NodeDeviceReports whose node plugin is gone."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from drakit.testing.apiserver import FakeApiServer
from drakit_daemon.kube import UnavailableError, connect
from drakit_explain.kinds import REPORTS, SLICES
from drakit_explain.reports import project_report
from drakit_formats import crds
from drakit_operator.outdated_reports import OutdatedReports
from drakit_operator.policies.status import DRIVER
from drakit_operator.store import Store
from tests.fakes.operator_reconciler import Bench

NAME = f"n1.{DRIVER}"
PATH = f"/apis/{crds.API_VERSION}/nodedevicereports/{NAME}"
THEN = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


def pool(driver=DRIVER, node="n1", **spec):
    return {
        "metadata": {"name": f"s-{node}-{driver}", "uid": "s"},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "g0"}],
            **spec,
        },
    }


def report(published=1, at=THEN):
    conditions = [
        {"type": kind, "status": "True", "reason": kind, "message": "", "lastTransitionTime": "t"}
        for kind in ("Registered", "EndpointsRunning")
    ]
    return {
        "metadata": {"name": NAME, "uid": "r"},
        "spec": {"nodeName": "n1", "driver": DRIVER},
        "status": {
            "lastUpdateTime": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "conditions": conditions,
            "devices": {"published": published},
        },
    }


class Cluster:
    """The reports of a cluster whose slices change as the test says."""

    def __init__(self, server, session):
        self.server, self.session = server, session
        self.store = Store()
        self.at = 0
        self.reports = OutdatedReports(
            session, self.store.world, now=lambda: THEN + timedelta(seconds=self.at)
        )

    async def refresh(self, *slices):
        for _ in self.store.replace(SLICES, [SLICES.project(each, "v1") for each in slices]):
            pass
        self.store.apply(REPORTS, project_report(await self.session.get(PATH)))
        return await self.reports.refresh(NAME)

    def conditions(self):
        found = self.server.object(PATH)["status"]["conditions"]
        return {each["type"]: (each["status"], each["reason"]) for each in found}


@pytest.fixture
async def cluster(tmp_path):
    async with FakeApiServer() as server:
        server.store(PATH, report())
        async with await connect(server.write_kubeconfig(tmp_path), user_agent="t") as session:
            yield Cluster(server, session)


RUNNING = {"Registered": ("True", "Registered"), "EndpointsRunning": ("True", "EndpointsRunning")}
MARKED = dict.fromkeys(RUNNING, ("Unknown", "Outdated"))


@pytest.mark.parametrize(
    "others", [[], [pool("other")], [pool(node="n2")]], ids=["none", "driver", "node"]
)
async def test_a_report_without_its_slices_is_marked_after_a_minute(cluster, others):
    assert await cluster.refresh(pool(), *others) == 3600
    cluster.at = 10
    assert await cluster.refresh(*others) == 60
    cluster.at = 40
    assert await cluster.refresh(pool(), *others) == 3560, "the kubelet has started again"
    cluster.at = 50
    assert await cluster.refresh(*others) == 60
    assert cluster.conditions() == RUNNING
    cluster.at = 110
    assert await cluster.refresh(*others) is None
    assert cluster.conditions() == MARKED
    (condition, _) = cluster.server.object(PATH)["status"]["conditions"]
    assert condition["lastTransitionTime"] == "2026-05-01T12:01:50Z"
    assert condition["message"].startswith("the kubelet has deleted the ResourceSlices of the")
    found = project_report(cluster.server.object(PATH))
    assert found.outdated
    assert found.registration.startswith("Outdated: the kubelet has deleted")
    cluster.server.requests.clear()
    assert await cluster.refresh(*others) is None
    assert [method for method, _ in cluster.server.requests] == ["GET"], "only that of the test"
    # The plugin is back.
    cluster.server.store(PATH, report())
    assert await cluster.refresh(pool()) == 3490


async def test_a_report_that_is_not_written_for_an_hour_is_marked(cluster):
    cluster.server.store(PATH, report(published=0))
    cluster.at = 3599
    assert await cluster.refresh() == 1
    assert cluster.conditions() == RUNNING
    cluster.at = 3600
    assert await cluster.refresh() is None
    assert cluster.conditions() == MARKED


async def test_a_slice_that_cannot_be_read_may_be_the_one_that_is_missing(cluster):
    unreadable = {**SLICES.unknown, "metadata": {"name": "s", "uid": "s"}}
    assert await cluster.refresh(unreadable) == 3600


async def test_a_report_without_times_and_devices_is_not_marked(cluster):
    body = report(published=0)
    del body["status"]["lastUpdateTime"]
    cluster.server.store(PATH, body)
    assert await cluster.refresh() is None
    assert cluster.conditions() == RUNNING


@pytest.mark.parametrize(
    ("failure", "again"),
    [
        pytest.param({"status": 409, "reason": "Conflict"}, 60, id="written-meanwhile"),
        pytest.param({"status": 404, "reason": "NotFound"}, 60, id="deleted-meanwhile"),
        pytest.param({"status": 403, "reason": "Forbidden"}, 300, id="not-allowed"),
    ],
)
async def test_a_report_that_cannot_be_marked_is_looked_at_again(cluster, failure, again):
    cluster.server.fail("PATCH", PATH, times=1, **failure)
    cluster.at = 4000
    assert await cluster.refresh() == again
    assert await cluster.refresh() is None
    assert cluster.conditions() == MARKED


async def test_an_api_server_that_does_not_answer_is_an_error_of_the_caller(cluster):
    cluster.server.fail("PATCH", PATH, status=503)
    cluster.at = 4000
    with pytest.raises(UnavailableError):
        await cluster.refresh()


@pytest.mark.looptime
async def test_reports_are_looked_at_when_they_change_or_their_slices_come_or_go():
    seen = [
        (REPORTS, report(), False, 1),
        (REPORTS, report(published=2), False, 2),
        (SLICES, pool(), False, 3),
        (SLICES, pool(devices=[{"name": "g1"}]), False, 3),
        (SLICES, pool(), True, 4),
    ]
    async with Bench().running() as bench:
        for kind, body, gone, number in seen:
            bench.see(kind, body, gone=gone)
            await asyncio.sleep(2)
            assert bench.refreshed_reports == [NAME] * number
