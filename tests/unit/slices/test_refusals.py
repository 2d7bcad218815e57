"""Contents that the API server rejects: what stays published, and what is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from drakit.device import Capacity
from tests.fakes.kube import StatusError
from tests.unit.slices.conftest import Published
from tests.unit.slices.world import (
    NODE,
    DesiredDevice,
    counter_set,
    device,
    many,
    pool,
    taint,
)

pytestmark = pytest.mark.looptime

REASON = (
    "the API server rejects it: capacity[size].requestPolicy.validValues[0]: "
    'Invalid value: "9": option is larger than capacity value: 8'
)


def shared(name: str, option: str = "1", **attributes: Any) -> DesiredDevice:
    """A device that claims share in portions of one size."""
    size = Capacity(value="8", default=option, valid_values=(option,))
    return device(
        name, capacity={"size": size}, allow_multiple_allocations=True, attributes=attributes
    )


def invalid(body: Any, causes: list[dict[str, str]]) -> StatusError | None:
    """Return the response of the API server's own validation, in the words of Kubernetes 1.37."""
    if not causes:
        return None
    name, kind = body["metadata"]["name"], "ResourceSlice"
    problems = [f"{each['field']}: {each['message']}" for each in causes]
    text = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
    return StatusError(
        422,
        "Invalid",
        f'{kind}.resource.k8s.io "{name}" is invalid: {text}',
        details={"name": name, "group": "resource.k8s.io", "kind": kind, "causes": causes},
    )


def checks_options(method: str, path: str, body: Any) -> StatusError | None:
    """An API server that checks the options of capacities."""
    causes = [
        {
            "reason": "FieldValueInvalid",
            "field": f"spec.devices[{index}].capacity[{name}].requestPolicy.validValues[{number}]",
            "message": f'Invalid value: "{option}": option is larger than capacity value: 8',
        }
        for index, each in enumerate((body or {}).get("spec", {}).get("devices", ()))
        for name, amount in each.get("capacity", {}).items()
        for number, option in enumerate(amount.get("requestPolicy", {}).get("validValues", ()))
        if int(option) > 8
    ]
    return invalid(body, causes)


def denies(
    wrong: Callable[[dict[str, Any]], bool], *, code: int = 422, reason: str = "Invalid"
) -> Callable[[str, str, Any], StatusError | None]:
    """A policy of the cluster, which names no field."""

    def refuse(method: str, path: str, body: Any) -> StatusError | None:
        if method not in ("POST", "PUT") or not wrong(body):
            return None
        name = body["metadata"]["name"]
        text = (
            f'resourceslices.resource.k8s.io "{name}" is forbidden: ValidatingAdmissionPolicy '
            f"'few' with binding 'few' denied request: too many devices"
        )
        causes = [{"message": "ValidatingAdmissionPolicy 'few' denied request"}]
        return StatusError(code, reason, text, details={"name": name, "causes": causes})

    return refuse


