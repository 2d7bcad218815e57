"""
Situations of pods that wait, or fit: what they are made of, the verdict, and the remedy.

Each is a generator: the part before `yield` makes the situation, the part after it applies the
remedy that the explanation names. `DRIVER` in a selector means the scene's driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from drakit.explain.codes import Code
from drakit.explain.pending import Verdict
from e2e.explain.scene import WAITS, Scene, consumes, counters, device, devices

TAINT = {"key": "example.com/broken", "value": "yes", "effect": "NoSchedule"}


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One situation and what must be said of it."""

    name: str
    steps: Callable[[Scene], Iterator[None]]
    verdict: Verdict
    codes: frozenset[Code]
    words: tuple[str, ...]
    """What the explanation must name, in any of its sentences."""

    alone: bool
    """Whether it changes what other situations see."""

    tried: bool
    """Whether the scheduler tries the pod, and reports that it fits nowhere. It does not try a pod
    whose claim does not exist, and reports nothing."""


@dataclass
class Situations:
    """All situations, in the order of their definition."""

    found: list[Situation] = field(default_factory=list)

    def add(
        self,
        *codes: Code,
        words: tuple[str, ...] = (),
        verdict: Verdict = Verdict.BLOCKED,
        alone: bool = False,
        tried: bool = True,
    ) -> Callable[[Callable[[Scene], Iterator[None]]], None]:
        def added(steps: Callable[[Scene], Iterator[None]]) -> None:
            self.found.append(
                Situation(
                    name=steps.__name__.replace("_", "-"),
                    steps=steps,
                    verdict=verdict,
                    codes=frozenset(codes),
                    words=words,
                    alone=alone,
                    tried=tried and verdict is not Verdict.NOT_PENDING,
                )
            )

        return added

    def fits(self) -> Callable[[Callable[[Scene], Iterator[None]]], None]:
        """One of which we say that it fits; the scheduler agrees without a remedy."""
        return self.add(verdict=Verdict.FITS, tried=False)


SITUATIONS = Situations()
situation, fits = SITUATIONS.add, SITUATIONS.fits


# ------------------------------------------------------------ something is missing


@situation(Code.DEVICE_CLASS_MISSING, words=("class-missing.test",))
def class_missing(s: Scene) -> Iterator[None]:
    s.publish(device("a"))
    s.pod(s.request())
    yield
    s.device_class()


@situation(Code.DEVICE_CLASS_MISSING, words=("absent.test", "gpu/best"))
def class_of_an_alternative_missing(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.pod(s.alternatives(s.request("best", of="absent.test"), s.request("good")))
    yield
    s.device_class(name="absent.test")


@situation(Code.RESOURCE_CLAIM_MISSING, words=('"disk"', "resourceClaimName"), tried=False)
def claim_missing(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.pod(claims=["disk"])
    yield
    s.claim("disk", s.request())


@situation(Code.RESOURCE_CLAIM_TEMPLATE_MISSING, words=('"disk"',), tried=False)
def template_missing(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.pod(templates=["disk"])
    yield
    s.template("disk", s.request())


@situation(Code.NO_DEVICE_PUBLISHED, words=("nothing-published.test",))
def nothing_published(s: Scene) -> Iterator[None]:
    s.device_class()
    s.pod(s.request())
    yield
    s.publish(device("a"))


@situation(Code.NO_DEVICE_PUBLISHED)
def all_of_nothing(s: Scene) -> Iterator[None]:
    s.device_class()
    s.pod(s.request(allocationMode="All"))
    yield
    s.publish(device("a"))


@situation(Code.NO_DEVICE_PUBLISHED, words=("asks for 3 devices", "only 2"))
def count_above_published(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(devices("a", "b"))
    s.pod(s.request(count=3))
    yield
    s.pod(s.request(count=2))


# ------------------------------------------------------------ selectors

MODEL_X = 'device.attributes["DRIVER"].model == "x"'
MODEL_Z = 'device.attributes["DRIVER"].model == "z"'
FAST = 'device.attributes["DRIVER"].fast'


@situation(Code.NO_DEVICE_PUBLISHED, words=("rejects 2",))
def class_selector_rejects(s: Scene) -> Iterator[None]:
    s.device_class(MODEL_Z)
    s.publish(device("a", {"model": "x"}), device("b", {"model": "y"}))
    s.pod(s.request())
    yield
    s.device_class(MODEL_X)


@situation(Code.NO_DEVICE_PUBLISHED, words=("the request rejects 1",))
def request_selector_rejects(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"model": "x"}))
    s.pod(s.request("gpu", MODEL_Z))
    yield
    s.pod(s.request("gpu", MODEL_X))


@situation(Code.NO_DEVICE_PUBLISHED, words=("the request rejects 1 by",))
def each_selector_rejects_one(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"model": "x", "fast": False}), device("b", {"model": "y"}))
    s.pod(s.request("gpu", MODEL_X, FAST))
    yield
    s.publish(device("a", {"model": "x", "fast": True}), generation=2)


