"""The store: what changed, and what its indexes answer."""

from dataclasses import replace

import pytest

from drakit_explain.devices import DeviceFacts, TaintFacts
from drakit_explain.kinds import CLAIMS, CLASSES, KINDS, NODES, PODS, RULES, SLICES, TEMPLATES
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceID,
    NodeFacts,
    PodClaim,
    PodFacts,
    Request,
    Result,
    Share,
    SliceFacts,
    TaintRuleFacts,
    TemplateFacts,
)
from drakit_explain.world import Change, Name
from drakit_operator import affected
from drakit_operator.store import Store

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
SLICE = SliceFacts(name="s", uid="s1", driver="d", pool="n1", devices=(DeviceFacts(name="g0"),))


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


def test_a_pod_without_claims_is_not_kept(store):
    assert store.apply(PODS, PodFacts(namespace="lab", name="web", uid="p9")) is None
    assert store.world.pod("lab", "web") is None


def test_a_late_deletion_of_an_earlier_object_of_that_name_is_ignored(store):
    store.apply(PODS, replace(POD, uid="p7"))
    assert store.remove(PODS, Name("lab", "train"), uid="p1") is None
    assert store.world.pod("lab", "train").uid == "p7"


def test_a_holder_is_known_until_its_claim_gives_the_device_back(store):
    store.apply(CLAIMS, replace(CLAIM, allocated=True, devices=(G0,)))
    assert store.world.holder(G0).name == "train-x"
    store.apply(CLAIMS, CLAIM)
    assert store.world.holder(G0) is None


def test_a_device_that_changed_hands_is_not_lost_when_the_first_holder_goes(store):
    first = replace(CLAIM, name="first", uid="c2", allocated=True, devices=(G0,))
    store.apply(CLAIMS, first)
    store.apply(CLAIMS, replace(CLAIM, allocated=True, devices=(G0,)))
    store.remove(CLAIMS, Name("lab", "first"), uid="c2")
    assert store.world.holder(G0).name == "train-x"


def test_all_sharers_are_known_until_they_give_their_shares_back(store):
    shares = (Share(device=G0), Share(device=G0))
    for name in ("first", "second"):
        store.apply(CLAIMS, replace(CLAIM, name=name, uid=name, allocated=True, shares=shares))
    assert {claim.name for claim in store.world.sharers(G0)} == {"first", "second"}
    assert store.world.holder(G0) is None
    store.apply(CLAIMS, replace(CLAIM, name="first", uid="first"))
    assert [claim.name for claim in store.world.sharers(G0)] == ["second"]
    store.remove(CLAIMS, Name("lab", "second"), uid="second")
    assert store.world.sharers(G0) == []


TRAIN, OTHER = Name("lab", "train"), Name("lab", "other")
WAITING = {TRAIN, OTHER}


def test_changes_of_each_kind_are_followed():
    assert {kind.type for kind in KINDS} == affected._FOLLOW.keys()


def affects(concern: str, change: Change, store: Store) -> set[Name]:
    found = affected.affected([change], store.world)
    return {key.name for key in found if key.concern == concern}


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
        pytest.param(NODES, NodeFacts(name="n1", uid="n", labels={}), WAITING, id="node"),
    ],
)
def test_a_change_touches_pods(store, kind, fact, pods):
    change = store.apply(kind, fact)
    assert affects(affected.POD, change, store) == pods


def test_pods_that_run_are_touched_by_themselves_only(store):
    store.apply(PODS, replace(POD, node="n1", phase="Running"))
    change = store.apply(CLASSES, replace(CLASS, uid="k2"))
    assert affects(affected.POD, change, store) == {OTHER}


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        pytest.param({}, {"on-n1", "on-n2", "shared"}, id="every-device"),
        pytest.param({"driver": "d"}, {"on-n1", "on-n2"}, id="driver"),
        pytest.param({"pool": "n2"}, {"on-n2", "shared"}, id="pool"),
        pytest.param({"driver": "d", "pool": "n2", "device": "g0"}, {"on-n2"}, id="device"),
        pytest.param({"driver": "d", "pool": "n3"}, set(), id="other-pool"),
    ],
)
def test_a_taint_rule_touches_the_claims_with_devices_in_its_pools(store, rule, found):
    for name, device in (
        ("on-n1", G0),
        ("on-n2", DeviceID("d", "n2", "g0")),
        ("shared", DeviceID("e", "n2", "g1")),
    ):
        result = Result(request="gpu", device=device)
        store.apply(CLAIMS, replace(CLAIM, name=name, uid=name, allocated=True, results=(result,)))
    taint = TaintFacts(key="k", effect="NoExecute")
    change = store.apply(RULES, TaintRuleFacts(name="r", uid="r", taint=taint, **rule))
    assert {name.name for name in affects(affected.CLAIM, change, store)} == found
    gone = store.remove(RULES, Name("", "r"), uid="r")
    assert {name.name for name in affects(affected.CLAIM, gone, store)} == found


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
    assert (Name("lab", "tpl") in affects(affected.TEMPLATE, change, store)) is found
    assert (Name("lab", "train-x") in affects(affected.CLAIM, change, store)) is found
