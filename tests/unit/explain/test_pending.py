"""The reasons why a pod waits, and the cases in which nothing may be reported."""

from dataclasses import replace

import pytest

from drakit_explain.cel.library import Library
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    Consumer,
    PodClaim,
    PodFacts,
    ReportFacts,
    Request,
    TemplateFacts,
)
from drakit_explain.pending import Explainer
from drakit_explain.pending_claims import missing_classes
from drakit_explain.selectors import FeatureGates
from tests.fakes.world import (
    ANY,
    ask_allocator,
    claim,
    device,
    evaluate_for,
    holding,
    node,
    request,
    slice_on,
    world_of,
)
from tests.fakes.world import POD as POD_OF_ANY
from tests.fakes.world import explain as explained


def explain(pod, world):
    return list(explained(pod, world).reasons)


GPU = ClassFacts(name="gpu.example", uid="c1", selectors=('device.driver == "d"',))
BIG = ClassFacts(name="big.example", uid="c2", selectors=('device.driver == "big"',))
ODD = ClassFacts(
    name="odd.example", uid="c3", selectors=('device.capacity["d"].m.compareTo(quantity("1")) > 0',)
)


def published(*names, driver="d"):
    return replace(slice_on("n1", *(device(name) for name in names)), driver=driver)


def holder(name, *devices, pods=()):
    return replace(
        holding(name, *devices), consumers=tuple(Consumer("pods", each, each) for each in pods)
    )


def gpu(name="gpu", **changes):
    return Request(**{"name": name, "device_class": "gpu.example"} | changes)


def either(*requests):
    return Request(name="gpu", device_class="", alternatives=requests)


def cluster(*requests, classes=(GPU, BIG, ODD), slices=(), holders=()):
    template = TemplateFacts(namespace="lab", name="tpl", uid="t", requests=requests)
    waiting = ClaimFacts(
        namespace="lab", name="train-x", uid="w", requests=requests, owner_pod="train"
    )
    return world_of(*classes, waiting, *holders, template, *slices)


POD = PodFacts(
    namespace="lab",
    name="train",
    uid="p",
    claims=(PodClaim(name="gpu", template="tpl", generated="train-x"),),
)

MISSING = (
    'pod lab/train waits: DeviceClass "gpu.example" of claim template "tpl", request "gpu", '
    "does not exist; create it or correct deviceClassName"
)
NO_DEVICE = (
    'pod lab/train waits: no node publishes a device of DeviceClass "gpu.example" that matches '
    'request "gpu" of claim template "tpl"; '
)
ABSENT = "no slice of driver d has devices, so check that the driver is running"


def taken(amount, verb, holders, wants=""):
    of = 'request "gpu" of claim template "tpl"'
    match = "matches" if amount == "the only device" else "match"
    asks, user = (f"{of} asks for {wants} devices: ", match) if wants else ("", f"{match} {of}")
    released = "the device is" if amount == "the only device" else "enough of them are"
    return (
        f'pod lab/train waits: {asks}{amount} of DeviceClass "gpu.example" that {user} '
        f"{verb} allocated to {holders}; the claim can be allocated when {released} released"
    )


@pytest.mark.parametrize(
    ("facts", "code", "sentence"),
    [
        pytest.param(
            cluster(gpu(admin_access=True), classes=()),
            "DeviceClassMissing",
            MISSING,
            id="class-missing-for-admin-access",
        ),
        pytest.param(
            cluster(gpu(), slices=[published("g0", driver="other")]),
            "NoDevicePublished",
            NO_DEVICE.replace(
                '"tpl";',
                '"tpl" (of 1 published, class gpu.example rejects 1 with selector '
                'device.driver == "d");',
            )
            + ABSENT,
            id="only-other-drivers-publish",
        ),
        pytest.param(
            cluster(
                gpu(),
                slices=[published("g0", "g1")],
                holders=[holder("b", "g0", pods=["two", "one"]), holder("a", "g1")],
            ),
            "DevicesAllocated",
            taken("all 2 devices", "are", "claim lab/a (no pod), claim lab/b (pod one and 1 more)"),
            id="all-are-allocated-holders-sorted",
        ),
        pytest.param(
            cluster(
                gpu(),
                slices=[published("g0", "g1", "g2", "g3", "g4")],
                holders=[holder(f"h{i}", f"g{i}", pods=["p"]) for i in range(5)],
            ),
            "DevicesAllocated",
            taken(
                "all 5 devices",
                "are",
                "claim lab/h0 (pod p), claim lab/h1 (pod p), claim lab/h2 (pod p) and 2 more",
            ),
            id="many-holders-are-cut",
        ),
        pytest.param(
            cluster(gpu(count=2), slices=[published("g0", "g1")], holders=[holder("a", "g0")]),
            "DevicesAllocated",
            taken("1 of the 2 devices", "is", "claim lab/a (no pod)", wants=2),
            id="fewer-free-than-asked-for",
        ),
        pytest.param(
            cluster(gpu(count=0), slices=[published("g0", "g1")], holders=[holder("a", "g0")]),
            "DevicesAllocated",
            taken("1 of the 2 devices", "is", "claim lab/a (no pod)", wants="all"),
            id="all-are-asked-for-and-one-is-allocated",
        ),
        pytest.param(
            cluster(
                gpu(selectors=('device.attributes["d"].size == 8',)),
                slices=[published("g0")],
                holders=[holder("a", "g0")],
            ),
            "SelectorFailed",
            'pod lab/train waits: request "gpu" of claim template "tpl": its selector fails: no '
            "such key: size, on device g0 of pool n1, driver d; no device matches; check the "
            "spelling of size; if only some devices have it, test for it first "
            '(has(device.attributes["d"].size)), or test device.driver first',
            id="a-selector-fails-on-a-device-that-is-allocated",
        ),
    ],
)
def test_a_pod_waits_for_one_reason(facts, code, sentence):
    (reason,) = explain(POD, facts)
    assert (str(reason.code), reason.text) == (code, sentence)
    assert reason.regarding == POD.reference


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(
            cluster(gpu(device_class="odd.example"), slices=[published("g0")]),
            id="class-selector-not-evaluated",
        ),
        pytest.param(
            cluster(
                gpu(selectors=('device.attributes["d"].v.isGreaterThan(semver("1.0.0"))',)),
                slices=[published("g0")],
                holders=[holder("a", "g0")],
            ),
            id="request-selector-not-evaluated-though-all-are-allocated",
        ),
        pytest.param(
            cluster(
                either(gpu("one"), gpu("two", device_class="odd.example")),
                slices=[published("b0", driver="dx")],
            ),
            id="an-alternative-is-not-evaluated",
        ),
    ],
)
def test_nothing_is_reported_unless_it_is_certain(facts):
    assert explain(POD, facts) == []


