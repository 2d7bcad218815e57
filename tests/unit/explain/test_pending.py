"""Why a pod waits: the cases, and the cases in which nothing may be said."""

from dataclasses import dataclass, field, replace

import pytest

from drakit.explain import (
    Amount,
    ClaimFacts,
    ClassFacts,
    DeviceFacts,
    DeviceID,
    PodClaim,
    PodFacts,
    Request,
    Share,
    SliceFacts,
    TemplateFacts,
    availability,
    current_counters,
    current_devices,
    explain,
    match_devices,
    missing_classes_of_claim,
    missing_classes_of_template,
)


@dataclass
class Cluster:
    """The facts as plain lists."""

    classes: list[ClassFacts] = field(default_factory=list)
    claims: list[ClaimFacts] = field(default_factory=list)
    templates: list[TemplateFacts] = field(default_factory=list)
    slices: list[SliceFacts] = field(default_factory=list)

    def claim(self, namespace, name):
        found = (c for c in self.claims if (c.namespace, c.name) == (namespace, name))
        return next(found, None)

    def template(self, namespace, name):
        found = (t for t in self.templates if (t.namespace, t.name) == (namespace, name))
        return next(found, None)

    def device_class(self, name):
        return next((c for c in self.classes if c.name == name), None)

    def matches(self, expressions):
        return match_devices(current_devices(self.slices), expressions)

    def available(self, request, expressions):
        return availability(self.matches(expressions), request, self)

    def holder(self, device):
        return next((c for c in self.claims if device in c.devices), None)

    def sharers(self, device):
        return [c for c in self.claims if device in [share.device for share in c.shares]]

    def counters(self, pool):
        return current_counters(self.slices).get(pool)


GPU = ClassFacts(name="gpu.example", uid="c1", selectors=('device.driver == "d"',))
BIG = ClassFacts(name="big.example", uid="c2", selectors=('device.driver == "big"',))
ODD = ClassFacts(name="odd.example", uid="c3", selectors=("device.driver.startsWith('d')",))


def published(*names, driver="d", shareable=False):
    devices = tuple(DeviceFacts(name=n, attributes={}, shareable=shareable) for n in names)
    return SliceFacts(name=f"{driver}-s", uid="s", driver=driver, pool="n1", devices=devices)


def holder(name, *devices, pods=()):
    return ClaimFacts(
        namespace="lab",
        name=name,
        uid=name,
        allocated=True,
        devices=tuple(DeviceID("d", "n1", device) for device in devices),
        reserved_for=tuple(pods),
    )


def sharer(name, *devices, **consumed):
    amounts = tuple(Amount(f"d/{key}", quantity) for key, quantity in consumed.items())
    return replace(
        holder(name),
        shares=tuple(Share(device=DeviceID("d", "n1", each), consumed=amounts) for each in devices),
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
    return Cluster(
        classes=list(classes),
        claims=[waiting, *holders],
        templates=[template],
        slices=list(slices),
    )


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
NONE = (
    'pod lab/train waits: no node publishes a device of DeviceClass "gpu.example" that request '
    '"gpu" of claim template "tpl" could use; check that the driver runs and publishes '
    "ResourceSlices, and the selectors of class and request"
)


def taken(amount, verb, holders):
    return (
        f'pod lab/train waits: {amount} of DeviceClass "gpu.example" that request "gpu" of claim '
        f'template "tpl" could use {verb} allocated, to {holders}; '
        f"the claim can be allocated when enough of them are released"
    )


@pytest.mark.parametrize(
    ("facts", "code", "sentence"),
    [
        pytest.param(cluster(gpu(), classes=()), "DeviceClassMissing", MISSING, id="class-missing"),
        pytest.param(
            cluster(gpu(admin_access=True), classes=()),
            "DeviceClassMissing",
            MISSING,
            id="class-missing-for-admin-access",
        ),
        pytest.param(
            cluster(gpu(), classes=(), slices=[published("g0")]),
            "DeviceClassMissing",
            MISSING,
            id="class-missing-though-devices-are-free",
        ),
        pytest.param(cluster(gpu()), "NoDevicePublished", NONE, id="nothing-published"),
        pytest.param(
            cluster(gpu(), slices=[published("g0", driver="other")]),
            "NoDevicePublished",
            NONE,
            id="only-other-drivers-publish",
        ),
        pytest.param(
            cluster(
                gpu(selectors=('device.attributes["d"].size == 80',)), slices=[published("g0")]
            ),
            "NoDevicePublished",
            NONE,
            id="request-selects-none-of-the-class",
        ),
        pytest.param(
            cluster(gpu(count=3), slices=[published("g0")]),
            "NoDevicePublished",
            'pod lab/train waits: request "gpu" of claim template "tpl" asks for 3 devices of '
            'DeviceClass "gpu.example", but only 1 is published that it could use; lower count or '
            "add devices",
            id="fewer-published-than-asked-for",
        ),
        pytest.param(
            cluster(gpu(), slices=[published("g0")], holders=[holder("a", "g0", pods=["one"])]),
            "DevicesAllocated",
            taken("the only device", "is", "claim lab/a (pod one)"),
            id="the-only-one-is-allocated",
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
            taken("1 of the 2 devices", "is", "claim lab/a (no pod)"),
            id="fewer-free-than-asked-for",
        ),
    ],
)
def test_a_pod_waits_for_one_reason(facts, code, sentence):
    (reason,) = explain(POD, facts)
    assert (str(reason.code), reason.sentence) == (code, sentence)
    assert reason.regarding == POD.reference


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(cluster(gpu(), slices=[published("g0")]), id="a-device-is-free"),
        pytest.param(
            cluster(gpu(), slices=[published("g0", "g1")], holders=[holder("a", "g0")]),
            id="one-of-two-is-free",
        ),
        pytest.param(
            cluster(gpu(device_class="odd.example"), slices=[published("g0")]),
            id="class-selector-not-understood",
        ),
        pytest.param(
            cluster(
                gpu(selectors=("size(device.attributes) > 1",)),
                slices=[published("g0")],
                holders=[holder("a", "g0")],
            ),
            id="request-selector-not-understood-though-all-are-allocated",
        ),
        pytest.param(
            cluster(gpu(), slices=[published("g0", shareable=True)], holders=[sharer("a", "g0")]),
            id="held-device-can-be-shared",
        ),
        pytest.param(cluster(gpu(admin_access=True)), id="admin-access-takes-no-device"),
        pytest.param(
            cluster(
                either(gpu("one"), gpu("two", device_class="big.example")),
                slices=[published("b0", driver="big")],
            ),
            id="an-alternative-has-a-free-device",
        ),
        pytest.param(
            cluster(
                either(gpu("one"), gpu("two", device_class="odd.example")),
                slices=[published("b0", driver="dx")],
            ),
            id="an-alternative-is-not-understood",
        ),
        pytest.param(
            cluster(gpu(count=0), slices=[published("g0", "g1")], holders=[holder("a", "g0")]),
            id="all-mode-and-some-are-free",
        ),
    ],
)
def test_only_certain_problems_are_reported(facts):
    assert explain(POD, facts) == []


