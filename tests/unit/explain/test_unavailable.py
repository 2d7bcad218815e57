"""The reasons why published devices are unavailable: taints, partitions of used hardware, and
shares. Also, the cases in which nothing is reported."""

from dataclasses import replace

import pytest

from drakit_explain.devices import Amount, CapacityFacts, CounterSetFacts, TaintFacts
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceID,
    PodClaim,
    PodFacts,
    Request,
    Share,
    SliceFacts,
    Toleration,
)
from tests.fakes.world import device as make_device
from tests.fakes.world import explain as explained
from tests.fakes.world import holding as holder
from tests.fakes.world import on, world_of

REQUEST = Request(name="gpu", device_class="gpu")
POD = PodFacts(namespace="lab", name="train", uid="p", claims=(PodClaim(name="gpu", claim="mine"),))


def explain(pod, world, **options):
    return list(explained(pod, world, **options).reasons)


def cluster(*devices, request=REQUEST, others=(), counter_sets=()):
    place = on("n1")
    slices = [SliceFacts(name="s", uid="s", driver="d", pool="n1", place=place, devices=devices)]
    if counter_sets:
        counters = SliceFacts(
            name="c", uid="c", driver="d", pool="n1", place=place, counter_sets=counter_sets
        )
        slices = [replace(each, pool_slices=2) for each in (*slices, counters)]
    claim = ClaimFacts(namespace="lab", name="mine", uid="w", requests=(request,))
    device_class = ClassFacts(name="gpu", uid="c", selectors=('device.driver == "d"',))
    return world_of(device_class, claim, *others, *slices)


def device(name, *taints, **facts):
    return make_device(name, taints=taints, **facts)


def taint(key, effect="NoSchedule", value=""):
    return TaintFacts(key=key, effect=effect, value=value)


def sharer(name, device, *amounts):
    share = Share(device=DeviceID("d", "n1", device), consumed=amounts)
    return replace(holder(name), shares=(share,))


def partition(name, memory, *taints):
    return device(name, *taints, consumes=(card(memory),))


def card(memory):
    return CounterSetFacts(name="card-0", counters=(Amount("memory", memory),))


def nic(name, bandwidth="10G", *taints, policy=None):
    capacity = CapacityFacts(name="bandwidth", value=bandwidth, policy=policy)
    return device(name, *taints, capacity=(capacity,), shareable=True)


def bandwidth(quantity, name="bandwidth"):
    return Amount(name, quantity)


def asking(quantity, name="bandwidth", **changes):
    return replace(REQUEST, capacity=(bandwidth(quantity, name),), **changes)


UNHEALTHY, STOPPED = taint("drakit.dev/unhealthy"), taint("drakit.dev/stopped")
UNPREPARING, LENS = taint("drakit.dev/unpreparing"), taint("cam.example.com/lens")
TOLERANT = replace(REQUEST, tolerations=(Toleration(key=LENS.key),))
ONE = 'of DeviceClass "gpu" that matches request "gpu" of claim "mine"'
ALL = 'of DeviceClass "gpu" that match request "gpu" of claim "mine"'
LOOK = (
    "the taint drakit.dev/unhealthy is removed after 30 s (by default) of good health: check the "
    "device"
)
BACK = (
    "the taint drakit.dev/stopped is removed when the driver is available again on that node: "
    "check its log"
)
UNDONE = (
    "the taint drakit.dev/unpreparing is removed when an earlier claim is unprepared on that node"
)
ASK = "ask the owner of the taint, or tolerate its key and effect NoSchedule in the request"
NOT = "which the request does not tolerate"
ON = "the claim can be allocated when enough hardware or capacity is released"


