"""The store: what changed, and what its indexes answer."""

from dataclasses import replace

import pytest

from drakit.explain import (
    Amount,
    CapacityFacts,
    ClaimFacts,
    ClassFacts,
    CounterSetFacts,
    DeviceFacts,
    DeviceID,
    PodClaim,
    PodFacts,
    PoolID,
    Request,
    Share,
    SliceFacts,
    TaintFacts,
    TemplateFacts,
    Toleration,
    match_devices,
)
from drakit_operator import store as stores
from drakit_operator.claims.handlers import claims_touched, pods_touched
from drakit_operator.kinds import CLAIMS, CLASSES, PODS, SLICES, TEMPLATES, Name
from drakit_operator.store import Store
from drakit_operator.templates.handlers import templates_touched

REQUEST = Request(name="gpu", device_class="gpu.example")
G0 = DeviceID("d", "n1", "g0")
POD = PodFacts(
    namespace="lab",
    name="train",
    uid="p1",
    claims=(PodClaim(name="gpu", template="tpl", generated="train-x"),),
)
CLAIM = ClaimFacts(namespace="lab", name="train-x", uid="c1", requests=(REQUEST,))
TEMPLATE = TemplateFacts(namespace="lab", name="tpl", uid="t1", requests=(REQUEST,))
CLASS = ClassFacts(name="gpu.example", uid="k1")
SLICE = SliceFacts(
    name="s", uid="s1", driver="d", pool="n1", devices=(DeviceFacts(name="g0", attributes={}),)
)


@pytest.fixture
def store():
    filled = Store()
    filled.apply(PODS, POD)
    filled.apply(
        PODS, replace(POD, name="other", uid="p2", claims=(PodClaim(name="a", claim="b"),))
    )
    filled.apply(CLAIMS, CLAIM)
    filled.apply(TEMPLATES, TEMPLATE)
    filled.apply(CLASSES, CLASS)
    filled.apply(SLICES, SLICE)
    return filled


def test_the_same_again_is_no_change(store):
    assert store.apply(CLAIMS, CLAIM) is None


def test_a_pod_without_claims_is_not_kept(store):
    assert store.apply(PODS, PodFacts(namespace="lab", name="web", uid="p9")) is None
    assert store.pod("lab", "web") is None


def test_a_late_deletion_of_an_earlier_object_of_that_name_is_ignored(store):
    store.apply(PODS, replace(POD, uid="p7"))
    assert store.remove(PODS, Name("lab", "train"), uid="p1") is None
    assert store.pod("lab", "train").uid == "p7"


def test_a_holder_is_known_until_its_claim_gives_the_device_back(store):
    store.apply(CLAIMS, replace(CLAIM, allocated=True, devices=(G0,)))
    assert store.holder(G0).name == "train-x"
    store.apply(CLAIMS, CLAIM)
    assert store.holder(G0) is None


def test_a_device_that_changed_hands_is_not_lost_when_the_first_holder_goes(store):
    first = replace(CLAIM, name="first", uid="c2", allocated=True, devices=(G0,))
    store.apply(CLAIMS, first)
    store.apply(CLAIMS, replace(CLAIM, allocated=True, devices=(G0,)))
    store.remove(CLAIMS, Name("lab", "first"), uid="c2")
    assert store.holder(G0).name == "train-x"


def test_all_sharers_are_known_until_they_give_their_shares_back(store):
    shares = (Share(device=G0), Share(device=G0))
    for name in ("first", "second"):
        store.apply(CLAIMS, replace(CLAIM, name=name, uid=name, allocated=True, shares=shares))
    assert {claim.name for claim in store.sharers(G0)} == {"first", "second"}
    assert store.holder(G0) is None
    store.apply(CLAIMS, replace(CLAIM, name="first", uid="first"))
    assert [claim.name for claim in store.sharers(G0)] == ["second"]
    store.remove(CLAIMS, Name("lab", "second"), uid="second")
    assert store.sharers(G0) == []


def test_what_is_available_follows_claims_and_slices(store):
    assert store.available(REQUEST, ()) is None  # it is free
    store.apply(CLAIMS, replace(CLAIM, allocated=True, devices=(G0,)))
    assert store.available(REQUEST, ()).allocated.devices == 1
    assert store.available(replace(REQUEST, admin_access=True), ()) is None
    store.apply(CLAIMS, CLAIM)
    assert store.available(REQUEST, ()) is None
    taint = TaintFacts(key="k", effect="NoSchedule")
    store.apply(SLICES, replace(SLICE, devices=(replace(SLICE.devices[0], taints=(taint,)),)))
    assert store.available(REQUEST, ()).tainted.words == {"k"}
    assert store.available(replace(REQUEST, tolerations=(Toleration(key="k"),)), ()) is None


def test_the_last_share_makes_a_device_available_again(store):
    capacity = (CapacityFacts(name="d/size", value="1"),)
    shared = DeviceFacts(name="g0", attributes={}, capacity=capacity, shareable=True)
    store.apply(SLICES, replace(SLICE, devices=(shared,)))
    share = Share(device=G0, consumed=(Amount("d/size", "1"),))
    store.apply(CLAIMS, replace(CLAIM, allocated=True, shares=(share,)))
    assert store.available(REQUEST, ()).used_up.words == {"size"}
    store.remove(CLAIMS, Name("lab", "train-x"), uid="c1")
    assert store.available(REQUEST, ()) is None