def test_prioritized_alternatives_are_blocked_together():
    facts = cluster(
        either(gpu("one"), gpu("two", device_class="big.example")),
        slices=[published("g0")],
        holders=[holder("a", "g0")],
    )
    reasons = explain(POD, facts)
    assert [str(r.code) for r in reasons] == ["DevicesAllocated", "NoDevicePublished"]
    assert 'request "gpu/one"' in reasons[0].sentence
    assert 'request "gpu/two"' in reasons[1].sentence


def test_one_alternative_with_a_missing_class_stops_the_claim():
    facts = cluster(
        either(gpu("one"), gpu("two", device_class="gone.example")), slices=[published("g0")]
    )
    (reason,) = explain(POD, facts)
    assert reason.code == "DeviceClassMissing"
    assert 'DeviceClass "gone.example"' in reason.sentence
    assert 'request "gpu/two"' in reason.sentence


@pytest.mark.parametrize(
    ("claim", "code", "sentence"),
    [
        pytest.param(
            PodClaim(name="gpu", template="gone"),
            "ResourceClaimTemplateMissing",
            'pod lab/train waits: ResourceClaimTemplate "gone" of its claim "gpu" does not exist '
            'in namespace "lab"; create it or correct resourceClaimTemplateName',
            id="template-missing",
        ),
        pytest.param(
            PodClaim(name="gpu", claim="gone"),
            "ResourceClaimMissing",
            'pod lab/train waits: ResourceClaim "gone" of its claim "gpu" does not exist in '
            'namespace "lab"; create it or correct resourceClaimName',
            id="claim-missing",
        ),
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
    assert (str(reason.code), reason.sentence) == (code, sentence)


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(replace(POD, node="n1"), id="it-has-a-node"),
        pytest.param(replace(POD, gated=True), id="scheduling-gates-hold-it"),
        pytest.param(replace(POD, deleting=True), id="it-is-being-deleted"),
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
    facts.claims.append(holder("mine", "g0"))
    assert explain(pod, facts) == []


def test_two_claims_of_one_template_give_one_sentence():
    two = tuple(PodClaim(name=name, template="tpl") for name in ("a", "b"))
    assert len(explain(replace(POD, claims=two), cluster(gpu(), classes=()))) == 1


def test_a_template_that_names_a_missing_class():
    facts = cluster(gpu(), either(gpu("one", device_class="gone.example")))
    (reason,) = missing_classes_of_template(facts.templates[0], facts)
    assert reason.regarding.kind == "ResourceClaimTemplate"
    assert reason.sentence == (
        'DeviceClass "gone.example" of ResourceClaimTemplate lab/tpl, request "gpu/one", does not '
        "exist; create it or correct deviceClassName"
    )


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        pytest.param({}, ["DeviceClassMissing"], id="standalone"),
        pytest.param({"owner_pod": "train"}, [], id="made-from-a-template"),
        pytest.param({"allocated": True}, [], id="allocated-before-the-class-went"),
    ],
)
def test_a_claim_that_names_a_missing_class(changes, codes):
    claim = ClaimFacts(namespace="lab", name="c", uid="u", requests=(gpu(),))
    facts = cluster(gpu(), classes=())
    reasons = missing_classes_of_claim(replace(claim, **changes), facts)
    assert [str(r.code) for r in reasons] == codes
