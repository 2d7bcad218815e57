"""
Checks find the device fields that the API server (1.36) would refuse.

Whatever a vendor puts into a device, the answer is sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drakit import Device, Edits, Health, Version
from drakit.device import Capacity, CapacityRange, Taint, Topology
from drakit_formats.resource.inventory import device_problems

PLACE = Topology(numa_node=1, pcie_root="pci0000:00", pci_bus_id="0000:01:00.0")


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


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(Device(name="c" * 63), id="name-of-63"),
        pytest.param(Device(name="0"), id="name-of-a-digit"),
        pytest.param(Device(name="c", pool="a.b-c"), id="pool-of-labels"),
        pytest.param(Device(name="c", attributes=numbers(32)), id="32-attributes"),
        pytest.param(
            Device(name="c", attributes=numbers(16), capacity=amounts(16)), id="32-of-both"
        ),
        pytest.param(Device(name="c", attributes=numbers(29), topology=PLACE), id="32-with-place"),
        pytest.param(Device(name="c", attributes={"a": tuple(range(48))}), id="48-values"),
        pytest.param(Device(name="c", attributes={"a" * 32: 1}), id="identifier-of-32"),
        pytest.param(Device(name="c", attributes={"_": 1, "x.y/A1": 1}), id="identifiers"),
        pytest.param(Device(name="c", attributes={"x" * 63 + "/a": 1}), id="domain-of-63"),
        pytest.param(Device(name="c", attributes={"a": "é" * 32}), id="64-bytes"),
        pytest.param(Device(name="c", attributes={"a": ""}), id="empty-text"),
        pytest.param(Device(name="c", attributes={"a": -(2**63)}), id="least-integer"),
        pytest.param(
            Device(name="c", attributes={"a": Version("1.2.3-0a.b+001.x")}), id="pre-release"
        ),
        pytest.param(Device(name="c", attributes={"a": (Version("1.0.0"),)}), id="versions"),
        pytest.param(Device(name="c", taints=taints(12)), id="12-taints"),
        pytest.param(
            Device(
                name="c",
                taints=(
                    Taint(key="x.y/A_b.c", effect="NoSchedule", value="v" * 63),
                    Taint(key="x.y/A_b.c", effect="NoExecute"),
                ),
            ),
            id="taints-of-one-key",
        ),
        pytest.param(Device(name="c", consumes={"s": amounts(32), "t": amounts(1)}), id="counters"),
        pytest.param(Device(name="c", topology=Topology(numa_node=0)), id="first-numa-node"),
        pytest.param(
            Device(name="c", topology=Topology(pcie_root="pci10000:e1")), id="root-behind-a-bridge"
        ),
        pytest.param(Device(name="c", health=Health.unhealthy("lens is loose")), id="health"),
        pytest.param(Device(name="c", edits=Edits.of_device_nodes("/dev/a", "/dev/b")), id="edits"),
    ],
)
def test_what_the_api_takes_is_no_problem(device):
    assert device_problems(device, node="node-1") == []


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        pytest.param(Device(name="Cam_0"), "not a DNS label", id="name"),
        pytest.param(Device(name="c" * 64), "not a DNS label", id="name-length"),
        pytest.param(Device(name="c\n"), "not a DNS label", id="name-with-a-line-end"),
        pytest.param(Device(name=None), "name is not text", id="no-name"),
        pytest.param(Device(name="c", pool="A"), "pool is not a DNS label", id="pool"),
        pytest.param(Device(name="c", pool="a/b"), "pool is not a DNS label", id="pool-slash"),
        pytest.param(Device(name="c", pool="p" * 247), "too long", id="pool-with-node"),
        pytest.param(Device(name="c", pool=None), "pool is not text", id="no-pool"),
        pytest.param(Device(name="c", attributes=numbers(33)), "has 33", id="33-attributes"),
        pytest.param(
            Device(name="c", attributes=numbers(16), capacity=amounts(17)), "has 33", id="33-both"
        ),
        pytest.param(
            Device(name="c", attributes=numbers(30), topology=PLACE), "has 33", id="33-with-place"
        ),
        pytest.param(
            Device(name="c", attributes={"a": tuple(range(47)), "b": 1, "c": 1}),
            "have 49 values",
            id="49-values",
        ),
        pytest.param(Device(name="c", attributes={"a-b": 1}), "not a C identifier", id="name-c"),
        pytest.param(Device(name="c", attributes={"a" * 33: 1}), "not a C identifier", id="long"),
        pytest.param(Device(name="c", attributes={"é": 1}), "not a C identifier", id="accent"),
        pytest.param(Device(name="c", attributes={"x/": 1}), "not a C identifier", id="no-name-c"),
        pytest.param(Device(name="c", attributes={"UP.er/a": 1}), "a domain", id="domain"),
        pytest.param(Device(name="c", attributes={"/a": 1}), "a domain", id="no-domain"),
        pytest.param(Device(name="c", attributes={"x/y/a": 1}), "a domain", id="two-slashes"),
        pytest.param(Device(name="c", attributes={"x" * 64 + "/a": 1}), "a domain", id="domain-64"),
        pytest.param(Device(name="c", attributes={"a": "x" * 65}), "more than 64", id="string"),
        pytest.param(Device(name="c", attributes={"a": "é" * 33}), "64 bytes", id="string-bytes"),
        pytest.param(Device(name="c", attributes={"a": "\udc80"}), "as UTF-8", id="string-broken"),
        pytest.param(Device(name="c", attributes={"a": 1.5}), "of type float", id="float"),
        pytest.param(Device(name="c", attributes={"a": None}), "of type NoneType", id="none"),
        pytest.param(Device(name="c", attributes={"a": ["x"]}), "as a tuple", id="list"),
        pytest.param(Device(name="c", attributes={7: 1}), "of type int", id="attribute-number"),
        pytest.param(Device(name="c", attributes=None), "not a mapping", id="no-attributes"),
        pytest.param(Device(name="c", attributes={"a": ()}), "empty list", id="empty-list"),
        pytest.param(Device(name="c", attributes={"a": (1, True)}), "several types", id="mixed"),
        pytest.param(Device(name="c", attributes={"a": (1, "1")}), "several types", id="mixed-too"),
        pytest.param(
            Device(name="c", attributes={"a": ("x", "y" * 65)}), "in its list", id="list-value"
        ),
        pytest.param(Device(name="c", attributes={"a": (1.5,)}), "of type float", id="list-type"),
        pytest.param(Device(name="c", attributes={"a": 2**63}), "64-bit", id="integer"),
        *(
            pytest.param(
                Device(name="c", attributes={"a": Version(version)}), "semantic", id=f"v-{index}"
            )
            for index, version in enumerate(NO_VERSIONS)
        ),
        pytest.param(Device(name="c", capacity={"a-b": "1"}), "C identifier", id="capacity-name"),
        pytest.param(Device(name="c", capacity={"size": 8}), "as text", id="amount-number"),
        pytest.param(Device(name="c", capacity={"size": "8 GB"}), "not a Kub", id="quantity"),
        pytest.param(Device(name="c", capacity={"size": "-8"}), "negative", id="negative"),
        pytest.param(Device(name="c", capacity={"m": "1e9999999"}), "not a Kub", id="amount-huge"),
        pytest.param(Device(name="c", capacity=7), "not a mapping", id="no-capacity"),
        pytest.param(
            Device(name="c", capacity={"m": Capacity(value="8", default="1")}),
            "is not shared",
            id="policy-of-a-device-that-is-not-shared",
        ),
        pytest.param(
            Device(name="c", allow_multiple_allocations=1), "not a boolean", id="shared-as-a-number"
        ),
        pytest.param(
            Device(name="c", evict_if_gone="yes"),
            "evict_if_gone is of type str",
            id="evict-as-text",
        ),
        pytest.param(
            Device(name="c", prepare_again="yes"),
            "prepare_again is of type str",
            id="prepare-again-as-text",
        ),
        pytest.param(Device(name="c", topology=None), "not a Topology", id="no-topology"),
        pytest.param(
            Device(name="c", topology=Topology(numa_node=-1)), "NUMA node", id="numa-below-zero"
        ),
        pytest.param(
            Device(name="c", topology=Topology(numa_node=True)), "NUMA node", id="numa-boolean"
        ),
        pytest.param(
            Device(name="c", topology=Topology(pcie_root="0000:00")), "pcie_root", id="root"
        ),
        pytest.param(
            Device(name="c", topology=Topology(pci_bus_id="0000:0A:00.0")), "pci_bus_id", id="upper"
        ),
        pytest.param(
            Device(name="c", topology=Topology(pci_bus_id="0000:01:20.0")), "pci_bus_id", id="slot"
        ),
        pytest.param(
            Device(name="c", topology=Topology(pci_bus_id=7)), "pci_bus_id", id="bus-number"
        ),
        pytest.param(
            Device(name="c", attributes={"resource.kubernetes.io/numaNode": 1}, topology=PLACE),
            "its topology sets it",
            id="topology-twice",
        ),
        pytest.param(
            Device(name="c", taints=taints(13)),
            "has 13 taints, but a driver can set at most 12",
            id="13-taints",
        ),
        pytest.param(Device(name="c", taints="no"), "not a tuple of Taint", id="taints-text"),
        pytest.param(Device(name="c", taints=("no",)), "not a Taint", id="no-taint"),
        pytest.param(
            Device(name="c", taints=2 * (Taint(key="x.y/a", effect="None"),)), "twice", id="twice"
        ),
        *(
            pytest.param(
                Device(name="c", taints=(Taint(key=key, effect=effect, value=value),)),
                problem,
                id=f"taint-{index}",
            )
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
                    ("x.y/lens", "None", 7, "not text"),
                    (7, "None", "", "not text"),
                ]
            )
        ),
        pytest.param(Device(name="c", consumes=[]), "not a mapping", id="consumes-list"),
        pytest.param(Device(name="c", consumes={"s": ["m"]}), "not a mapping", id="counters-list"),
        pytest.param(Device(name="c", consumes={"s": {}}), "has 0 counters", id="no-counters"),
        pytest.param(
            Device(name="c", consumes={"s": amounts(33)}), "has 33 counters", id="33-counters"
        ),
        pytest.param(
            Device(name="c", consumes={f"s{n}": amounts(1) for n in range(3)}),
            "from 3 counter sets",
            id="3-counter-sets",
        ),
        pytest.param(
            Device(name="c", consumes={"S": amounts(1)}), "not a valid name of a", id="set-name"
        ),
        pytest.param(
            Device(name="c", consumes={7: amounts(1)}), "not a valid name of a", id="set-number"
        ),
        pytest.param(
            Device(name="c", consumes={"s": {"m_1": "1"}}), "not a DNS label", id="counter-name"
        ),
        pytest.param(Device(name="c", consumes={"s": {"m": 1}}), "of type int", id="counter-type"),
        pytest.param(Device(name="c", edits=("/dev/a",)), "of type tuple, not an Edits", id="path"),
        pytest.param(
            Device(name="c", edits=Edits(device_nodes="/dev/a")), "not a tuple", id="path-as-text"
        ),
        pytest.param(
            Device(name="c", edits=Edits(device_nodes=("/dev/a",))),
            "of type str, not a DeviceNode",
            id="path-as-device-node",
        ),
        pytest.param(
            Device(name="c", edits=Edits.of_device_nodes("dev/a")), "not an absolute", id="relative"
        ),
        pytest.param(
            Device(name="c", edits=Edits.of_device_nodes("/dev/\0")), "not an absolute", id="nul"
        ),
        pytest.param(Device(name="c", health="good"), "not a Health", id="health-as-text"),
        pytest.param({"name": "c"}, "of type dict, not a Device", id="no-device"),
    ],
)
def test_a_problem_that_the_api_rejects_is_reported_as_a_sentence(device, problem):
    assert problem in "; ".join(device_problems(device, node="node-1"))


def test_a_list_that_is_too_long_is_counted_and_not_checked():
    device = Device(name="c", attributes={"a": ("x" * 100,) * 30_000})
    assert [problem[:33] for problem in device_problems(device)] == [
        "its attributes have 30000 values "
    ]


def test_a_pool_is_as_long_as_the_nodes_name_lets_it():
    device = Device(name="c", pool="p" * 63)
    assert device_problems(device, node="n" * 189) == []
    assert "too long" in device_problems(device, node="n" * 190)[0]


def test_many_problems_are_few_sentences():
    problems = device_problems(Device(name="c", attributes={f"a-{n}": 1.5 for n in range(32)}))
    assert len(problems) == 6
    assert problems[-1] == "there are more problems"
    assert sum(map(len, problems)) < 1000


def ranged(default: str | None, least: str, most: str | None = None, step: str | None = None):
    span = CapacityRange(min=least, max=most, step=step)
    return Capacity(value="8", default=default, valid_range=span)


VALUES = tuple(map(str, range(1, 12)))
CAPACITIES = [
    pytest.param(Capacity(value="8"), None, id="none"),
    pytest.param(Capacity(value="8", default="1"), None, id="default-alone"),
    pytest.param(
        Capacity(value="8", default="9"), "more than the capacity", id="default-above-all"
    ),
    pytest.param(Capacity(value="x"), "not a Kubernetes quantity", id="value"),
    pytest.param(Capacity(value=8), "of type int", id="value-type"),
    pytest.param(Capacity(value="8", default=1), "of type int", id="default-type"),
    pytest.param(Capacity(value="8", default="2", valid_values=("1", "2")), None, id="values"),
    pytest.param(
        Capacity(value="99", default="1", valid_values=VALUES), "11 valid_values", id="11-values"
    ),
    pytest.param(
        Capacity(value="8", default="1", valid_values="1"), "not a tuple", id="values-as-text"
    ),
    pytest.param(
        Capacity(value="8", default="1", valid_values=(1,)), "of type int", id="value-of-type-int"
    ),
    pytest.param(
        Capacity(value="8", default="1", valid_values=("1", "-1")), "negative", id="value-below-0"
    ),
    pytest.param(
        Capacity(value="20E", default="1", valid_values=("10E", "1")),
        "more than 9223372036854775807",
        id="value-above-64-bits",
    ),
    pytest.param(
        Capacity(value="8", default="1", valid_range={"min": "1"}),
        "not a Capacity",
        id="range-dict",
    ),
    pytest.param(ranged("3", "1", "5", "2"), None, id="steps"),
    pytest.param(ranged("1", "1", None, "0"), "is zero", id="step-that-old-api-servers-divide-by"),
    pytest.param(ranged("1", "1", None, "-1"), "negative", id="step-back"),
    pytest.param(ranged("1", "1", None, "16Ei"), None, id="step-that-is-cut-to-64-bits"),
    pytest.param(
        ranged("1", "1", None, "20E"), "more than 9223372036854775807", id="step-above-64-bits"
    ),
    pytest.param(ranged("1", "1", "x"), "not a Kubernetes", id="max-nonsense"),
    pytest.param(ranged("1", 1), "of type int", id="min-type"),
    pytest.param(ranged("1", None), "of type NoneType", id="no-min"),
    pytest.param(ranged("3", "2", "1", "7"), None, id="the-api-server-compares-amounts"),
]


@pytest.mark.parametrize(("capacity", "problem"), CAPACITIES)
def test_how_claims_may_share_a_capacity(capacity, problem):
    device = Device(name="c", allow_multiple_allocations=True, capacity={"m": capacity})
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


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(Device(name="c", attributes=Rude()), id="attributes"),
        pytest.param(Device(name="c", attributes={"a": Unprintable()}), id="a-value"),
        pytest.param(Device(name="c", attributes={Unprintable(): 1}), id="a-name"),
        pytest.param(Device(name=Unprintable()), id="the-name"),
        pytest.param(Device(name="c", capacity={"m": Unprintable()}), id="an-amount"),
        pytest.param(Device(name="c", consumes={"s": Rude()}), id="counters"),
        pytest.param(Device(name="c", edits=Edits.of_device_nodes(Unprintable())), id="a-path"),
        pytest.param(Unprintable(), id="all-of-it"),
    ],
)
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
