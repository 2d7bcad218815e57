"""An analysis that reuses the counts of unchanged slices is the same as one from scratch."""

from dataclasses import replace

import pytest

from drakit_explain.availability import analyze, analyze_in_steps
from drakit_explain.budget import Budget
from drakit_explain.cel.library import Library
from drakit_explain.devices import Amount, CapacityFacts, CounterSetFacts, Place, TaintFacts
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    Consumer,
    DeviceID,
    NodeFacts,
    PodClaim,
    PodFacts,
    Request,
    Share,
    SliceFacts,
    TaintRuleFacts,
)
from drakit_explain.pending import Verdict
from drakit_explain.selectors import bring_up_to_date
from drakit_explain.world import Name
from tests.fakes.world import device, explain, holding, node, slice_on, world_of

CLASS = ClassFacts(name="gpu", uid="c", selectors=('device.driver == "d"',))
BIG = CapacityFacts(name="memory", value="80Gi")
SMALL = CapacityFacts(name="memory", value="8Gi")


def published(number, *, model="x", place=None, size=BIG):
    devices = [
        device(f"g{each}", attributes={"model": model, "index": each}, capacity=[size])
        for each in range(4)
    ]
    of = replace(slice_on(f"n{number}", *devices), name=f"s{number}")
    return replace(of, place=place or of.place)


def shareable():
    memory = [CapacityFacts(name="memory", value="80Gi")]
    return slice_on("n2", device("all", attributes={"model": "x"}, capacity=memory, shareable=True))


def share(amount):
    taken = Share(device=DeviceID("d", "n2", "all"), consumed=(Amount("memory", amount),))
    return replace(holding("z"), shares=(taken,))


def rule(effect="NoSchedule"):
    return TaintRuleFacts(name="r", uid="r", taint=TaintFacts(key="k", effect=effect), pool="n1")


CHANGES = [
    pytest.param(
        lambda world: world.apply(holding("b", "g2", pool="n1")), id="a-device-is-allocated"
    ),
    pytest.param(
        lambda world: world.remove(ClaimFacts, Name("lab", "a")), id="a-device-is-released"
    ),
    pytest.param(
        lambda world: world.apply(
            replace(holding("a", "g0", pool="n0"), consumers=(Consumer("pods", "p", "p"),))
        ),
        id="a-holder-gets-another-pod",
    ),
    pytest.param(
        lambda world: (world.apply(share("80Gi")), world.apply(holding("b", "g1", pool="n2"))),
        id="a-share-is-taken-and-a-device",
    ),
    pytest.param(lambda world: world.remove(ClaimFacts, Name("lab", "z")), id="a-share-is-given"),
    pytest.param(lambda world: world.apply(published(1, model="y")), id="a-slice-changes"),
    pytest.param(lambda world: world.apply(published(1, size=SMALL)), id="devices-become-smaller"),
    pytest.param(lambda world: world.remove(SliceFacts, Name("", "s1")), id="a-slice-is-withdrawn"),
    pytest.param(
        lambda world: world.apply(published(1, place=Place(every=True))), id="a-slice-is-for-all"
    ),
    pytest.param(lambda world: world.remove(NodeFacts, Name("", "n1")), id="a-node-disappears"),
    pytest.param(lambda world: world.apply(rule()), id="a-taint-rule-appears"),
    pytest.param(
        lambda world: world.apply(replace(CLASS, selectors=("device.driver == 'e'",))),
        id="the-class-selects-others",
    ),
]


REQUESTS = pytest.mark.parametrize(
    "request_",
    [
        pytest.param(
            Request(
                name="r",
                device_class="gpu",
                selectors=('device.attributes["d"].model == "x"',),
            ),
            id="a-selector",
        ),
        pytest.param(
            Request(name="r", device_class="gpu", capacity=(Amount("memory", "16Gi"),)),
            id="a-capacity",
        ),
        pytest.param(Request(name="r", device_class="gpu", count=0), id="all"),
        pytest.param(Request(name="r", device_class="gpu", count=3), id="three"),
    ],
)


def cluster():
    return world_of(
        CLASS,
        *(node(f"n{number}") for number in range(3)),
        *(published(number) for number in range(2)),
        replace(shareable(), name="s2"),
        replace(published(2), name="s3", pool="other"),
        holding("a", "g0", pool="n0"),
        share("8Gi"),
    )


