"""Publishing to an API server that drops fields of devices, and the detection of such a server."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest

from drakit.device import Capacity, NodeAllocatableResource
from drakit_formats.resource.device import Feature
from drakit_nodeplugin.devices.model import DesiredDevice, DesiredPool
from drakit_nodeplugin.slices.contents import SliceContent, choose
from drakit_nodeplugin.slices.plan import SliceWrite
from tests.fakes.kube import StatusError
from tests.unit.slices.conftest import Published
from tests.unit.slices.world import (
    POOL,
    PoolServer,
    counter_set,
    device,
    many,
    named,
    pool,
    taint,
)

pytestmark = pytest.mark.looptime


def drops(*fields: str):
    """An API server that does not know these fields."""

    def change(body: dict[str, Any]) -> dict[str, Any]:
        spec = dict(body["spec"])
        spec["devices"] = [
            {key: value for key, value in each.items() if key not in fields}
            for each in spec.get("devices", ())
        ]
        if "consumesCounters" in fields:
            spec.pop("sharedCounters", None)
        return body | {"spec": spec}

    return change


def partition(name: str):
    return device(name, consumes={"gpu-0": {"memory": "4"}})


# ------------------------------------------------------------ what is chosen


def test_a_safe_device_is_published_without_the_fields():
    shared = device(
        "a",
        allow_multiple_allocations=True,
        capacity={"size": Capacity(value="8Gi", default="1Gi")},
    )
    chosen = choose(pool(shared), {Feature.MULTIPLE_ALLOCATIONS})
    assert chosen.devices["a"].device.allow_multiple_allocations is False
    assert chosen.devices["a"].device.capacity == {"size": "8Gi"}


def test_a_device_that_is_known_by_name_is_unsafe_without_its_taint():
    chosen = choose(pool("a", named("bad", taint())), set(Feature))
    assert [*chosen.devices] == ["a"]
    assert "DRADeviceTaints" in chosen.rejected["bad"]


@pytest.mark.parametrize(
    ("devices", "dropped"),
    [
        pytest.param(("a",), Feature.COUNTERS, id="nothing-needs-it"),
        pytest.param(("a", device("b", taint())), Feature.TAINTS, id="a-taint-comes-and-goes"),
    ],
)
def test_a_fallback_is_not_published_where(devices, dropped):
    wanted = pool(*devices, fallback=(device("whole"),))
    assert [*choose(wanted, {dropped}).devices] == ["a"]


# ------------------------------------------------------------ how it is noticed


async def test_a_fallback_follows_the_first_answer_that_lacks_something(published: Published):
    published.link.change = drops("consumesCounters")
    writes = await published.publish(
        pool(
            *(partition(f"part-{i}") for i in range(100)),
            counter_sets=(counter_set("gpu-0"),),
            fallback=(device("whole"),),
        )
    )
    assert writes == ["POST"], "nothing was written in vain"
    assert published.devices() == {"whole"}
    assert published.publisher.dropped == {Feature.COUNTERS}
    assert published.publisher.last_error is None
    (note,) = published.dropped
    assert published.publisher.explain_dropped() == {"Counters": note}
    assert note == (
        "the API server does not support these device fields: counters (feature gate "
        "DRAPartitionableDevices); the node plugin publishes the driver's fallback instead"
    )
    assert await published.settled(3600) == []


async def test_without_a_fallback_what_is_not_safe_is_rejected(published: Published):
    published.link.change = drops("taints")
    await published.publish(pool("a", "b"))
    await published.publish(pool("a", device("b", taint())))
    assert published.devices() == {"a"}
    assert published.publisher.rejected == {
        "b": "the device cannot be published safely without its taints (feature gate "
        "DRADeviceTaints), which the API server does not support"
    }
    await published.publish(pool("a", "b"))
    assert published.devices() == {"a", "b"}
    assert published.publisher.rejected == {}
    (note,) = published.dropped
    assert note.endswith("; devices with a NoSchedule or NoExecute taint are not published")


async def test_a_field_that_we_know_no_gate_of_is_reported_and_no_reason_to_write_again(
    published: Published,
):
    published.link.change = drops("attributes")
    assert await published.publish(pool("a"), seconds=3600) == ["POST"]
    assert published.dropped == [
        "the API server does not support some device fields; devices are published without the "
        "unsupported fields"
    ]
    assert await published.publish(pool("a", "b"), seconds=3600) == ["PUT"]


async def test_a_server_that_refuses_lists_gets_none(published: Published):
    cause = {"field": "spec.devices[0].attributes[lanes]", "message": "exactly one is needed"}
    published.link.refuse = lambda method, path, body: (
        StatusError(422, "Invalid", "no", details={"causes": [cause]})
        if method == "POST" and "lanes" in body["spec"]["devices"][0]["attributes"]
        else None
    )
    await published.publish(pool(device("a", attributes={"lanes": (1, 2), "model": "x"})))
    (body,) = published.slices()
    assert body["spec"]["devices"][0]["attributes"] == {"model": {"string": "x"}}
    assert published.publisher.dropped == {Feature.LIST_ATTRIBUTES}
    assert published.publisher.last_error is None
    published.link.change = drops("taints")
    await published.publish(pool(device("a", attributes={"lanes": (1, 2)}), device("b", taint())))
    assert published.publisher.explain_dropped() == {
        "ListAttributes": "the API server does not support these device fields: list attributes "
        "(feature gate DRAListTypeAttributes); devices are published without these attributes",
        "Taints": "the API server does not support these device fields: taints (feature gate "
        "DRADeviceTaints); devices with a NoSchedule or NoExecute taint are not published",
    }


def refuses_sets_of_other_slices(method: str, path: str, body: Any) -> StatusError | None:
    """An API server of Kubernetes 1.34: a device consumes only counters of its own slice."""
    spec = (body or {}).get("spec", {})
    sets = {each["name"] for each in spec.get("sharedCounters", ())}
    causes = [
        {
            "field": f"spec.devices[{index}].consumesCounters[{number}].counterSet",
            "message": "must reference a counterSet defined in the ResourceSlice sharedCounters",
        }
        for index, each in enumerate(spec.get("devices", ()))
        for number, consumed in enumerate(each.get("consumesCounters", ()))
        if consumed["counterSet"] not in sets
    ]
    return StatusError(422, "Invalid", "no", details={"causes": causes}) if causes else None


def refuses_counter_sets(method: str, path: str, body: Any) -> StatusError | None:
    """An API server that accepts fewer counters in a slice."""
    cause = {"field": "spec.sharedCounters", "message": "must have at most 1 item"}
    has_sets = body is not None and "sharedCounters" in body.get("spec", {})
    return StatusError(422, "Invalid", "no", details={"causes": [cause]}) if has_sets else None


@pytest.mark.parametrize("refuse", [refuses_sets_of_other_slices, refuses_counter_sets])
async def test_a_server_that_refuses_counters_gets_the_fallback(published: Published, refuse):
    published.link.refuse = refuse
    await published.publish(
        pool(
            "a",
            *(partition(f"part-{i}") for i in range(100)),
            counter_sets=(counter_set("gpu-0"),),
            fallback=(device("a"), device("whole")),
        )
    )
    assert published.devices() == {"a", "whole"}
    assert not any("sharedCounters" in body["spec"] for body in published.slices())
    assert published.publisher.dropped == {Feature.COUNTERS}
    assert published.publisher.rejected == {}
    assert published.publisher.last_error is None
    (note,) = published.dropped
    assert "DRAPartitionableDevices" in note
    assert await published.settled(3600) == []


async def test_without_a_fallback_refused_counters_cost_all_devices_that_consume_them(
    published: Published,
):
    published.link.refuse = refuses_sets_of_other_slices
    await published.publish(
        pool("a", partition("part-0"), partition("part-1"), counter_sets=(counter_set("gpu-0"),))
    )
    assert published.devices() == {"a"}
    assert published.publisher.rejected.keys() == {"part-0", "part-1"}
    assert "DRAPartitionableDevices" in published.publisher.rejected["part-0"]
    assert await published.settled(3600) == []


async def test_a_server_that_refuses_the_counters_of_one_device_alone_supports_counters(
    published: Published,
):
    cause = {"field": "spec.devices[1].consumesCounters[0].counters[memory]", "message": "no"}
    published.link.refuse = lambda method, path, body: (
        StatusError(422, "Invalid", "no", details={"causes": [cause]})
        if body is not None and "part-1" in [d["name"] for d in body["spec"].get("devices", ())]
        else None
    )
    await published.publish(
        pool(
            partition("part-0"),
            partition("part-1"),
            counter_sets=(counter_set("gpu-0"),),
            fallback=(device("whole"),),
        )
    )
    assert published.devices() == {"part-0"}
    assert published.publisher.dropped == frozenset()


async def test_after_an_upgrade_of_the_server_it_is_tried_again(published: Published):
    published.link.change = drops("consumesCounters")
    await published.publish(
        pool(partition("part"), counter_sets=(counter_set("gpu-0"),), fallback=(device("whole"),))
    )
    assert published.devices() == {"whole"}

    published.link.change = lambda body: body
    assert await published.settled(3600) == []
    published.server.expire_history()
    published.server.drop_watches()
    await published.settled(60)
    assert published.devices() == {"part"}
    assert published.publisher.dropped == frozenset()


async def test_it_is_tried_again_every_ten_minutes_at_most_and_reported_once(published: Published):
    published.link.change = drops("consumesCounters")
    await published.publish(pool("a", partition("part"), counter_sets=(counter_set("gpu-0"),)))
    published.link.dry_runs.clear()
    for _ in range(60):
        published.server.expire_history()
        published.server.drop_watches()
        assert await published.settled(60) == []
    assert published.devices() == {"a"}
    assert len(published.dropped) == 1
    assert 0 < len(published.link.dry_runs) <= 7, "each time the counters are tried"


# ------------------------------------------------------------ taints, before anything is written


def names_without_taints(published: Published) -> set[str]:
    """Return the devices that were ever published without a taint, within the watch history."""
    return {
        each["name"]
        for change in published.server.cluster.history
        for each in (change.new or {}).get("spec", {}).get("devices", ())
        if not each.get("taints")
    }


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(pool("a", device("b", taint())), id="one-slice"),
        pytest.param(
            pool("a", *many(100), device("b", taint()), device("dev-0-b", taint())),
            id="slices-of-which-several-change",
        ),
        pytest.param(pool("a", "c", device("b", replace(taint(), effect="NoExecute"))), id="evict"),
    ],
)
async def test_a_device_is_not_seen_without_its_taint_at_any_restart(
    published: Published, wanted: DesiredPool
):
    published.link.change = drops("taints")
    await published.publish(wanted)
    for _ in range(3):
        await published.stop()
        published.link.dry_runs.clear()
        await published.start()
        assert await published.settled() == []
        assert len(published.link.dry_runs) == 1
        assert published.publisher.rejected.keys() == {d.name for d in wanted.devices if d.taints}
    assert "a" in published.devices()
    assert "b" not in names_without_taints(published)


async def test_a_device_is_not_seen_without_its_taint_when_the_watch_restarts(
    published: Published,
):
    published.link.change = drops("taints")
    await published.publish(pool("a", device("b", taint())))
    for _ in range(3):
        published.server.expire_history()
        published.server.drop_watches()
        assert await published.settled(700) == []
        assert "b" not in names_without_taints(published)
    assert len(published.link.dry_runs) == 4
    assert len(published.dropped) == 1


async def test_all_pools_learn_of_it_before_they_write(published: Published):
    published.link.change = drops("taints")
    own, gpus = pool("a", device("b", taint())), pool("x", device("y", taint()))
    assert await published.publish({"node-1": own, "node-1/gpus": gpus}) == ["POST", "POST"]
    assert published.devices() == names_without_taints(published) == {"a", "x"}
    assert published.publisher.rejected.keys() == {"b", "gpus/y"}
    assert len(published.dropped) == 1


async def test_a_server_that_keeps_taints_is_asked_once(published: Published):
    await published.publish(pool(*many(100)))
    published.link.dry_runs.clear()  # of the layout: nothing is tainted
    bad = device("dev-0", replace(taint(), effect="None"))
    await published.publish(pool(bad, *many(99, start=1)))
    assert published.link.dry_runs == [], "nothing is kept off"
    assert await published.publish(pool(*many(99), device("dev-99", taint()))) == ["PUT", "PUT"]
    assert await published.publish(pool(*many(98), *many(2, taint(), start=98))) == ["PUT"]
    assert [method for method, _ in published.link.dry_runs] == ["PUT"]
    assert published.measured == [("create", True)] * 2 + [("update", True)] * 4
    published.server.expire_history()
    published.server.drop_watches()
    await published.settled(60)
    await published.publish(
        pool(*many(1, taint()), *many(97, start=1), *many(2, taint(), start=98))
    )
    assert len(published.link.dry_runs) == 2, "it may be another server"


@pytest.mark.parametrize(
    ("known", "asked"),
    [
        pytest.param(named("b"), True, id="its-taints-may-stay"),
        pytest.param(device("b"), False, id="its-taints-go"),
    ],
)
def test_a_device_that_moves_with_its_published_taints_is_asked_about(
    known: DesiredDevice, asked: bool
):
    server = PoolServer()
    server.publish(pool(device("b", taint())))
    write = SliceWrite(
        pool=POOL,
        name="00001-b",
        count=2,
        generation=2,
        content=SliceContent(devices={"b": known}),
        stored=None,
        sources=server.stored(),
    )
    assert (Feature.TAINTS in write.needed_features) is asked


async def test_taints_that_are_kept_beside_old_ones_prove_nothing_for_others(published: Published):
    await published.publish(pool(device("dev-0", taint()), *many(99, start=1)))
    await published.start()
    await published.settled()
    published.link.dry_runs.clear()

    def change(body: dict[str, Any]) -> dict[str, Any]:
        names = {each["name"] for each in body["spec"]["devices"]}
        return body if "dev-0" in names else drops("taints")(body)

    published.link.change = change
    assert await published.publish(pool(*many(2, taint()), *many(98, start=2))) == ["PUT"]
    assert published.link.dry_runs == []
    await published.publish(pool(*many(2, taint()), *many(97, start=2), device("dev-99", taint())))
    assert published.link.dry_runs
    assert "dev-99" not in published.devices()
    assert published.publisher.dropped == {Feature.TAINTS}


BOUND = {"binding_conditions": ("attached",), "binding_failure_conditions": ("failed",)}


@pytest.mark.parametrize(
    ("fields", "dropped", "feature"),
    [
        pytest.param(BOUND, "bindingConditions", Feature.BINDING_CONDITIONS, id="conditions"),
        pytest.param({"extra": {"newField": {"a": 1}}}, "newField", Feature.EXTRA, id="extra"),
    ],
)
async def test_a_device_that_must_not_be_allocated_without_a_field_is_never_published_without(
    published: Published, fields: dict[str, Any], dropped: str, feature: Feature
):
    published.link.change = drops(dropped)
    needy = device("needy", **fields)
    wanted = pool("a", needy)
    assert await published.publish(wanted) == ["POST"]
    assert [method for method, _ in published.link.dry_runs] == ["POST"]
    assert published.devices() == {"a"}
    assert published.publisher.dropped == {feature}
    assert feature.value in published.publisher.rejected["needy"]
    assert await published.publish(pool(*wanted.devices, fallback=(device("plain"),))) == ["PUT"]
    assert published.devices() == {"plain"}
    assert await published.settled(3600) == []


async def test_a_node_that_does_not_declare_a_feature_gets_the_fallback(published: Published):
    def refuse(method: str, path: str, body: dict[str, Any]) -> StatusError | None:
        devices = body["spec"]["devices"] if body else ()
        if not any("nodeAllocatableResources" in device for device in devices):
            return None
        text = 'node "node-1" does not support DRANodeAllocatableResources feature'
        return StatusError(403, "Forbidden", text)

    published.link.refuse = refuse
    cpus = NodeAllocatableResource(device_multiplier="8")
    needy = device("ccx", node_allocatable_resources={"cpu": cpus})
    await published.publish(pool("a", needy, fallback=(device("plain"),)))
    assert published.devices() == {"plain"}
    assert published.publisher.dropped == {Feature.NODE_ALLOCATABLE_RESOURCES}
    assert published.publisher.last_error is None
    assert await published.settled(3600) == []


async def test_fields_that_the_server_keeps_are_asked_about_once(published: Published):
    wanted = [device(f"dev-{n}", extra={"newField": {"a": n}}, **BOUND) for n in range(3)]
    await published.publish(pool(*wanted[:1]))
    await published.publish(pool(*wanted[:2]))
    await published.publish(pool(*wanted))
    assert published.devices() == {"dev-0", "dev-1", "dev-2"}
    assert [method for method, _ in published.link.dry_runs] == ["POST"]
    (body,) = published.slices()
    assert [each["newField"]["a"] for each in body["spec"]["devices"]] == [0, 1, 2]
    assert await published.settled(3600) == []


@pytest.mark.parametrize(
    ("unknown", "dropped"),
    [({"other": 1}, "other"), ({"newField": {"b": 1}}, "newField.b")],
)
async def test_a_server_that_keeps_one_extra_field_is_asked_about_others(
    published: Published, unknown: dict[str, Any], dropped: str
):
    def change(body: dict[str, Any]) -> dict[str, Any]:
        body = copy.deepcopy(body)
        for each in body["spec"].get("devices", ()):
            *above, last = dropped.split(".")
            for name in above:
                each = each.get(name, {})
            each.pop(last, None)
        return body

    published.link.change = change
    known = device("known", extra={"newField": {"a": 1}})
    assert await published.publish(pool(known)) == ["POST"]
    assert await published.publish(pool(known, device("needy", extra=unknown))) == ["PUT"]
    assert published.devices() == set(), "the only write removes the devices with extra fields"
    assert [method for method, _ in published.link.dry_runs] == ["POST", "PUT"]
    assert published.publisher.dropped == {Feature.EXTRA}


async def test_dropped_fields_are_repaired_at_once(published: Published):
    published.link.change = drops("consumesCounters")
    published.source.publish(pool(partition("part"), fallback=(device("a"),)))
    await asyncio.sleep(2)
    first, last = (when for when, _, _ in published.link.writes)
    assert last - first < 0.1
    assert published.devices() == {"a"}
