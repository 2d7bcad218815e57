"""Writes of slices: their times and number, errors, and changes by other clients."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from drakit import Health
from drakit_nodeplugin.devices.model import StampedTaint
from drakit_nodeplugin.slices import publisher
from drakit_nodeplugin.slices.plan import PoolIdentity
from tests.fakes.kube import FakeApiServer, StatusError
from tests.unit.slices.conftest import NODES, SLICES, Published
from tests.unit.slices.world import NODE, counter_set, device, many, pool, taint

pytestmark = pytest.mark.looptime

GPUS = f"{NODE}/gpus"
CONFLICT = "another client changed slices of this node plugin; they are restored"


def path(body) -> str:
    return f"{SLICES}/{body['metadata']['name']}"


# ------------------------------------------------------------ what is written


async def test_devices_are_published_and_changes_follow(published: Published):
    assert await published.publish(pool("a", "b")) == ["POST"]
    assert await published.publish(pool("a")) == ["PUT"]
    assert published.devices() == {"a"}
    (body,) = published.slices()
    assert body["spec"]["nodeName"] == NODE
    assert body["metadata"]["ownerReferences"][0]["uid"] == "node-uid"
    assert published.measured == [("create", True), ("update", True)]


async def test_nothing_is_written_before_the_driver_has_listed_devices_or_without_a_change(
    published: Published,
):
    assert await published.settled() == []
    await published.publish(pool("a"))
    assert await published.publish(pool("a"), seconds=600) == []


async def test_a_restart_writes_nothing(published: Published):
    assert len(await published.publish(pool(*many(100), counter_sets=(counter_set("gpu-0"),)))) == 3
    await published.start()
    assert await published.settled(60) == []


async def test_a_change_is_written_within_a_third_of_a_second(published: Published):
    await published.publish(pool("a"))
    began = asyncio.get_running_loop().time()
    published.source.publish(pool("a", "b"))
    await asyncio.sleep(0.3)
    ((when, _, _),) = published.link.writes
    assert 0.2 <= when - began <= 0.3


async def test_a_thousand_changes_a_second_are_one_write_a_second_and_slice(published: Published):
    usual = many(100)
    await published.publish(pool(*usual))
    for step in range(1000):  # 10 s
        devices = [*usual]
        devices[step % 100] = device(f"dev-{step % 100}", attributes={"step": step})
        published.source.publish(pool(*devices))
        await asyncio.sleep(0.01)
    await asyncio.sleep(5)
    by_slice: dict[str, list[float]] = {}
    for when, _, name in published.link.writes:
        by_slice.setdefault(name, []).append(when)
    assert len(by_slice) == 2
    for times in by_slice.values():
        assert len(times) <= 11
        assert all(later - earlier >= 1 for earlier, later in pairwise(times))


# ------------------------------------------------------------ pools


async def test_pools_are_published_apart(published: Published, monkeypatch):
    assert await published.publish({NODE: pool("a"), GPUS: pool("a", "b")}) == ["POST", "POST"]
    planned: list[str] = []
    planning = publisher.planning

    def counted(*args: Any, identity: PoolIdentity, **fields: Any) -> Any:
        planned.append(identity.pool)
        return planning(*args, identity=identity, **fields)

    monkeypatch.setattr(publisher, "planning", counted)
    assert await published.publish({NODE: pool("a"), GPUS: pool("a", "c")}) == ["PUT"]
    assert set(planned) == {GPUS}, "a backend with many pools changes one"
    assert {body["spec"]["pool"]["name"] for body in published.slices()} == {NODE, GPUS}
    nodes = [path for _, path in published.link.asked if path.startswith(NODES)]
    assert len(nodes) == 1, "the Node is read once for all of them"


async def test_a_pool_that_is_not_wanted_any_more_is_deleted(published: Published):
    await published.publish({NODE: pool("a"), GPUS: pool(*many(100))})
    assert await published.publish({NODE: pool("a")}) == ["DELETE", "DELETE"]
    assert await published.publish({NODE: pool("a"), GPUS: pool("b")}) == ["POST"]


async def test_a_pool_that_gets_new_names_all_the_time_has_few_publishers(published: Published):
    await published.publish({NODE: pool("a")})
    for number in range(120):
        published.source.publish({NODE: pool("a"), f"{NODE}/{number}": pool("b")})
        await asyncio.sleep(0.25)
        assert len(published.publisher._pools) < 12
    assert len(published.new_writes()) / 30 < 4, "writes a second"


@pytest.mark.parametrize("late_seconds", [-1e-9, 0.0, 1e-9])
async def test_a_pool_that_is_back_when_its_publisher_ends_is_published(
    published: Published, late_seconds
):
    loop = asyncio.get_running_loop()
    both = {NODE: pool("a"), GPUS: pool("b")}
    await published.publish(both, seconds=10)
    published.source.publish({NODE: pool("a")})
    publisher = published.publisher._pools[GPUS]
    while publisher._not_before <= loop.time() + 0.9:
        await asyncio.sleep(0.001)
    loop.call_at(publisher._not_before + late_seconds, published.source.publish, both)
    await published.settled(10)
    assert published.devices() == {"a", "b"}


async def test_nothing_runs_on_for_pools_that_are_gone(published: Published):
    await published.publish({NODE: pool("a")})
    before = len(asyncio.all_tasks())
    for number in range(20):
        await published.publish({NODE: pool("a"), f"{NODE}/{number}": pool("b")})
    await published.publish({NODE: pool("a")})
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.5, 0.7, 0.9, 1.1])
async def test_a_pool_that_is_wanted_again_while_it_is_deleted_returns(
    published: Published, seconds: float
):
    await published.publish({NODE: pool("a"), GPUS: pool(*many(100))})
    published.link.seconds = 1.0  # two deletes: longer than it takes to look for new pools
    published.source.publish({NODE: pool("a")})
    await asyncio.sleep(seconds)
    await published.publish({NODE: pool("a"), GPUS: pool(*many(100))}, seconds=20)
    assert len(published.devices()) == 101


async def test_a_pool_that_is_wanted_again_just_as_its_publisher_ends_returns(
    published: Published,
):
    began = asyncio.get_running_loop().time()
    await published.publish({NODE: pool("a"), GPUS: pool("b")}, seconds=10)
    published.source.publish({NODE: pool("a")}, held=[GPUS])  # looked for at 10.2, next at 11.0
    await asyncio.sleep(0.4)
    published.link.seconds = 0.605  # a delete, from 10.6 to 11.205
    published.source.publish({NODE: pool("a")})
    await asyncio.sleep(began + 11.199 - asyncio.get_running_loop().time())
    published.source.revision.late_seconds = 0.01
    published.source.publish({NODE: pool("a"), GPUS: pool("b")})
    published.link.seconds = 0.01
    await published.settled(60)
    assert published.devices() == {"a", "b"}


async def test_a_pool_is_not_deleted_while_not_all_is_known(published: Published):
    await published.publish({NODE: pool("a"), GPUS: pool("b")})
    assert await published.publish({NODE: pool("a")}, complete=False) == []
    assert await published.publish({NODE: pool("a")}, held=[GPUS]) == []
    assert await published.publish({NODE: pool("a")}) == ["DELETE"]


async def test_a_held_pool_stays_as_it_is(published: Published):
    await published.publish({NODE: pool("a")})
    assert await published.publish({NODE: pool("b")}, held=[NODE]) == []
    assert published.devices() == {"a"}


async def test_an_error_of_one_pool_holds_no_other_up(published: Published):
    published.link.refuse = lambda method, path, body: (
        StatusError(403, "Forbidden", "a policy says no")
        if method == "POST" and body["spec"]["pool"]["name"] == GPUS
        else None
    )
    await published.publish({NODE: pool("a"), GPUS: pool("b")}, seconds=1)
    assert published.devices() == {"a"}
    error = published.publisher.last_error
    assert error is not None
    assert error.startswith(f"pool {GPUS}: ")
    assert "a policy says no" in error
    published.link.refuse = lambda method, path, body: None
    await published.settled(60)
    assert published.devices() == {"a", "b"}
    assert published.publisher.last_error is None


# ------------------------------------------------------------ what others do


async def test_deleted_slices_are_restored_within_two_seconds(published: Published):
    await published.publish(pool(*many(100)))
    for _ in range(10):
        published.server.remove(path(published.slices()[0]))
        await asyncio.sleep(2)
        assert len(published.slices()) == 2
    assert published.new_writes() == ["POST"] * 10


async def test_the_node_is_read_again_when_slices_vanish(published: Published):
    await published.publish(pool("a"))
    published.server.remove(f"{NODES}/{NODE}")
    published.server.store(f"{NODES}/{NODE}", {"metadata": {"uid": "another"}})
    published.server.remove(path(published.slices()[0]))
    assert await published.settled() == ["POST"]
    (body,) = published.slices()
    assert body["metadata"]["ownerReferences"][0]["uid"] == "another"


async def test_the_node_is_read_again_when_an_owner_differs(published: Published):
    await published.publish(pool("a"))
    (body,) = published.slices()
    body["metadata"]["ownerReferences"][0]["uid"] = "another"
    published.server.store(path(body), body)
    published.server.remove(f"{NODES}/{NODE}")
    published.server.store(f"{NODES}/{NODE}", {"metadata": {"uid": "another"}})
    assert await published.settled() == []


async def test_a_change_by_another_writer_is_undone_with_a_backoff(published: Published):
    await published.publish(pool("a"))
    (body,) = published.slices()

    def spoil() -> None:
        spec = published.slices()[0]["spec"] | {"devices": [{"name": "intruder"}]}
        published.server.store(path(body), {"spec": spec})

    def restored(body: dict[str, Any]) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.1, spoil)
        return body

    published.link.change = restored
    spoil()
    await asyncio.sleep(600)
    published.link.change = lambda body: body
    times = [when for when, _, _ in published.link.writes]
    published.link.writes.clear()
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(times) < 20
    assert gaps[0] < 4
    assert max(gaps) == pytest.approx(60, abs=1)
    await published.settled(700)
    assert published.devices() == {"a"}
    began = asyncio.get_running_loop().time()
    spoil()
    await asyncio.sleep(1)
    assert [when - began < 1 for when, _, _ in published.link.writes] == [True], "quiet for long"


async def test_a_change_of_the_driver_does_not_wait_for_a_conflict(published: Published, caplog):
    await published.publish(pool("a"))
    (body,) = published.slices()
    for _ in range(6):
        spec = published.slices()[0]["spec"] | {"devices": [{"name": "intruder"}]}
        published.server.store(path(body), {"spec": spec})
        await asyncio.sleep(20)
    published.source.publish(pool("a", "b"))
    await asyncio.sleep(1.5)
    assert published.devices() == {"a", "b"}
    assert CONFLICT in caplog.messages


async def test_a_conflict_about_one_slice_writes_no_other(published: Published):
    await published.publish(pool(*many(100)))
    first, second = published.slices()
    for generation in range(100, 160):
        spec = first["spec"] | {"devices": [{"name": "intruder"}]}
        of_pool = spec["pool"] | {"generation": generation}
        published.server.store(path(first), {"spec": spec | {"pool": of_pool}})
        await asyncio.sleep(5)
    others = [name for _, _, name in published.link.writes if name == second["metadata"]["name"]]
    assert len(others) <= 10, "only together with the first"


async def test_slices_that_another_instance_has_written_before_the_start_are_no_conflict(
    published: Published, caplog
):
    await published.publish(pool("a"))
    await published.stop()
    (body,) = published.slices()
    body["spec"]["devices"] = [{"name": "of-the-other-configuration"}]
    published.server.store(path(body), body)
    await published.start()
    await published.settled()
    assert published.devices() == {"a"}
    assert CONFLICT not in caplog.messages


async def test_labels_of_others_cause_no_write_and_are_no_conflict(published: Published, caplog):
    await published.publish(pool(*many(56)))
    (body,) = published.slices()
    body["metadata"]["labels"] = {"team": "x"}
    published.server.store(path(body), body)
    assert await published.settled() == []
    assert await published.publish(pool(*many(100))) == ["PUT", "POST"]
    assert CONFLICT not in caplog.messages


async def test_slices_of_another_writer_are_deleted_with_a_backoff(published: Published):
    await published.publish(pool("a"))
    (body,) = published.slices()
    for number in range(60):
        published.server.store(f"{SLICES}/foreign-{number}", {"spec": body["spec"]})
        await asyncio.sleep(5)
    rounds = {round(when) for when, _, _ in published.link.writes}
    assert 3 <= len(rounds) <= 10, "after 0, 2, 4, 8, 16, 32 and then every 60 s"
    await published.settled(120)
    assert len(published.slices()) == 1


# ------------------------------------------------------------ errors


async def test_refused_writes_are_tried_again_with_longer_and_longer_delays(published: Published):
    published.link.refuse = lambda method, path, body: (
        StatusError(500, "InternalError") if method == "POST" else None
    )
    published.source.publish(pool("a"))
    await asyncio.sleep(600)
    assert 10 <= len(published.link.writes) <= 30
    assert published.publisher.last_error is not None
    published.link.refuse = lambda method, path, body: None
    await asyncio.sleep(61)
    assert published.devices() == {"a"}
    assert published.publisher.last_error is None


async def test_a_slice_that_is_refused_does_not_stop_the_others(published: Published):
    await published.publish(pool(*many(100)))
    published.link.refuse = lambda method, path, body: (
        StatusError(422, "Invalid", "this slice is not liked")
        if method == "PUT" and body["spec"]["devices"][0]["name"] == "dev-0"
        else None
    )
    first, last = device("dev-0", taint()), device("dev-99", taint())
    await published.publish(pool(first, *many(98, start=1), last), seconds=1)
    bodies = {d["name"]: d for body in published.slices() for d in body["spec"]["devices"]}
    assert "taints" in bodies["dev-99"]
    assert "not liked" in (published.publisher.last_error or "")
    assert len(await published.settled(600)) <= 30
    published.link.refuse = lambda method, path, body: None
    await published.settled(61)
    assert published.publisher.last_error is None


async def test_a_device_that_the_api_server_names_is_rejected(published: Published):
    cause = {"field": "spec.devices[1].attributes[x]", "message": "is not liked"}
    published.link.refuse = lambda method, path, body: (
        StatusError(422, "Invalid", "no", details={"causes": [cause]})
        if any(
            each["name"] == "bad" and each["attributes"]["model"] == {"string": "x"}
            for each in (body or {"spec": {"devices": ()}})["spec"]["devices"]
        )
        else None
    )
    await published.publish(pool("a", "bad", "c"))
    assert published.devices() == {"a", "c"}
    assert "is not liked" in published.publisher.rejected["bad"]
    assert await published.settled(600) == []
    hot = device("bad", health=Health.unhealthy("too hot"))
    writes = await published.publish(pool("a", hot, "c"), seconds=600)
    assert writes == [], "health alone is no other device"
    assert published.rejected == [dict(published.publisher.rejected)], "it is reported once"
    other = device("bad", attributes={"model": "y"})
    assert await published.publish(pool("a", other, "c")) == ["PUT"]


@dataclass
class Backup:
    """Restore an earlier state of etcd."""

    server: FakeApiServer

    def __post_init__(self) -> None:
        self.version = self.server.cluster.version
        self.objects = copy.deepcopy(self.server.cluster.objects)

    def restore(self) -> None:
        """No watch receives it."""
        self.server.cluster.version = self.version
        self.server.cluster.objects = self.objects
        self.server.cluster.history.clear()


async def test_after_a_restore_of_etcd_a_slice_can_be_written_again(published: Published):
    await published.publish(pool("a"))
    backup = Backup(published.server)
    for name in ("b", "c", "d"):
        await published.publish(pool(name))
    backup.restore()
    await published.publish(pool("e"), seconds=10)
    assert published.devices() == {"e"}
    assert published.publisher.last_error is None


async def test_after_a_restore_of_etcd_a_list_is_believed(published: Published):
    await published.publish(pool("a"))
    backup = Backup(published.server)
    await published.publish(pool("b"))
    backup.restore()
    published.server.cluster.oldest_version = 10**6
    published.server.drop_watches()
    await published.settled(10)
    assert published.devices() == {"b"}


async def test_a_list_that_fails_is_an_error_of_publishing(published: Published):
    await published.stop()
    published.link.broken = True
    await published.start()
    await asyncio.sleep(1)
    assert "the server is unavailable" in (published.publisher.last_error or "")
    assert not published.publisher.listed.is_set()
    published.link.broken = False
    await asyncio.sleep(40)
    assert published.publisher.last_error is None
    assert published.publisher.listed.is_set()


async def test_a_fault_in_one_pool_is_tried_again_and_ends_nothing_else(
    published: Published, caplog
):
    faulty = StampedTaint(key="k", value="", effect="NoSchedule", added_at=10**20)
    await published.publish({NODE: pool("a"), GPUS: pool(device("b", faulty))}, seconds=600)
    assert published.devices() == {"a"}
    assert (published.publisher.last_error or "").startswith(f"pool {GPUS}: an internal error of")
    faults = [each for each in caplog.records if "an internal error" in each.message]
    assert 10 <= len(faults) <= 30
    assert all(each.exc_info and each.pool == GPUS for each in faults)
    await published.publish({NODE: pool("a", "c"), GPUS: pool("b")}, seconds=61)
    assert published.devices() == {"a", "b", "c"}
    assert published.publisher.last_error is None
