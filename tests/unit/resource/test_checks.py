"""
Checks find the device fields that the API server (1.36) would reject.

Whatever a vendor puts into a device, the result is a list of sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drakit import Device, Edits, Health, Version
from drakit.device import Capacity, CapacityRange, NodeAllocatableResource, Taint, Topology
from drakit_formats.resource.inventory import device_problems

PLACE = Topology(numa_node=1, pcie_root="pci0000:00", pci_bus_id="0000:01:00.0")


def cam(**fields: object) -> Device:
    return Device(name="c", **fields)


def numbers(count: int, *, prefix: str = "a") -> dict[str, int]:
    return {f"{prefix}{number}": number for number in range(count)}


def amounts(count: int) -> dict[str, str]:
    return {f"m{number}": "1" for number in range(count)}


def taints(count: int) -> tuple[Taint, ...]:
    return tuple(Taint(key=f"x.example.com/t{n}", effect="None") for n in range(count))


NO_VERSIONS = [
    *(12, "1.2", "v1.2.3", "01.2.3", "1.2.3-", "1.2.3-01", "1.2.3-a..b", "1.2.3+a..b", "1.2.3\n"),
    *("1.2.3-é", "1.2.3-" + "a" * 59),
]


def bound(conditions: Any, failures: Any) -> Device:
    return cam(binding_conditions=tuple(conditions), binding_failure_conditions=tuple(failures))


def grouped(*groups: str) -> Device:
    return cam(consumes={"s": {"m": "1"}}, compatibility_groups={"s": groups})


def mapped(resource: str, **fields: Any) -> Device:
    return cam(node_allocatable_resources={resource: NodeAllocatableResource(**fields)})


GOOD = {
    "name-of-63": Device(name="c" * 63),
    "name-of-a-digit": Device(name="0"),
    "pool-of-labels": cam(pool="a.b-c"),
    "32-attributes": cam(attributes=numbers(32)),
    "32-of-both": cam(attributes=numbers(16), capacity=amounts(16)),
    "32-with-place": cam(attributes=numbers(29), topology=PLACE),
    "48-values": cam(attributes={"a": tuple(range(48))}),
    "identifier-of-32": cam(attributes={"a" * 32: 1}),
    "identifiers": cam(attributes={"_": 1, "x.y/A1": 1}),
    "domain-of-63": cam(attributes={"x" * 63 + "/a": 1}),
    "64-bytes": cam(attributes={"a": "é" * 32}),
    "empty-text": cam(attributes={"a": ""}),
    "least-integer": cam(attributes={"a": -(2**63)}),
    "pre-release": cam(attributes={"a": Version("1.2.3-0a.b+001.x")}),
    "versions": cam(attributes={"a": (Version("1.0.0"),)}),
    "12-taints": cam(taints=taints(12)),
    "taints-of-one-key": Device(
        name="c",
        taints=(
            Taint(key="x.y/A_b.c", effect="NoSchedule", value="v" * 63),
            Taint(key="x.y/A_b.c", effect="NoExecute"),
        ),
    ),
    "counters": cam(consumes={"s": amounts(32), "t": amounts(1)}),
    "capacity-of-0": cam(capacity={"m": "0"}),
    "first-numa-node": cam(topology=Topology(numa_node=0)),
    "root-behind-a-bridge": cam(topology=Topology(pcie_root="pci10000:e1")),
    "health": cam(health=Health.unhealthy("lens is loose")),
    "edits": cam(edits=Edits.of_device_nodes("/dev/a", "/dev/b")),
    "4-conditions-each": bound("abcd", ("x.y/a", "B", "c.d", "e_f")),
    "extra-of-5-levels": cam(extra={"a": {"b": [{"c": {"d": 1.5}}]}}),
    "extra-of-4096-bytes": cam(extra={"a": "x" * (4096 - len('{"a": ""}'))}),
    "hugepages": cam(
        node_allocatable_resources={
            "hugepages-1Gi": NodeAllocatableResource(device_multiplier="2Gi")
        }
    ),
}


@pytest.mark.parametrize("device", GOOD.values(), ids=GOOD)
def test_what_the_api_takes_is_no_problem(device):
    assert device_problems(device, node="node-1") == []


BAD = {
    "5-conditions": (bound("abcde", "f"), "5 binding conditions"),
    "a-condition-twice": (bound(("a", "a"), "f"), "same name twice"),
    "a-condition-as-a-number": (bound((1,), "f"), "not a string"),
    "a-condition-with-a-space": (bound(("a b",), "f"), "not a label value"),
    "an-empty-condition": (bound(("",), "f"), "is empty"),
    "no-failure-condition": (bound("a", ()), "no binding_failure_conditions"),
    "no-condition": (bound((), "f"), "no binding_conditions"),
    "both-conditions": (bound("af", "f"), "condition f is both"),
    "conditions-as-text": (cam(binding_conditions="ab"), "not a tuple"),
    "binds-to-node": (cam(binds_to_node=1), "binds_to_node"),
    "groups-of-another-set": (cam(compatibility_groups={"s": ("a",)}), "does not consume"),
    "3-groups": (grouped("a", "b", "c"), "3 compatibility groups"),
    "a-group": (grouped("A"), "not a DNS label"),
    "groups-as-text": (cam(compatibility_groups="s"), "not a mapping"),
    "an-extended-resource": (mapped("x.y/gpu", device_multiplier="1"), "neither cpu"),
    "ephemeral-storage": (mapped("ephemeral-storage", device_multiplier="1"), "neither cpu"),
    "no-amount-of-the-node": (mapped("cpu"), "neither a multiplier"),
    "a-multiplier-of-zero": (mapped("cpu", device_multiplier="0"), "is zero"),
    "a-negative-overhead": (mapped("cpu", overhead_per_pod="-1"), "is negative"),
    "a-capacity-without-its-multiplier": (mapped("cpu", capacity_key="m"), "needs both"),
    "a-multiplier-without-its-capacity": (mapped("cpu", capacity_multiplier="1"), "needs both"),
    "a-capacity-that-is-not-there": (
        mapped("cpu", capacity_key="m", capacity_multiplier="1"),
        "not a capacity of the device",
    ),
    "two-multipliers": (
        mapped("cpu", capacity_key="m", capacity_multiplier="1", device_multiplier="1"),
        "only one is allowed",
    ),
    "resources-as-text": (cam(node_allocatable_resources="cpu"), "not a mapping"),
    "a-resource-as-text": (cam(node_allocatable_resources={"cpu": "8"}), "is of type str"),
    "extra-name": (cam(extra={"name": "d"}), "'name' is a field that drakit sets"),
    "extra-node": (cam(extra={"allNodes": True}), "'allNodes' is a field"),
    "extra-as-text": (cam(extra="{"), "a JSON object"),
    "extra-of-6-levels": (cam(extra={"a": [[[[[1]]]]]}), "more than 5 levels"),
    "extra-of-4097-bytes": (cam(extra={"a": "x" * 4096}), "at most 4096"),
    "extra-of-65-bits": (cam(extra={"a": [2**63]}), "an integer of more than 64 bits"),
    "extra-nan": (cam(extra={"a": float("nan")}), "not JSON"),
    "extra-object": (cam(extra={"a": [object()]}), "which is not JSON"),
    "extra-key": (cam(extra={"a": {1: 2}}), "a key of type int"),
    "extra-surrogate": (cam(extra={"a": "\udc80"}), "not JSON"),
    "name": (Device(name="Cam_0"), "not a DNS label"),
    "name-length": (Device(name="c" * 64), "not a DNS label"),
    "name-with-a-line-end": (Device(name="c\n"), "not a DNS label"),
    "no-name": (Device(name=None), "name is not a string"),
    "pool": (cam(pool="A"), "pool is not a DNS label"),
    "pool-slash": (cam(pool="a/b"), "pool is not a DNS label"),
    "pool-with-node": (cam(pool="p" * 247), "too long"),
    "no-pool": (cam(pool=None), "pool is not a string"),
    "33-attributes": (cam(attributes=numbers(33)), "has 33"),
    "33-both": (cam(attributes=numbers(16), capacity=amounts(17)), "has 33"),
    "33-with-place": (cam(attributes=numbers(30), topology=PLACE), "has 33"),
    "49-values": (cam(attributes={"a": tuple(range(47)), "b": 1, "c": 1}), "have 49 values"),
    "name-c": (cam(attributes={"a-b": 1}), "not a C identifier"),
    "long": (cam(attributes={"a" * 33: 1}), "not a C identifier"),
    "accent": (cam(attributes={"é": 1}), "not a C identifier"),
    "no-name-c": (cam(attributes={"x/": 1}), "not a C identifier"),
    "domain": (cam(attributes={"UP.er/a": 1}), "a domain"),
    "no-domain": (cam(attributes={"/a": 1}), "a domain"),
    "two-slashes": (cam(attributes={"x/y/a": 1}), "a domain"),
    "domain-64": (cam(attributes={"x" * 64 + "/a": 1}), "a domain"),
    "string": (cam(attributes={"a": "x" * 65}), "more than 64"),
    "string-bytes": (cam(attributes={"a": "é" * 33}), "64 bytes"),
    "string-broken": (cam(attributes={"a": "\udc80"}), "as UTF-8"),
    "float": (cam(attributes={"a": 1.5}), "of type float"),
    "none": (cam(attributes={"a": None}), "of type NoneType"),
    "list": (cam(attributes={"a": ["x"]}), "use a tuple"),
    "attribute-number": (cam(attributes={7: 1}), "of type int"),
    "no-attributes": (cam(attributes=None), "not a mapping"),
    "empty-list": (cam(attributes={"a": ()}), "empty list"),
    "mixed": (cam(attributes={"a": (1, True)}), "several types"),
    "mixed-too": (cam(attributes={"a": (1, "1")}), "several types"),
    "list-value": (cam(attributes={"a": ("x", "y" * 65)}), "in its list"),
    "list-type": (cam(attributes={"a": (1.5,)}), "of type float"),
    "integer": (cam(attributes={"a": 2**63}), "64-bit"),
    **{
        f"v-{index}": (cam(attributes={"a": Version(version)}), "semantic")
        for index, version in enumerate(NO_VERSIONS)
    },
    "capacity-name": (cam(capacity={"a-b": "1"}), "C identifier"),
    "amount-number": (cam(capacity={"size": 8}), "of type int, not a quantity as a string"),
    "amount-bytes": (cam(capacity={"size": b"8"}), "of type bytes"),
    "quantity": (cam(capacity={"size": "8 GB"}), "not a Kub"),
    "negative": (cam(capacity={"size": "-8"}), "negative"),
    "amount-huge": (cam(capacity={"m": "1e9999999"}), "not a Kub"),
    "no-capacity": (cam(capacity=7), "not a mapping"),
    "policy-of-a-device-that-is-not-shared": (
        cam(capacity={"m": Capacity(value="8", default="1")}),
        "is not shared",
    ),
    "shared-as-a-number": (cam(allow_multiple_allocations=1), "not a boolean"),
    "evict-as-text": (cam(evict_if_gone="yes"), "evict_if_gone is of type str"),
    "prepare-again-as-text": (cam(prepare_again="yes"), "prepare_again is of type str"),
    "no-topology": (cam(topology=None), "not a Topology"),
    "numa-below-zero": (cam(topology=Topology(numa_node=-1)), "NUMA node"),
    "numa-boolean": (cam(topology=Topology(numa_node=True)), "NUMA node"),
    "root": (cam(topology=Topology(pcie_root="0000:00")), "pcie_root"),
    "upper": (cam(topology=Topology(pci_bus_id="0000:0A:00.0")), "pci_bus_id"),
    "slot": (cam(topology=Topology(pci_bus_id="0000:01:20.0")), "pci_bus_id"),
    "bus-number": (cam(topology=Topology(pci_bus_id=7)), "pci_bus_id"),
    "topology-twice": (
        cam(attributes={"resource.kubernetes.io/numaNode": 1}, topology=PLACE),
        "its topology sets it",
    ),
    "13-taints": (cam(taints=taints(13)), "has 13 taints, but a driver can set at most 12"),
    "taints-text": (cam(taints="no"), "not a tuple of Taint"),
    "no-taint": (cam(taints=("no",)), "not a Taint"),
    "twice": (cam(taints=2 * (Taint(key="x.y/a", effect="None"),)), "twice"),
    **{
        f"taint-{index}": (cam(taints=(Taint(key=key, effect=effect, value=value),)), problem)
        for index, (key, effect, value, problem) in enumerate(
            [
                ("lens", "None", "", "no domain before it"),
                ("X.y/lens", "None", "", "has a domain"),
                ("x.y/", "None", "", "is empty"),
                ("x.y/-lens", "None", "", "after the slash"),
                ("x.y/" + "a" * 64, "None", "", "after the slash"),
                ("x.y/lens", "Never", "", "has the effect"),
                ("x.y/lens", None, "", "has the effect"),
                ("x.y/lens", "None", "a b", "has a value"),
                ("x.y/lens", "None", "v" * 64, "has a value"),
                ("x.y/lens", "None", 7, "not a string"),
                (7, "None", "", "not a string"),
            ]
        )
    },
    "consumes-list": (cam(consumes=[]), "not a mapping"),
    "counters-list": (cam(consumes={"s": ["m"]}), "not a mapping"),
    "no-counters": (cam(consumes={"s": {}}), "has 0 counters"),
    "33-counters": (cam(consumes={"s": amounts(33)}), "has 33 counters"),
    "3-counter-sets": (
        cam(consumes={f"s{n}": amounts(1) for n in range(3)}),
        "from 3 counter sets",
    ),
    "set-name": (cam(consumes={"S": amounts(1)}), "not a valid name of a"),
    "set-number": (cam(consumes={7: amounts(1)}), "not a valid name of a"),
    "counter-name": (cam(consumes={"s": {"m_1": "1"}}), "not a DNS label"),
    "counter-type": (cam(consumes={"s": {"m": 1}}), "of type int"),
    "path": (cam(edits=("/dev/a",)), "of type tuple, not an Edits"),
    "path-as-text": (cam(edits=Edits(device_nodes="/dev/a")), "not a tuple"),
    "path-as-device-node": (
        cam(edits=Edits(device_nodes=("/dev/a",))),
        "of type str, not a DeviceNode",
    ),
    "groups-as-a-number": (cam(compatibility_groups=1), "not a mapping"),
    "resources-as-a-number": (cam(node_allocatable_resources=1), "not a mapping"),
    "counters-as-a-number": (cam(consumes=1), "not a mapping"),
    "relative": (cam(edits=Edits.of_device_nodes("dev/a")), "not an absolute"),
    "nul": (cam(edits=Edits.of_device_nodes("/dev/\0")), "not an absolute"),
    "health-as-text": (cam(health="good"), "not a Health"),
    "no-device": ({"name": "c"}, "of type dict, not a Device"),
}


@pytest.mark.parametrize(("device", "problem"), BAD.values(), ids=BAD)
def test_a_problem_that_the_api_rejects_is_reported_as_a_sentence(device, problem):
    assert problem in "; ".join(device_problems(device, node="node-1"))


def test_a_list_that_is_too_long_is_counted_and_not_checked():
    device = cam(attributes={"a": ("x" * 100,) * 30_000})
    assert [problem[:33] for problem in device_problems(device)] == [
        "its attributes have 30000 values "
    ]


def test_a_pool_is_as_long_as_the_nodes_name_lets_it():
    device = cam(pool="p" * 63)
    assert device_problems(device, node="n" * 189) == []
    assert "too long" in device_problems(device, node="n" * 190)[0]


def test_many_problems_are_few_sentences():
    problems = device_problems(cam(attributes={f"a-{n}": 1.5 for n in range(32)}))
    assert len(problems) == 6
    assert problems[-1] == "there are more problems"
    assert sum(map(len, problems)) < 1000


def ranged(default: str | None, least: str, most: str | None = None, step: str | None = None):
    span = CapacityRange(min=least, max=most, step=step)
    return Capacity(value="8", default=default, valid_range=span)


VALUES = tuple(map(str, range(1, 12)))


CAPACITIES = {
    "none": (Capacity(value="8"), None),
    "default-alone": (Capacity(value="8", default="1"), None),
    "default-above-all": (Capacity(value="8", default="9"), "more than the capacity"),
    "value": (Capacity(value="x"), "not a Kubernetes quantity"),
    "value-type": (Capacity(value=8), "of type int"),
    "default-type": (Capacity(value="8", default=1), "of type int"),
    "values": (Capacity(value="8", default="2", valid_values=("1", "2")), None),
    "11-values": (Capacity(value="99", default="1", valid_values=VALUES), "11 valid_values"),
    "values-as-text": (Capacity(value="8", default="1", valid_values="1"), "not a tuple"),
    "value-of-type-int": (Capacity(value="8", default="1", valid_values=(1,)), "of type int"),
    "value-below-0": (Capacity(value="8", default="1", valid_values=("1", "-1")), "negative"),
    "value-above-64-bits": (
        Capacity(value="20E", default="1", valid_values=("10E", "1")),
        "more than 9223372036854775807",
    ),
    "range-dict": (Capacity(value="8", default="1", valid_range={"min": "1"}), "not a Capacity"),
    "steps": (ranged("3", "1", "5", "2"), None),
    "step-that-old-api-servers-divide-by": (ranged("1", "1", None, "0"), "is zero"),
    "step-back": (ranged("1", "1", None, "-1"), "negative"),
    "step-that-is-cut-to-64-bits": (ranged("1", "1", None, "16Ei"), None),
    "step-above-64-bits": (ranged("1", "1", None, "20E"), "more than 9223372036854775807"),
    "max-nonsense": (ranged("1", "1", "x"), "not a Kubernetes"),
    "min-type": (ranged("1", 1), "of type int"),
    "no-min": (ranged("1", None), "of type NoneType"),
    "the-api-server-compares-amounts": (ranged("3", "2", "1", "7"), None),
}


@pytest.mark.parametrize(("capacity", "problem"), CAPACITIES.values(), ids=CAPACITIES)
def test_how_claims_may_share_a_capacity(capacity, problem):
    device = cam(allow_multiple_allocations=True, capacity={"m": capacity})
    problems = "; ".join(device_problems(device))
    assert (problems == "") if problem is None else (problem in problems)


class Rude(Mapping[str, int]):
    """A mapping of a vendor's own that fails at each use."""

    def __getitem__(self, key: str) -> int:
        raise RuntimeError("not today")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("not today")

    def __len__(self) -> int:
        return 1


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("not even that")