@situation(Code.NO_DEVICE_PUBLISHED, words=("quantity",))
def selector_of_capacity_rejects(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", capacity={"memory": "4Gi"}))
    larger = 'device.capacity["DRIVER"].memory.compareTo(quantity("{}")) >= 0'
    s.pod(s.request("gpu", larger.format("8Gi")))
    yield
    s.pod(s.request("gpu", larger.format("4Gi")))


@situation(Code.SELECTOR_FAILED, words=("device a", "fast"))
def selector_fails_on_a_device(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"), device("b", {"fast": True}))
    s.pod(s.request("gpu", FAST))
    yield
    s.pod(s.request("gpu", f'"fast" in device.attributes["DRIVER"] && {FAST}'))


@situation(Code.SELECTOR_FAILED, words=("device a", "model"))
def selector_of_the_class_fails(s: Scene) -> Iterator[None]:
    s.device_class(MODEL_X)
    s.publish(device("a"), device("b", {"model": "x"}))
    s.pod(s.request())
    yield
    s.device_class(f'"model" in device.attributes["DRIVER"] && {MODEL_X}')


@fits()
def selector_that_fails_is_not_reached(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"fast": True}), device("b"))
    s.pod(s.request("gpu", FAST))
    yield


# ------------------------------------------------------------ allocated devices