def test_counters_follow_the_slices(store):
    pool, card = PoolID("d", "n1"), CounterSetFacts(name="card", counters=(Amount("m", "1"),))
    assert store.counters(pool) is None
    store.apply(SLICES, replace(SLICE, counter_sets=(card,)))
    assert store.counters(pool).totals == {("card", "m"): "1"}
    store.remove(SLICES, Name("", "s"), uid="s1")
    assert store.counters(pool) is None


def test_a_selection_follows_the_slices(store):
    assert [each.identity for each in store.matches(()).certain] == [G0]
    store.remove(SLICES, Name("", "s"), uid="s1")
    assert store.matches(()).certain == ()


def test_a_complete_list_removes_what_it_does_not_hold(store):
    fresh = replace(CLAIM, name="fresh", uid="c5")
    changes = store.replace(CLAIMS, [fresh])
    assert [(c.name.name, c.old is None, c.new is None) for c in changes] == [
        ("train-x", False, True),
        ("fresh", True, False),
    ]
    assert store.claim("lab", "train-x") is None


def test_a_cleared_store_knows_nothing(store):
    store.clear()
    assert [store.size(kind) for kind in (PODS, CLAIMS, TEMPLATES, CLASSES, SLICES)] == [0] * 5
    assert list(store.waiting_pods()) == []


TRAIN, OTHER = Name("lab", "train"), Name("lab", "other")
WAITING = {TRAIN, OTHER}


@pytest.mark.parametrize(
    ("kind", "fact", "pods"),
    [
        pytest.param(PODS, replace(POD, gated=True), {TRAIN}, id="pod"),
        pytest.param(
            CLAIMS, replace(CLAIM, owner_pod="train"), {TRAIN}, id="claim-touches-its-pods"
        ),
        pytest.param(
            CLAIMS,
            replace(CLAIM, allocated=True, devices=(G0,)),
            WAITING,
            id="allocation-touches-all-that-wait",
        ),
        pytest.param(
            CLAIMS,
            replace(CLAIM, allocated=True, shares=(Share(device=G0),)),
            WAITING,
            id="share-touches-all-that-wait",
        ),
        pytest.param(
            TEMPLATES, replace(TEMPLATE, requests=()), {TRAIN}, id="template-touches-its-pods"
        ),
        pytest.param(CLASSES, replace(CLASS, uid="k2"), WAITING, id="class"),
        pytest.param(SLICES, replace(SLICE, generation=2), WAITING, id="slice"),
    ],
)
def test_a_change_touches_pods(store, kind, fact, pods):
    change = store.apply(kind, fact)
    assert set(pods_touched([change], store)) == pods


def test_pods_with_a_node_are_touched_by_themselves_only(store):
    store.apply(PODS, replace(POD, node="n1"))
    change = store.apply(CLASSES, replace(CLASS, uid="k2"))
    assert set(pods_touched([change], store)) == {OTHER}


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        pytest.param(REQUEST, True, id="asked-for"),
        pytest.param(
            Request(name="g", device_class="", alternatives=(REQUEST,)), True, id="as-alternative"
        ),
        pytest.param(Request(name="g", device_class="x"), False, id="not-asked-for"),
    ],
)
def test_a_class_touches_what_asks_for_it(store, request_, found):
    store.apply(TEMPLATES, replace(TEMPLATE, requests=(request_,)))
    store.apply(CLAIMS, replace(CLAIM, requests=(request_,)))
    change = store.remove(CLASSES, Name("", "gpu.example"), uid="k1")
    assert (Name("lab", "tpl") in set(templates_touched([change], store))) is found
    assert (Name("lab", "train-x") in set(claims_touched([change], store))) is found


def test_selections_of_one_device_share_it(store):
    (first,) = store.matches(()).certain
    (second,) = store.matches(('device.driver == "d"',)).certain
    assert first is second


def test_cached_selections_are_bounded_by_the_devices_that_they_hold(monkeypatch):
    monkeypatch.setattr(stores, "CACHED_DEVICES", 1000)
    store = Store()
    devices = tuple(DeviceFacts(name=f"g{n}", attributes={}) for n in range(300))
    store.apply(SLICES, replace(SLICE, devices=devices))
    every = [(f'device.driver == "d"{" " * n}',) for n in range(6)]
    for each in every:
        assert len(store.matches(each)) == 300
    evaluated = []

    def match(devices, expressions):
        evaluated.append(expressions)
        return match_devices(devices, expressions)

    monkeypatch.setattr(stores, "match_devices", match)
    for each in every[3:]:
        store.matches(each)
    assert evaluated == [], "the last three are cached"
    store.matches(every[0])
    assert evaluated == [every[0]]


def test_a_selection_that_is_larger_than_the_cache_is_answered(monkeypatch):
    monkeypatch.setattr(stores, "CACHED_DEVICES", 10)
    store = Store()
    devices = tuple(DeviceFacts(name=f"g{n}", attributes={}) for n in range(300))
    store.apply(SLICES, replace(SLICE, devices=devices))
    assert len(store.matches(())) == 300
    assert len(store.matches(())) == 300