@pytest.mark.parametrize(
    ("claim", "code", "sentence"),
    [
        pytest.param(
            PodClaim(name="gpu", template="tpl"),
            "DeviceClassMissing",
            MISSING,
            id="claim-not-made-yet-is-judged-by-its-template",
        ),
        pytest.param(
            PodClaim(name="gpu", template="deleted", generated="train-x"),
            "DeviceClassMissing",
            MISSING.replace('"tpl"', '"deleted"'),
            id="claim-whose-template-was-deleted-is-judged-by-itself",
        ),
    ],
)
def test_a_claim_is_found_by_its_reference(claim, code, sentence):
    facts = cluster(gpu(), classes=())
    (reason,) = explain(replace(POD, claims=(claim,)), facts)
    assert (str(reason.code), reason.text) == (code, sentence)


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(replace(POD, node="n1", claims=()), id="it-has-a-node"),
        pytest.param(replace(POD, gated=True), id="scheduling-gates-hold-it"),
        pytest.param(replace(POD, phase="Running"), id="it-runs"),
        pytest.param(
            replace(POD, claims=(PodClaim(name="gpu", template="gone", needless=True),)),
            id="its-claim-is-not-needed",
        ),
        pytest.param(replace(POD, claims=(PodClaim(name="g", claim="mine"),)), id="allocated"),
    ],
)
def test_a_pod_that_does_not_wait_for_claims(pod):
    facts = cluster(gpu(), classes=())
    facts.apply(holder("mine", "g0"))
    assert explain(pod, facts) == []


def test_two_claims_of_one_template_give_one_sentence():
    two = tuple(PodClaim(name=name, template="tpl") for name in ("a", "b"))
    assert len(explain(replace(POD, claims=two), cluster(gpu(), classes=()))) == 1


def test_a_template_that_names_a_missing_class():
    facts = cluster(gpu(), either(gpu("one", device_class="gone.example")))
    (reason,) = missing_classes(facts.template("lab", "tpl"), facts)
    assert reason.regarding.kind == "ResourceClaimTemplate"
    assert reason.text == (
        'DeviceClass "gone.example" of ResourceClaimTemplate lab/tpl, request "gpu/one", does not '
        "exist; create it or correct deviceClassName"
    )


def registered_on(*nodes):
    return [
        ReportFacts(
            name=f"{name}.d",
            uid=name,
            node=name,
            driver="d",
            registration="" if name in nodes else "Rejected",
        )
        for name in ("n1", "n2")
    ]


def admin_claim(on):
    """An allocated claim that takes no device from others, on one node."""
    return ClaimFacts(namespace="lab", name="admin", uid="a", allocated=True, nodes=on)


ASKS_MULTIPLE = ClassFacts(name="any", uid="c", selectors=("device.allowMultipleAllocations",))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([admin_claim("n1")], [admin_claim("n2")], id="claim-with-admin-access-moved"),
        pytest.param(registered_on("n2"), registered_on("n1"), id="driver-registered-elsewhere"),
        pytest.param(registered_on("n1", "n2"), registered_on("n2"), id="driver-unregistered"),
        pytest.param([holding("h", "g", pool="n1")], [holding("h", "g", pool="n2")], id="holder"),
        pytest.param(
            [ANY], [replace(ANY, selectors=('device.driver == "e"',))], id="selector-of-the-class"
        ),
        pytest.param([], [replace(node("n1"), unschedulable=True)], id="node-cordoned"),
        pytest.param([ASKS_MULTIPLE], None, id="feature-gates"),
    ],
)
def test_an_answer_follows_each_of_its_inputs(before, after):
    """An explainer with cached results has the same results as a new one."""
    waiting = replace(POD_OF_ANY, claims=(*POD_OF_ANY.claims, PodClaim(name="x", claim="admin")))
    shared = (slice_on(name, device("g", shareable=name == "n2")) for name in ("n1", "n2"))
    start = (node("n1"), node("n2"), *shared, ANY, claim(request()), admin_claim(None))
    world = world_of(*start, *before)
    kept = Explainer(world)
    evaluate_for(kept, world, waiting, Library())
    first = kept.explain_now(waiting, ask_allocator)
    for fact in after or ():
        world.apply(fact)
    rules = Library()
    if after is None:
        rules.use(FeatureGates(consumable_capacity=False))
        world.forget_outcomes()
    evaluate_for(kept, world, waiting, rules)
    second = kept.explain_now(waiting, ask_allocator)
    assert second == Explainer(world).explain_now(waiting, ask_allocator) != first