@pytest.mark.parametrize(
    ("facts", "code", "sentence"),
    [
        pytest.param(
            cluster(device("g0", UNHEALTHY)),
            "DevicesTainted",
            f"the only device {ONE} is tainted with drakit.dev/unhealthy, {NOT}; {LOOK}",
            id="unhealthy",
        ),
        pytest.param(
            cluster(device("g0", taint("drakit.dev/gone"))),
            "DevicesTainted",
            f"the only device {ONE} is tainted with drakit.dev/gone, {NOT}; the taint "
            "drakit.dev/gone is removed when the device is connected again; otherwise the device "
            "is removed when its claim is unprepared",
            id="gone",
        ),
        pytest.param(
            cluster(device("g0", STOPPED), device("g1", UNPREPARING)),
            "DevicesTainted",
            f"all 2 devices {ALL} are tainted with drakit.dev/stopped, drakit.dev/unpreparing, "
            f"{NOT}; {BACK}; {UNDONE}",
            id="driver-away-and-claim-not-undone",
        ),
        pytest.param(
            cluster(device("g0", LENS, taint(LENS.key, "NoExecute", "dirty"))),
            "DevicesTainted",
            f"the only device {ONE} is tainted with cam.example.com/lens, {NOT}; "
            f"{ASK.replace('effect NoSchedule', 'effects NoExecute and NoSchedule')}",
            id="driver's-own-taint-named-once",
        ),
        pytest.param(
            cluster(device("g0", UNHEALTHY, *(taint(f"x.example.com/{n}") for n in "dcba"))),
            "DevicesTainted",
            f"the only device {ONE} is tainted with drakit.dev/unhealthy, x.example.com/a, "
            f"x.example.com/b and 2 more, {NOT}; {LOOK}; {ASK}",
            id="many-keys-are-cut",
        ),
        *(
            pytest.param(
                cluster(device("g0", UNHEALTHY, *taints), request=request, others=others),
                "DevicesTainted",
                f"the only device {ONE} is tainted with drakit.dev/unhealthy, {NOT}; {LOOK}",
                id=name,
            )
            for name, taints, request, others in (
                ("a-tolerated-taint-is-not-named", [LENS], TOLERANT, []),
                ("a-release-does-not-help-what-is-tainted", [], REQUEST, [holder("a", "g0")]),
                ("admin-access-does-not-tolerate", [], replace(REQUEST, admin_access=True), []),
            )
        ),
        pytest.param(
            cluster(
                device("g0", UNHEALTHY),
                device("g1"),
                device("g2"),
                request=replace(REQUEST, count=3),
                others=[holder("a", "g1")],
            ),
            "DevicesTainted",
            'request "gpu" of claim "mine" asks for 3 devices: of the 3 devices of DeviceClass '
            '"gpu" that match, 1 is allocated to claim lab/a (pod pod-a); 1 is tainted with '
            f"drakit.dev/unhealthy, {NOT}; {LOOK}",
            id="a-release-alone-would-not-be-enough",
        ),
        pytest.param(
            cluster(
                partition("whole", "80Gi", UNHEALTHY),
                partition("h0", "40Gi"),
                partition("h1", "40960Mi"),
                partition("h2", "40Gi"),
                counter_sets=(card("80Gi"),),
                others=[holder("a", "h0"), holder("b", "h1")],
            ),
            "DevicesAllocated",
            f"of the 4 devices {ALL}, 2 are allocated to claim lab/a (pod pod-a), claim lab/b "
            f"(pod pod-b); 1 shares hardware with devices that are allocated to claim "
            f"lab/a (pod pod-a), claim lab/b (pod pod-b); 1 is tainted with "
            f"drakit.dev/unhealthy, {NOT}; {LOOK}; {ON}",
            id="partitions-that-fill-the-hardware-together",
        ),
        pytest.param(
            cluster(
                replace(nic("n0", "10G", LENS), consumes=(card("40Gi"),)),
                partition("h0", "80Gi"),
                counter_sets=(card("80Gi"),),
                others=[sharer("a", "n0")],
            ),
            "DevicesAllocated",
            f"of the 2 devices {ALL}, 1 shares hardware with devices that are allocated to "
            f"claim lab/a (pod pod-a); 1 is tainted with {LENS.key}, {NOT}; {ON}; {ASK}",
            id="a-share-of-a-partition-takes-hardware",
        ),
        pytest.param(
            cluster(nic("n0"), others=[sharer("a", "n0", bandwidth("1", "bandwidth"))]),
            "DevicesAllocated",
            f"the only device {ONE} has too little bandwidth left (9999999999 of 10G, and the "
            f"request takes 10G), because shares are allocated "
            f"to claim lab/a "
            f"(pod pod-a); {ON}",
            id="without-an-amount-all-of-it-is-asked-for",
        ),
        pytest.param(
            cluster(nic("n0"), others=[holder("a", "n0")]),
            "DevicesAllocated",
            f"the only device {ONE} is allocated to claim lab/a (pod pod-a); the claim can be "
            "allocated when the device is released",
            id="a-device-that-was-taken-whole-before-it-could-be-shared",
        ),
        pytest.param(
            cluster(nic("n0"), nic("n1", "1G"), request=asking("5G", count=2)),
            "NoDevicePublished",
            'request "gpu" of claim "mine" asks for 2 devices of DeviceClass "gpu", but only 1 '
            "matching device is published; lower count or add devices",
            id="what-is-too-small-is-not-counted",
        ),
        pytest.param(
            cluster(
                partition("h0", "90Gi"),
                partition("h1", "40Gi"),
                counter_sets=(card("80Gi"),),
                others=[holder("a", "h1")],
            ),
            "DevicesAllocated",
            f"the only device {ONE} is allocated to claim lab/a (pod pod-a); the claim can be "
            "allocated when the device is released",
            id="a-partition-that-never-fits-is-not-counted",
        ),
    ],
)
def test_what_stands_in_the_way_is_named(facts, code, sentence):
    (reason,) = explain(POD, facts)
    assert (str(reason.code), reason.text) == (code, f"pod lab/train waits: {sentence}")


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(
            cluster(
                partition("h0", "a lot"),
                partition("h1", "40Gi"),
                counter_sets=(card("40Gi"),),
                others=[holder("a", "h0")],
            ),
            id="counters-that-cannot-be-read",
        ),
    ],
)
def test_nothing_is_reported_of_what_may_be_free(facts):
    assert explain(POD, facts) == []


