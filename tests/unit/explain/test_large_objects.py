"""Objects that a tenant makes large: they exist without their content, and answers say so."""

import pytest

from drakit_explain import nodes
from drakit_explain import world as world_module
from drakit_explain.budget import Budget
from drakit_explain.loads import Loads, load_of_pod
from drakit_explain.model import ClaimFacts, DeviceID, NodeFacts, Placement, PodFacts
from drakit_explain.nodes import UsableNodes
from drakit_explain.pending import Explainer, Verdict
from drakit_explain.projection import (
    MAX_EXPRESSION,
    MAX_NAMES,
    MAX_POD_CLAIMS,
    project_claim,
    project_class,
    project_pod,
    project_slice,
    project_template,
)
from drakit_explain.world import World
from tests.fakes.world import ask_allocator

METADATA = {"namespace": "lab", "name": "x", "uid": "u"}


def claim_spec(*expressions, **more):
    selectors = [{"cel": {"expression": each}} for each in expressions]
    exact = {"deviceClassName": "gpu", "count": 2, "selectors": selectors, **more}
    return {"devices": {"requests": [{"name": "r", "exactly": exact}]}}


@pytest.mark.parametrize(
    ("expression", "kept"),
    [
        pytest.param("x" * MAX_EXPRESSION, True, id="ascii-at-the-limit"),
        pytest.param("x" * (MAX_EXPRESSION + 1), False, id="ascii-beyond"),
        pytest.param("\N{SNOWMAN}" * (MAX_EXPRESSION // 3), True, id="three-bytes-at-the-limit"),
        pytest.param("\N{MICROSCOPE}" * (MAX_EXPRESSION // 2), False, id="four-bytes-beyond"),
    ],
)
def test_the_bytes_of_a_selector_count(expression, kept):
    (request,) = project_claim({"metadata": METADATA, "spec": claim_spec(expression)}).requests
    assert request.selectors == ((expression,) if kept else ("",))


MANY = ["x" * 2000] * 33
TOLERATIONS = [{"key": "k" * 60, "operator": "Exists"}] * 800


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(claim_spec(*MANY), id="selectors"),
        pytest.param(claim_spec(*["\N{MICROSCOPE}" * 500] * 33), id="selectors-of-four-bytes"),
        pytest.param(claim_spec(tolerations=TOLERATIONS), id="tolerations"),
        pytest.param(
            claim_spec()
            | {
                "devices": claim_spec()["devices"]
                | {"constraints": [{"requests": ["r" * 60]}] * 900}
            },
            id="constraints",
        ),
    ],
)
def test_a_claim_with_large_requests_keeps_their_names_and_classes(spec):
    claim = project_claim({"metadata": METADATA, "spec": spec})
    template = project_template({"metadata": METADATA, "spec": {"spec": spec}})
    for facts in (claim, template):
        (request,) = facts.requests
        assert (request.name, request.device_class, request.count) == ("r", "gpu", 2)
        assert (request.selectors, request.tolerations, facts.constraints) == ((), (), ())
        assert "more than 64 KiB" in request.unsupported


def test_what_drivers_get_as_parameters_does_not_count():
    parameters = {"opaque": {"driver": "d", "parameters": {"x": "x" * 100_000}}}
    spec = claim_spec("true")
    spec["devices"]["config"] = [parameters]
    (request,) = project_claim({"metadata": METADATA, "spec": spec}).requests
    assert (request.selectors, request.unsupported) == (("true",), "")


def test_a_class_with_large_selectors_has_one_that_is_not_evaluated():
    selectors = [{"cel": {"expression": each}} for each in MANY]
    facts = project_class({"metadata": {"name": "c", "uid": "u"}, "spec": {"selectors": selectors}})
    assert facts.selectors == ("",)


TERM = {"matchExpressions": [{"key": "a", "operator": "Exists"}]}
REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [TERM] * 2000}}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"affinity": {"nodeAffinity": REQUIRED}}, id="affinity"),
        pytest.param({"nodeSelector": {f"k{n}": "v" * 60 for n in range(1000)}}, id="selector"),
        pytest.param({"tolerations": TOLERATIONS}, id="tolerations"),
        pytest.param(
            {
                "containers": [
                    {"name": "c", "resources": {"limits": {f"x.io/{'r' * 40}{n}": "1"}}}
                    for n in range(1500)
                ]
            },
            id="resources",
        ),
    ],
)
def test_a_pod_with_large_rules_exists_without_them(spec):
    claims = [{"name": "gpu", "resourceClaimName": "c"}]
    pod = project_pod({"metadata": METADATA, "spec": {"resourceClaims": claims, **spec}})
    assert [each.claim for each in pod.claims] == ["c"]
    placement = pod.placement
    assert (placement.affinity, placement.node_selector, placement.tolerations) == (None, (), ())
    assert (pod.extended, pod.requests) == ((), ())
    assert "more than 64 KiB" in placement.unread


def test_few_finalizers_are_kept():
    metadata = METADATA | {"finalizers": [f"example.com/{n}" for n in range(1000)]}
    kept = project_pod({"metadata": metadata}).finalizers
    assert kept == tuple(f"example.com/{n}" for n in range(MAX_NAMES))