@situation(Code.DEVICES_ALLOCATED, words=("pod holder",))
def allocated_to_a_pod(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.holder(s.request())
    s.pod(s.request())
    yield
    s.delete("pods", "holder")


@situation(Code.DEVICES_ALLOCATED, words=("/disk (pod holder)",))
def allocated_to_a_named_claim(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.claim("disk", s.request())
    s.holder(claims=["disk"])
    s.pod(s.request())
    yield
    s.delete("pods", "holder")


@situation(Code.DEVICES_ALLOCATED)
def all_with_one_allocated(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(devices("a", "b"))
    s.holder(s.request())
    s.pod(s.request(allocationMode="All"))
    yield
    s.delete("pods", "holder")


@situation(Code.DEVICES_ALLOCATED)
def all_of_a_node_allocated_to_all(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(devices("a", "b"))
    s.holder(s.request(allocationMode="All"))
    s.pod(s.request())
    yield
    s.delete("pods", "holder")


@situation(Code.DEVICES_ALLOCATED)
def too_few_are_free(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(devices("a", "b", "c"))
    s.holder(s.request(count=2))
    s.pod(s.request(count=2))
    yield
    s.delete("pods", "holder")


@situation(Code.DEVICES_ALLOCATED)
def requests_need_the_same_free_device(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(devices("a", "b"))
    s.holder(s.request())
    s.pod(s.request("one"), s.request("two"))
    yield
    s.delete("pods", "holder")


@fits()
def admin_access_to_an_allocated_device(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.holder(s.request())
    s.pod(s.request(adminAccess=True))
    yield


@fits()
def claim_shared_by_two_pods(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.claim("disk", s.request())
    s.holder(claims=["disk"])
    s.pod(claims=["disk"])
    yield


# ------------------------------------------------------------ taints


@situation(Code.DEVICES_TAINTED, words=("example.com/broken",))
def tainted_by_the_driver(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", taints=[TAINT]))
    s.pod(s.request())
    yield
    s.publish(device("a"), generation=2)


@situation(Code.DEVICES_TAINTED, words=("example.com/broken", "tolerate"))
def tainted_until_tolerated(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", taints=[TAINT]))
    s.pod(s.request())
    yield
    s.pod(s.request(tolerations=[{"key": TAINT["key"], "operator": "Exists"}]))


@situation(Code.DEVICES_TAINTED)
def toleration_of_another_value(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", taints=[TAINT]))
    equal = {"key": TAINT["key"], "operator": "Equal"}
    s.pod(s.request(tolerations=[{**equal, "value": "no"}]))
    yield
    s.pod(s.request(tolerations=[{**equal, "value": "yes"}]))


@situation(Code.DEVICES_TAINTED)
def toleration_of_another_effect(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", taints=[{**TAINT, "effect": "NoExecute"}]))
    s.pod(s.request(tolerations=[{"operator": "Exists", "effect": "NoSchedule"}]))
    yield
    # Without the effect, the scheduler finds the taint tolerated, but the controller that evicts
    # pods from tainted devices does not, and deletes the pod at once.
    s.pod(s.request(tolerations=[{"operator": "Exists", "effect": "NoExecute"}]))


@situation(Code.DEVICES_TAINTED)
def admin_access_to_a_tainted_device(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", taints=[TAINT]))
    s.pod(s.request(adminAccess=True))
    yield
    s.pod(s.request(adminAccess=True, tolerations=[{"operator": "Exists"}]))


@situation(Code.DEVICES_TAINTED, words=("example.com/broken",))
def tainted_by_a_rule(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    rule = s.taint_rule(**TAINT)
    s.pod(s.request())
    yield
    s.delete("devicetaintrules", rule)


@fits()
def rule_without_an_effect(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.taint_rule(**{**TAINT, "effect": "None"})
    s.pod(s.request())
    yield


@situation(Code.DEVICES_ALLOCATED, words=("pod holder", "example.com/broken"))
def one_tainted_one_allocated(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"), device("b", taints=[TAINT]))
    s.holder(s.request())
    s.pod(s.request())
    yield
    s.delete("pods", "holder")


# ------------------------------------------------------------ nodes

HOSTNAME = "kubernetes.io/hostname"


def only_on(node: str, key: str = HOSTNAME) -> dict:
    """A required affinity, or a node selector of slices, for one node."""
    expression = {"key": key, "operator": "In", "values": [node]}
    if key == "metadata.name":
        return {"nodeSelectorTerms": [{"matchFields": [expression]}]}
    return {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}


def affinity(node: str, key: str = HOSTNAME) -> dict:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"nodeAffinity": {required: only_on(node, key)}}


@situation(Code.DEVICES_ON_OTHER_NODES, words=("node selector",))
def node_selector_excludes(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.pod(s.request(), nodeSelector={HOSTNAME: s.other})
    yield
    s.pod(s.request(), nodeSelector={HOSTNAME: s.node})


@situation(Code.DEVICES_ON_OTHER_NODES, words=("affinity",))
def affinity_excludes(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.pod(s.request(), affinity=affinity(s.other))
    yield
    s.publish(device("a"), nodeName=s.other)


@situation(Code.DEVICES_ON_OTHER_NODES, words=("affinity",))
def affinity_by_name_excludes(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.pod(s.request(), affinity=affinity(s.other, "metadata.name"))
    yield
    s.pod(s.request(), affinity=affinity(s.node, "metadata.name"))


@situation(Code.DEVICES_ON_OTHER_NODES, words=("example.com/maintenance",), alone=True)
def node_tainted(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.change_node(taints=[{"key": "example.com/maintenance", "effect": "NoSchedule"}])
    s.pod(s.request())
    yield
    s.change_node(taints=None)


@situation(Code.DEVICES_ON_OTHER_NODES, words=("cordoned",), alone=True)
def node_cordoned(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.change_node(unschedulable=True)
    s.pod(s.request())
    yield
    s.change_node(unschedulable=None)


@situation(verdict=Verdict.FITS)
def too_little_cpu(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.pod(s.request(), cpu="10000")
    yield
    s.pod(s.request())


@situation(verdict=Verdict.NOT_PENDING)
def scheduling_gate(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.pod(s.request(), schedulingGates=[{"name": "example.com/later"}])
    yield
    s.api.patch("pods", WAITS, {"spec": {"schedulingGates": None}}, namespace=s.namespace)


@situation(Code.DEVICES_ON_OTHER_NODES, words=("disk",))
def claim_allocated_on_another_node(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"model": "disk"}), nodeName=s.other)
    s.publish(device("a", {"model": "x"}))
    s.claim("disk", s.request("disk", 'device.attributes["DRIVER"].model == "disk"'))
    s.holder(claims=["disk"])
    s.pod(s.request("gpu", MODEL_X), claims=["disk"])
    yield
    disk, gpu = device("a", {"model": "disk"}), device("b", {"model": "x"})
    s.publish(disk, gpu, nodeName=s.other, generation=2)


@situation(Code.REQUESTS_COMPETE, words=("on one node",))
def devices_split_over_nodes(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.publish(device("a"), nodeName=s.other)
    s.pod(s.request(count=2))
    yield
    s.publish(devices("a", "b"), generation=2)


# ------------------------------------------------------------ slices for more than one node


@fits()
def slice_for_all_nodes(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"), allNodes=True)
    s.pod(s.request(), nodeSelector={HOSTNAME: s.other})
    yield


@situation(Code.DEVICES_ON_OTHER_NODES)
def slice_with_a_node_selector(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"), nodeSelector=only_on(s.node))
    s.pod(s.request(), nodeSelector={HOSTNAME: s.other})
    yield
    s.publish(device("a"), nodeSelector=only_on(s.other))


@situation(Code.DEVICES_ON_OTHER_NODES)
def devices_with_nodes_of_their_own(s: Scene) -> Iterator[None]:
    s.device_class()
    each = [device("a", nodeName=s.node), device("b", nodeName=s.node)]
    s.publish(each, perDeviceNodeSelection=True)
    s.pod(s.request(), nodeSelector={HOSTNAME: s.other})
    yield
    each[1]["nodeName"] = s.other
    s.publish(each, perDeviceNodeSelection=True)


@situation(Code.DEVICES_ALLOCATED)
def device_of_all_nodes_allocated(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"), allNodes=True)
    s.holder(s.request(), nodeSelector={HOSTNAME: s.node})
    s.pod(s.request(), nodeSelector={HOSTNAME: s.other})
    yield
    s.delete("pods", "holder")


# ------------------------------------------------------------ constraints


@situation(Code.CONSTRAINT_NOT_MET, words=("numa", "matchAttribute"))
def attribute_does_not_match(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"numa": 0}), device("b", {"numa": 1}))
    same = [{"matchAttribute": f"{s.driver}/numa"}]
    s.pod(s.request(count=2), constraints=same)
    yield
    s.pod(s.request(count=2))


@situation(Code.CONSTRAINT_NOT_MET, words=("numa",))
def attribute_to_match_is_missing(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"numa": 0}), device("b"))
    same = [{"matchAttribute": f"{s.driver}/numa", "requests": ["one", "two"]}]
    s.pod(s.request("one"), s.request("two"), constraints=same)
    yield
    s.publish(device("a", {"numa": 0}), device("b", {"numa": 0}), generation=2)


@situation(Code.CONSTRAINT_NOT_MET, words=("numa", "distinctAttribute"))
def attribute_is_not_distinct(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"numa": 0}), device("b", {"numa": 0}))
    different = [{"distinctAttribute": f"{s.driver}/numa"}]
    s.pod(s.request(count=2), constraints=different)
    yield
    s.publish(device("a", {"numa": 0}), device("b", {"numa": 1}), generation=2)


@situation(Code.CONSTRAINT_NOT_MET, words=("constraints together",))
def constraints_contradict_each_other(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"numa": 0}), device("b", {"numa": 0}))
    name = f"{s.driver}/numa"
    third = {"matchAttribute": f"{s.driver}/root"}
    s.pod(s.request(count=2), constraints=[{"distinctAttribute": name}, third])
    yield
    s.pod(s.request(count=2))


# ------------------------------------------------------------ requests that compete


@situation(Code.REQUESTS_COMPETE)
def requests_need_the_same_device(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"model": "x"}), device("b", {"model": "y"}))
    s.pod(s.request("one", MODEL_X), s.request("two", MODEL_X))
    yield
    s.pod(s.request("one", MODEL_X), s.request("two"))


@situation(Code.REQUESTS_COMPETE)
def two_claims_need_the_same_device(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"))
    s.template("other", s.request())
    s.pod(s.request(), templates=["other"])
    yield
    s.publish(devices("a", "b"), generation=2)


@situation(Code.REQUESTS_COMPETE)
def two_claims_need_two_nodes(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"model": "x"}))
    s.publish(device("a", {"model": "z"}), nodeName=s.other)
    s.template("other", s.request("gpu", MODEL_Z))
    s.pod(s.request("gpu", MODEL_X), templates=["other"])
    yield
    s.publish(device("a", {"model": "x"}), device("b", {"model": "z"}), generation=2)


@fits()
def requests_that_need_a_search(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"model": "x"}), device("b", {"model": "y"}))
    s.pod(s.request("any"), s.request("x", MODEL_X))
    yield


# ------------------------------------------------------------ capacity, shares and partitions


@situation(Code.NO_DEVICE_PUBLISHED, words=("capacity",))
def capacity_too_small(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", capacity={"memory": "4Gi"}))
    s.pod(s.request(capacity={"memory": "8Gi"}))
    yield
    s.pod(s.request(capacity={"memory": "4Gi"}))


@situation(Code.DEVICES_ALLOCATED, words=("memory", "pod holder"))
def shares_used_up(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", capacity={"memory": "8Gi"}, allowMultipleAllocations=True))
    s.holder(s.request(capacity={"memory": "6Gi"}))
    s.pod(s.request(capacity={"memory": "4Gi"}))
    yield
    s.delete("pods", "holder")


@fits()
def shares_left(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", capacity={"memory": "8Gi"}, allowMultipleAllocations=True))
    s.holder(s.request(capacity={"memory": "4Gi"}))
    s.pod(s.request(capacity={"memory": "4Gi"}))
    yield


def partitions(s: Scene, *parts: tuple[str, str], slots: str = "4", generation: int = 1) -> None:
    """Publish partitions of one board, each with its slots."""
    board = counters("board", slots=slots)
    s.publish(sharedCounters=[board], of=2, number=0, generation=generation)
    each = [device(name, consumesCounters=consumes(slots=amount)) for name, amount in parts]
    s.publish(each, of=2, number=1, generation=generation)


@situation(Code.DEVICES_ALLOCATED, words=("hardware", "pod holder"))
def partitions_taken(s: Scene) -> Iterator[None]:
    s.device_class()
    partitions(s, ("half", "2"), ("whole", "4"))
    s.holder(s.request("gpu", 'device.driver == "DRIVER"'))
    s.pod(s.request())
    yield
    s.delete("pods", "holder")


@situation(Code.NO_DEVICE_PUBLISHED, words=("counter",))
def partition_larger_than_its_board(s: Scene) -> Iterator[None]:
    s.device_class()
    partitions(s, ("whole", "4"), slots="2")
    s.pod(s.request())
    yield
    partitions(s, ("whole", "2"), slots="2", generation=2)


# ------------------------------------------------------------ prioritized lists


@situation(Code.NO_DEVICE_PUBLISHED, Code.DEVICES_ALLOCATED, words=("gpu/best", "gpu/good"))
def all_alternatives_fail(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"model": "x"}))
    s.holder(s.request())
    s.pod(s.alternatives(s.request("best", MODEL_Z), s.request("good", MODEL_X)))
    yield
    s.delete("pods", "holder")


@fits()
def second_alternative_fits(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"model": "x"}))
    s.pod(s.alternatives(s.request("best", MODEL_Z), s.request("good", MODEL_X)))
    yield


# ------------------------------------------------------------ pools


@situation(verdict=Verdict.UNDECIDED, words=("incomplete",))
def pool_incomplete(s: Scene) -> Iterator[None]:
    s.device_class(MODEL_X)
    s.publish(device("a", {"model": "y"}), of=2)
    s.pod(s.request())
    yield
    s.publish(device("b", {"model": "x"}), of=2, number=1)


@situation(Code.POOL_INVALID, words=("pool twins",))
def device_published_twice(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a"), pool="twins", of=2, number=0)
    s.publish(device("a"), pool="twins", of=2, number=1)
    s.pod(s.request())
    yield
    s.publish(device("b"), pool="twins", of=2, number=1)


@fits()
def older_generation_is_ignored(s: Scene) -> Iterator[None]:
    s.device_class()
    s.publish(device("a", {"model": "y"}), number=0, generation=1)
    s.publish(device("a", {"model": "x"}), number=1, generation=2)
    s.pod(s.request("gpu", MODEL_X))
    yield


@fits()
def device_without_binding_conditions_first(s: Scene) -> Iterator[None]:
    s.device_class()
    later = {
        "bindingConditions": ["example.com/attached"],
        "bindingFailureConditions": ["example.com/failed"],
    }
    s.publish(device("a", **later), pool="a")
    s.publish(device("b"), pool="b")
    s.pod(s.request())
    yield