@pytest.mark.parametrize("change", CHANGES)
@REQUESTS
def test_counts_follow_a_change(change, request_):
    world = cluster()
    before = analyzed(request_, world, None)
    before.find_kinds(world)
    change(world)
    after = analyzed(request_, world, before)
    scratch = analyzed(request_, world, None)
    nodes = dict.fromkeys(world.views())
    assert after.for_nodes(nodes, Budget()) == scratch.for_nodes(nodes, Budget())
    assert after.on_nodes == scratch.on_nodes
    assert after.find_kinds(world) == scratch.find_kinds(world)
    assert replace(after, by_nodes=[]) == replace(scratch, by_nodes=[])


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("change", CHANGES)
@REQUESTS
def test_counts_that_were_made_ahead_follow_a_change(monkeypatch, change, request_, parts):
    monkeypatch.setattr("drakit_explain.availability.SLICES_AT_ONCE", 1)
    world = cluster()
    analyzed(request_, world, None)  # evaluates its selectors
    ahead = analyze_in_steps(request_, world, Budget(), before=None)
    for _ in range(parts):
        assert next(ahead) is None
    change(world)
    *_, counted = ahead
    after, scratch = analyzed(request_, world, counted), analyzed(request_, world, None)
    assert after == scratch


def test_counters_that_a_claim_takes_between_two_parts_are_counted(monkeypatch):
    monkeypatch.setattr("drakit_explain.availability.SLICES_AT_ONCE", 1)
    request_ = Request(name="r", device_class="gpu")
    card = (CounterSetFacts(name="card", counters=(Amount("m", "1"),)),)
    partitions = [replace(device(f"p{each}"), consumes=card) for each in range(4)]
    counters = replace(
        slice_on("n0"),
        name="counters",
        counter_sets=(CounterSetFacts(name="card", counters=(Amount("m", "2"),)),),
    )
    slices = [
        replace(slice_on("n0", *partitions[:2]), name="s0"),
        replace(slice_on("n0", *partitions[2:]), name="s1"),
    ]
    world = world_of(
        CLASS,
        node("n0"),
        *(replace(each, pool_slices=3) for each in (counters, *slices)),
        holding("a", "p0", pool="n0"),
    )
    analyzed(request_, world, None)
    ahead = analyze_in_steps(request_, world, Budget(), before=None)
    next(ahead)
    world.apply(holding("b", "p1", pool="n0"))
    *_, counted = ahead
    after, scratch = analyzed(request_, world, counted), analyzed(request_, world, None)
    assert scratch.counts["s1"].tally.free == 0
    assert after == scratch


def test_unchanged_slices_are_not_counted_again():
    request_ = Request(name="r", device_class="gpu")
    world = world_of(
        CLASS, *(published(number) for number in range(3)), holding("a", "g0", pool="n0")
    )
    before = analyzed(request_, world, None)
    world.apply(holding("b", "g2", pool="n1"))
    after = analyzed(request_, world, before)
    same = [name for name in before.counts if after.counts[name] is before.counts[name]]
    assert same == ["s0", "s2"]


def analyzed(request_, world, before):
    expressions = [text for _, text in world.expressions(request_)]
    slices = [each.slice for each in world.reachable()]
    bring_up_to_date(world.selectors, Library(), expressions, slices)
    return analyze(request_, world, Budget(), before=before)


def test_all_devices_that_a_node_reaches_are_free_although_others_of_the_slice_are_not():
    places = {"g1": Place(node="n1"), "g2": Place(node="n2")}
    devices = [replace(device(name), place=place) for name, place in places.items()]
    pool = replace(slice_on("all", *devices), place=None, by_device=True)
    world = world_of(CLASS, node("n1"), node("n2"), pool, holding("h", "g1", pool="all"))
    found = analyzed(Request(name="r", device_class="gpu", count=0), world, None)
    assert "n2" in found.able(Budget())


def test_all_devices_are_free_although_the_shares_of_one_are_used_up():
    memory = [CapacityFacts(name="memory", value="80Gi")]
    used = device("used", capacity=memory, shareable=True)
    taken = Share(device=DeviceID("d", "n1", "used"), consumed=(Amount("memory", "80Gi"),))
    holder = replace(holding("h"), shares=(taken,))
    world = world_of(CLASS, node("n1"), slice_on("n1", used, device("free")), holder)
    found = analyzed(Request(name="r", device_class="gpu", count=0), world, None)
    assert found.able(Budget()) == {"n1"}  # the allocator leaves it out


def test_a_claim_without_requests_fits():
    pod = PodFacts(namespace="lab", name="p", uid="p", claims=(PodClaim(name="c", claim="empty"),))
    world = world_of(ClaimFacts(namespace="lab", name="empty", uid="e"), node("n1"))
    explanation = explain(pod, world)
    assert explanation.verdict is Verdict.FITS