def test_few_scheduling_gates_are_kept():
    gates = [{"name": f"example.com/{n}"} for n in range(1000)]
    pod = project_pod({"metadata": METADATA, "spec": {"schedulingGates": gates}})
    assert pod.gated
    assert pod.gates == tuple(f"example.com/{n}" for n in range(MAX_NAMES))


@pytest.mark.parametrize("number", [MAX_POD_CLAIMS, MAX_POD_CLAIMS + 1, 1000])
def test_a_pod_with_too_many_claims_exists_with_the_first_ones(number):
    claims = [{"name": f"c{n}", "resourceClaimName": f"c{n}"} for n in range(number)]
    pod = project_pod({"metadata": METADATA, "spec": {"resourceClaims": claims}})
    assert [each.claim for each in pod.claims] == [f"c{n}" for n in range(MAX_POD_CLAIMS)]
    assert bool(pod.placement.unread) is (number > MAX_POD_CLAIMS)


def test_a_pod_with_thousands_of_resources_uses_none_of_a_node():
    requests = {f"hugepages-{n}Ki": "1" for n in range(1000)}
    spec = {"nodeName": "n1", "containers": [{"name": "c", "resources": {"requests": requests}}]}
    assert load_of_pod({"metadata": METADATA, "spec": spec}).requests == ()


# ---------------------------------------------------------------- answers


def explained(*, claim=None, of_class=(), **pod):
    world = World()
    selectors = [{"cel": {"expression": each}} for each in of_class]
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    devices = {"driver": "d", "nodeName": "n1", "pool": pool, "devices": [{"name": "d0"}]}
    spec = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "x"}], **pod}
    for fact in (
        project_class({"metadata": {"name": "gpu", "uid": "k"}, "spec": {"selectors": selectors}}),
        project_slice({"metadata": {"name": "s", "uid": "s"}, "spec": devices}),
        project_claim({"metadata": METADATA, "spec": claim or claim_spec()}),
        project_pod({"metadata": METADATA, "spec": spec, "status": {"phase": "Pending"}}),
    ):
        world.apply(fact)
    return Explainer(world).explain_now(world.pod("lab", "x"), ask_allocator)


def test_two_devices_of_one_are_a_shortage():
    assert explained().verdict is Verdict.BLOCKED


@pytest.mark.parametrize(
    ("objects", "named"),
    [
        pytest.param({"claim": claim_spec(*MANY)}, "the requests of its claim", id="claim"),
        pytest.param(
            {"claim": claim_spec(), "of_class": MANY}, "a selector of class gpu", id="class"
        ),
        pytest.param({"affinity": {"nodeAffinity": REQUIRED}}, "node affinity", id="pod"),
    ],
)
def test_an_answer_about_a_large_object_is_undecided_and_names_it(objects, named):
    explanation = explained(**objects)
    assert explanation.verdict is Verdict.UNDECIDED
    assert named in explanation.unknown[0]


# ---------------------------------------------------------------- caches


class CountingWorld(World):
    """Counts what caches ask for."""

    asked = 0

    def node(self, name):
        self.asked += 1
        return super().node(name)

    def holder(self, device):
        self.asked += 1
        return super().holder(device)


def pod_with(zone):
    rules = Placement(node_selector=(("zone", zone),))
    return PodFacts(namespace="lab", name=zone, uid=zone, placement=rules)


@pytest.mark.parametrize("loads", [None, Loads()], ids=["without-loads", "with-loads"])
def test_the_nodes_for_the_rules_used_last_are_kept(monkeypatch, loads):
    monkeypatch.setattr(nodes, "MAX_RULES", 2)
    world = CountingWorld()
    world.loads = loads
    world.apply(NodeFacts(name="n1", uid="n1", labels={"zone": "a"}))
    usable = UsableNodes(world)

    def evaluates(zone):
        before = world.asked
        found = usable.of(pod_with(zone), (), Budget())
        assert (found["n1"] is None) == (zone == "a")
        return world.asked > before

    assert [evaluates(zone) for zone in "abab"] == [True, True, False, False]
    assert [evaluates(zone) for zone in "acab"] == [False, True, False, True]


def test_the_holders_of_few_sets_of_devices_are_kept(monkeypatch):
    monkeypatch.setattr(world_module, "MAX_MASKS", 2)
    world = CountingWorld()
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    devices = {"driver": "d", "nodeName": "n1", "pool": pool, "devices": [{"name": "d0"}] * 3}
    of = project_slice({"metadata": {"name": "s", "uid": "s"}, "spec": devices})
    world.apply(of)
    device = DeviceID("d", "n1", "d0")
    world.apply(ClaimFacts(namespace="lab", name="c", uid="c", allocated=True, devices=(device,)))
    asked = []
    for mask in (1, 2, 1, 4, 1):
        before = world.asked
        assert world.holders_in(of, mask).keys() == {"c"}
        asked.append(world.asked > before)
    assert asked == [True, True, False, True, True]