def elsewhere(name, *devices, namespace="other"):
    return replace(holder(name, *devices), namespace=namespace)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        pytest.param(
            [elsewhere("secret", "g0", "g1")],
            "to a claim in another namespace",
            id="one-elsewhere",
        ),
        pytest.param(
            [elsewhere("secret", "g0"), elsewhere("secret", "g1", namespace="third")],
            "to 2 claims in other namespaces",
            id="two-elsewhere",
        ),
        pytest.param(
            [elsewhere("secret", "g0"), holder("a", "g1")],
            "to claim lab/a (pod pod-a) and a claim in another namespace",
            id="one-here-and-one-elsewhere",
        ),
        pytest.param(
            [*(holder(f"a{n}", f"g{n}") for n in range(5)), elsewhere("secret", "g5")],
            "to claim lab/a0 (pod pod-a0), claim lab/a1 (pod pod-a1), claim lab/a2 (pod pod-a2), "
            "2 more and a claim in another namespace",
            id="many-here-and-one-elsewhere",
        ),
    ],
)
def test_holders_of_other_namespaces_are_counted_and_not_named(others, told):
    others = [replace(each, uid=f"{each.namespace}-{each.name}") for each in others]
    devices = [device(each.device) for claim in others for each in claim.devices]
    (reason,) = explain(POD, cluster(*devices, others=others))
    assert f" {told}; " in reason.text
    assert "secret" not in reason.text


def test_holders_of_other_namespaces_are_named_where_that_is_allowed():
    facts = cluster(device("g0"), others=[elsewhere("secret", "g0")])
    (reason,) = explain(POD, facts, name_all_holders=True)
    assert "to claim other/secret (pod pod-secret); " in reason.text


def test_the_order_of_facts_does_not_change_the_sentence():
    devices = [device("g0", LENS), device("g1", STOPPED, UNHEALTHY), device("g2"), device("g3")]
    holders = [holder("b", "g3"), holder("a", "g2")]
    one = cluster(*devices, others=holders)
    other = cluster(*devices[::-1], others=holders[::-1])
    assert explain(POD, one) == explain(POD, other) != []


def test_an_invalid_pool_is_named():
    (reason,) = explain(POD, cluster(partition("h0", "40Gi")))
    assert (str(reason.code), reason.text) == (
        "PoolInvalid",
        "pod lab/train waits: no device can be allocated from pool n1 of driver d, because device "
        "h0 consumes counter set card-0, which the pool does not have; correct the driver",
    )