RUDE = {
    "attributes": cam(attributes=Rude()),
    "a-value": cam(attributes={"a": Unprintable()}),
    "a-name": cam(attributes={Unprintable(): 1}),
    "the-name": Device(name=Unprintable()),
    "an-amount": cam(capacity={"m": Unprintable()}),
    "counters": cam(consumes={"s": Rude()}),
    "a-path": cam(edits=Edits.of_device_nodes(Unprintable())),
    "all-of-it": Unprintable(),
}


@pytest.mark.parametrize("device", RUDE.values(), ids=RUDE)
def test_what_raises_when_it_is_looked_at_is_a_problem_too(device):
    assert device_problems(device)


nonsense = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.builds(Version, st.one_of(st.text(max_size=5), st.integers())),
        st.builds(Rude),
        st.builds(Capacity, value=st.one_of(st.none(), st.text(max_size=3), st.integers())),
        st.builds(Taint, key=st.text(max_size=5), effect=st.one_of(st.none(), st.text(max_size=3))),
        st.just(Topology(numa_node="x", pcie_root=7, pci_bus_id=Rude())),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text(max_size=5), st.integers(), st.none()), inner, max_size=3
        ),
    ),
    max_leaves=5,
)


@settings(derandomize=True, database=None, max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional={field.name: nonsense for field in fields(Device)}))
def test_whatever_a_vendor_makes_of_a_device_the_answer_is_sentences(values):
    problems = device_problems(Device(**({"name": "c"} | values)), node="node-1")
    assert all(isinstance(problem, str) and 0 < len(problem) < 600 for problem in problems)
    assert len(problems) <= 6