def has(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda body: any(each["name"] == name for each in body["spec"].get("devices", ()))


PARTITION = device("part", consumes={"gpu-0": {"memory": "4"}})


def without_counters(body: dict[str, Any]) -> dict[str, Any]:
    """An API server that does not know counters."""
    devices = [
        {key: value for key, value in each.items() if key != "consumesCounters"}
        for each in body["spec"]["devices"]
    ]
    return body | {"spec": body["spec"] | {"devices": devices}}


def last_error(published: Published) -> str:
    return published.publisher.last_error or ""


# ------------------------------------------------------------ devices that are named


async def test_a_device_whose_capacity_is_refused_is_not_in_one_slice(published: Published):
    published.link.refuse = checks_options
    writes = await published.publish(pool("a", shared("good"), shared("bad", "9")))
    assert writes == ["POST", "POST"]
    assert published.devices() == {"a", "good"}
    assert published.rejected == [{"bad": REASON}]
    assert published.link.dry_runs == [], "a single write that fails changes nothing"
    assert await published.settled(600) == []
    assert published.publisher.last_error is None


async def test_devices_whose_capacities_are_refused_are_not_in_a_new_layout(
    published: Published,
):
    await published.publish(pool(*many(100)))
    published.link.refuse = checks_options
    bad = [shared(f"bad-{number}", "9") for number in range(90)]
    writes = await published.publish(pool(*many(150), *bad, shared("good")))
    assert writes == ["PUT", "PUT", "POST"], "each slice once"
    assert published.devices() == {"good", *(each.name for each in many(150))}
    assert published.publisher.rejected == {each.name: REASON for each in bad}
    assert published.publisher.last_error is None
    assert await published.settled(600) == []
    bad[0] = shared("bad-0")
    writes = await published.publish(pool(*many(150), *bad, shared("good")))
    assert writes == ["PUT"], "it is another device"
    assert "bad-0" in published.devices()


async def test_a_new_pool_is_never_published_in_part(published: Published):
    published.link.refuse = checks_options
    assert await published.publish(pool(shared("bad", "9"), *many(150))) == ["POST"] * 3
    assert published.generations() == {1}
    assert published.devices() == {each.name for each in many(150)}


async def test_a_bad_device_that_always_changes_does_not_keep_others_from_being_published(
    published: Published,
):
    published.link.refuse = checks_options
    for step in range(30):
        published.source.publish(pool(*many(100 + step), shared("bad", "9", step=step)))
        await asyncio.sleep(1)
    await published.settled(2)
    assert published.devices() == {each.name for each in many(129)}
    assert len(published.link.dry_runs) < 30 * 3, "a second has one check with it, and one without"


async def test_a_policy_that_names_one_device_in_each_answer_has_few_answers_in_a_round(
    published: Published,
):
    await published.publish(pool(*many(100)))
    published.link.dry_runs.clear()

    def refuse(method: str, path: str, body: Any) -> StatusError | None:
        found = checks_options(method, path, body)
        return found and invalid(body, found.body["details"]["causes"][:1])

    published.link.refuse = refuse
    bad = [shared(f"bad-{number}", "9") for number in range(30)]
    assert await published.publish(pool(*many(100), *bad), seconds=1.5) == []
    assert len(published.link.dry_runs) <= 3 * 3
    assert len(published.devices()) == 100, "the last good state stays"
    assert "is invalid: spec.devices[" in last_error(published)
    await published.settled(1200)
    assert len(published.devices()) == 100
    assert published.publisher.rejected.keys() == {each.name for each in bad}
    assert published.publisher.last_error is None


async def test_a_device_of_the_fallback_whose_capacity_is_refused_is_rejected(
    published: Published,
):
    published.link.refuse = checks_options
    published.link.change = without_counters
    fallback = (*many(100), shared("bad", "9"))
    await published.publish(pool(PARTITION, fallback=fallback))
    assert published.devices() == {each.name for each in many(100)}
    assert published.publisher.rejected == {"bad": REASON}
    assert await published.settled(600) == []


# ------------------------------------------------------------ layouts that are refused


@pytest.mark.parametrize(("code", "reason"), [(422, "Invalid"), (403, "Forbidden")])
async def test_nothing_is_written_of_a_layout_that_is_refused(published: Published, code, reason):
    await published.publish(pool(*many(100), counter_sets=(counter_set("gpu-0"),)))
    before = published.slices()
    published.link.refuse = denies(has("dev-199"), code=code, reason=reason)
    wanted = pool(*many(200), counter_sets=(counter_set("gpu-0"),))
    assert await published.publish(wanted, seconds=600) == []
    assert published.slices() == before
    assert "too many devices" in last_error(published)
    assert len(published.link.dry_runs) < 80, "it is tried again with a backoff"
    published.link.refuse = lambda method, path, body: None
    await published.settled(61)
    assert len(published.devices()) == 200
    assert published.publisher.last_error is None


async def test_published_devices_are_tainted_and_removed_while_a_layout_is_refused(
    published: Published,
):
    await published.publish(pool(*many(100)))
    published.link.refuse = denies(has("dev-199"))
    await published.publish(pool(*many(200)))
    failed = device("dev-50", taint("drakit.dev/unhealthy"), attributes={"model": "y"})
    changed = pool(*many(50), failed, *many(149, start=51))
    assert await published.publish(changed, seconds=2) == ["PUT"]
    bodies = {d["name"]: d for body in published.slices() for d in body["spec"]["devices"]}
    assert [each["key"] for each in bodies["dev-50"]["taints"]] == ["drakit.dev/unhealthy"]
    assert bodies["dev-50"]["attributes"]["model"] == {"string": "x"}, "the content is refused"
    assert await published.publish(pool(*many(50), *many(149, start=51)), seconds=2) == ["PUT"]
    assert published.devices() == {each.name for each in many(100)} - {"dev-50"}
    assert "too many devices" in last_error(published)


async def test_the_order_and_the_type_of_partitions_stay_while_a_layout_is_refused(
    published: Published,
):
    parts = [
        device(f"part-{n}", consumes={"gpu-0": {"memory": "1"}}, attributes={"profile": "1g"})
        for n in range(99, -1, -1)
    ]
    fields: dict[str, Any] = {
        "counter_sets": (counter_set("gpu-0"),),
        "ordered": True,
        "partition_type_attribute": "x.y/profile",
    }
    await published.publish(pool(*parts, **fields))
    before = published.slices()
    published.link.refuse = denies(has("dev-199"))
    assert await published.publish(pool(*parts, *many(200), **fields), seconds=60) == []
    assert published.slices() == before
    specs = [body["spec"] for body in before]
    assert [spec.get("partitionTypeAttribute") for spec in specs].count("x.y/profile") == 2


async def test_taints_do_not_make_a_refused_layout_be_checked_again(published: Published):
    await published.publish(pool(*many(100)))
    published.link.refuse = denies(has("dev-199"))
    await published.publish(pool(*many(200)), seconds=300)
    published.link.dry_runs.clear()
    for step in range(20):
        published.source.publish(pool(device("dev-0", taint(f"x.y/{step}")), *many(199, start=1)))
        await asyncio.sleep(1)
    assert len(published.link.dry_runs) <= 1 + 4, "for taints, and for a retry that was due"


async def test_devices_that_vanish_together_are_removed_while_a_layout_is_refused(
    published: Published,
):
    await published.publish(pool(*many(100)))
    published.link.refuse = denies(has("new-0"))
    await published.publish(pool(*(device(f"new-{number}") for number in range(100))))
    assert published.devices() == set(), "none of them exists"
    assert {body["spec"]["pool"]["resourceSliceCount"] for body in published.slices()} == {
        len(published.slices())
    }


async def test_a_pool_does_not_shrink_to_a_slice_that_is_refused(published: Published):
    await published.publish(pool(*many(100)))
    published.link.refuse = denies(lambda body: body["spec"]["pool"]["resourceSliceCount"] == 1)
    changed = device("dev-0", attributes={"model": "y"})
    assert await published.publish(pool(changed, *many(9, start=1)), seconds=60) == []
    assert len(published.slices()) == 2
    assert "too many devices" in last_error(published)


async def test_a_fallback_stays_while_a_layout_is_refused(published: Published):
    published.link.change = without_counters
    await published.publish(pool(PARTITION, fallback=many(100)))
    assert len(published.devices()) == 100
    published.link.refuse = denies(has("dev-199"))
    assert await published.publish(pool(PARTITION, fallback=many(200)), seconds=60) == []
    assert len(published.devices()) == 100


async def test_a_refused_new_pool_is_not_published_without_devices(published: Published):
    published.link.refuse = denies(has("dev-99"))
    assert await published.publish(
        {NODE: pool("a"), f"{NODE}/gpus": pool(*many(100))}, seconds=60
    ) == ["POST"]
    assert published.devices() == {"a"}
    assert last_error(published).startswith(f"pool {NODE}/gpus: ")


# ------------------------------------------------------------ what needs no check


async def test_a_change_of_one_device_and_taints_need_no_dry_run(published: Published):
    assert await published.publish(pool(*many(100))) == ["POST", "POST"]
    assert [method for method, _ in published.link.dry_runs] == ["POST", "POST"]
    published.link.dry_runs.clear()
    changed = device("dev-0", attributes={"model": "y"})
    assert await published.publish(pool(changed, *many(99, start=1))) == ["PUT"]
    assert await published.publish(pool(changed, *many(99, start=1), "new")) == ["PUT"]
    assert published.link.dry_runs == []
    assert await published.publish(
        pool(changed, *many(99, taint(), start=1), device("new", taint()))
    ) == ["PUT", "PUT"]
    assert len(published.link.dry_runs) == 1, "whether the API server keeps taints"


async def test_slices_that_stay_the_same_are_not_checked(published: Published):
    assert len(await published.publish(pool(*many(200)))) == 4
    published.link.dry_runs.clear()
    one, other = (device(f"dev-{i}", attributes={"model": "y"}) for i in (0, 60))
    writes = await published.publish(pool(one, *many(59, start=1), other, *many(139, start=61)))
    assert writes == ["PUT"] * 4
    assert [name[:5] for _, name in published.link.dry_runs] == ["00000", "00001"]
