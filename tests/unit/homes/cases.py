"""
The cases of the backend contract, as data: what a driver does, and what a slice, a pod or a caller
sees. A case that a home does not have, or in which a home differs, says why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drakit import (
    AllocatedDevice,
    Capacity,
    Condition,
    CounterSet,
    Device,
    DeviceNode,
    Edits,
    Health,
    Hook,
    Inventory,
    Mount,
    NetworkData,
    PreparedDevice,
    RejectedDevice,
    Taint,
    Topology,
    Version,
)
from drakit.device import CapacityRange, IntelRdt, NetDevice, NodeAllocatableResource
from tests.unit.homes.homes import GO, Does, allocated

TYPES = "a message has no such value: the Go compiler or protobuf refuses it"
PER_CLAIM = "Prepare and Unprepare of the Go module are called for a claim: no device is named"
OWN_WORDS = "the Go module words what has no text itself"


def evicting(*names: str, pool: str = "") -> tuple[Device, ...]:
    return tuple(Device(name=name, pool=pool, evict_if_gone=True) for name in names)


HELD = (*evicting("a", "b"), *evicting("a", pool="usb"))
"""The devices that a driver lists first. Claims hold them, and their pods are evicted if they are
unplugged."""

MARK = Device(name="mark")
"""A device that shows that an inventory has arrived."""

# ---------------------------------------------------------------- lists


@dataclass(frozen=True, kw_only=True)
class Listed:
    """An inventory, and what becomes of it."""

    id: str
    inventory: Inventory
    published: Mapping[str, Device] | None = None
    """By default, those listed that are not rejected."""
    rejected: Mapping[str, str] = field(default_factory=dict[str, str])
    """The beginnings of the sentences, by ``pool/name``."""
    evicted: Collection[str] = ()
    """Held devices whose pods are evicted."""
    not_in: Mapping[str, str] = field(default_factory=dict[str, str])
    """The reasons, by home."""
    words: Mapping[str, tuple[str, Mapping[str, str]]] = field(
        default_factory=dict[str, tuple[str, Mapping[str, str]]]
    )
    """The reason why a home has other sentences, and the sentences."""


ALL = Device(
    name="all",
    pool="usb",
    attributes={
        "text": "a",
        "gpu.example.com/profile": "small",
        "int": -(2**63),
        "flag": False,
        "version": Version("1.0.0"),
        "texts": ("a", "b"),
        "ints": (1, 0),
        "flags": (True, False),
        "versions": (Version("1.0.0"), Version("2.0.0-rc.1")),
    },
    capacity={
        "plain": "1Gi",
        "values": Capacity(value="4", default="1", valid_values=("1", "2")),
        "range": Capacity(
            value="4", default="1", valid_range=CapacityRange(min="1", max="4", step="1")
        ),
        "open": Capacity(value="10", default="1", valid_range=CapacityRange(min="1")),
    },
    topology=Topology(numa_node=0, pcie_root="pci0000:00", pci_bus_id="0000:01:00.0"),
    consumes={"fuse": {"watts": "5"}},
    compatibility_groups={"fuse": ("mig", "vgpu")},
    allow_multiple_allocations=True,
    taints=(Taint(key="a.example.com/b", value="c", effect="NoExecute"),),
    health=Health.unhealthy("no light", evict_pods=True),
    evict_if_gone=True,
    prepare_again=True,
    binding_conditions=("x.example.com/attached", "Ready"),
    binding_failure_conditions=("x.example.com/failed",),
    binds_to_node=True,
    node_allocatable_resources={
        "cpu": NodeAllocatableResource(device_multiplier="8"),
        "memory": NodeAllocatableResource(
            capacity_key="plain",
            capacity_multiplier="1",
            overhead_per_pod="1Gi",
            overhead_per_container="1Mi",
        ),
    },
    extra={"newField": [1, {"a": True, "é": 1.5}]},
)
FUSE = CounterSet(name="fuse", pool="usb", counters={"watts": "10"})

_MALFORMED: Sequence[tuple[str, Mapping[str, Any], str, Collection[str], bool]] = (
    # The fields, the message, the pods that are evicted, and whether a protobuf message can have
    # the value. All limits of a device are in GOOD, BAD and CAPACITIES.
    ("float", {"attributes": {"t": 40.5}}, "attribute 't' is of type float", {"usb/a"}, False),
    ("flag", {"evict_if_gone": 1}, "its evict_if_gone is of type int", {"usb/a"}, False),
    ("text", {"attributes": {"t": "é" * 33}}, "attribute 't' has more", {"usb/a"}, True),
    ("size", {"attributes": {"t": "x" * 70_000}}, "attribute 't' has more", {"usb/a"}, True),
    ("name", {"name": "A_b"}, "its name is not a DNS label", {"a", "usb/a"}, True),
    ("pool", {"pool": "usb/1"}, "its pool is not a DNS label", (), True),
    ("pool-number", {"pool": 5}, "its pool is not a string, but of type int", (), False),
    ("pool-list", {"pool": ["usb"]}, "its pool is not a string, but of type list", (), False),
)


def _malformed(
    id: str, fields: Mapping[str, Any], sentence: str, evicted: Collection[str], sendable: bool
) -> Listed:
    """One held device is malformed: the others are published, and its own pods stay."""
    bad: Any = replace(HELD[0], **fields)
    place = f"{bad.pool}/{bad.name}".lstrip("/")
    words: Mapping[str, tuple[str, Mapping[str, str]]] = {}
    if id == "size":
        words = {GO: ("the Go module does not know the rules of the API", {place: "it is larger"})}
    return Listed(
        id=f"malformed-{id}",
        inventory=Inventory(devices=(bad, HELD[1], MARK)),
        published={"b": HELD[1], "mark": MARK},
        rejected={place: sentence},
        evicted=evicted,
        not_in={} if sendable else {GO: TYPES},
        words=words,
    )


LISTS: Sequence[Listed] = (
    *(_malformed(*each) for each in _MALFORMED),
    Listed(
        id="every-field",
        inventory=Inventory(
            devices=(*HELD, ALL, MARK),
            counter_sets=(FUSE,),
            fallback=(*HELD, Device(name="whole", pool="usb")),
            ordered=True,
            partition_type_attribute="gpu.example.com/profile",
        ),
    ),
    Listed(
        id="enough-devices",
        inventory=Inventory(devices=(*HELD, *(Device(name=f"d{n}") for n in range(3000)), MARK)),
    ),
    Listed(id="unplugged", inventory=Inventory(devices=(HELD[0], MARK)), evicted={"b", "usb/a"}),
    Listed(id="withdrawn", inventory=Inventory(devices=(HELD[0], MARK), withdrawn=("b", "usb/a"))),
    Listed(
        id="withdrawn-in-one-pool",
        inventory=Inventory(devices=(HELD[1], MARK), withdrawn=("usb/a",)),
        evicted={"a"},
    ),
    Listed(
        id="the-same-name-in-two-pools",
        inventory=Inventory(devices=(*HELD, Device(name="mark", pool="usb"), MARK)),
    ),
    Listed(
        id="the-same-name-twice-in-a-pool",
        inventory=Inventory(devices=(*HELD, MARK, replace(MARK, attributes={"n": 2}))),
        published={"a": HELD[0], "b": HELD[1], "usb/a": HELD[2], "mark": MARK},
        rejected={"mark": "another device of its pool has the same name"},
    ),
    Listed(
        id="a-held-device-of-the-fallback",
        inventory=Inventory(
            devices=(*HELD[1:], MARK), fallback=(replace(HELD[0], attributes={"a" * 33: 1}),)
        ),
        rejected={"a": ""},
    ),
    Listed(
        id="a-malformed-counter-set",
        inventory=Inventory(
            devices=(*HELD, MARK), counter_sets=(CounterSet(name="s", counters={"c": "many"}),)
        ),
        rejected={"s": "as a counter set, it "},
    ),
    Listed(
        id="a-counter-set-of-numbers",
        inventory=Inventory(
            devices=(*HELD, MARK),
            counter_sets=(CounterSet(name="s", counters={"c": 3}),),  # type: ignore[dict-item]
        ),
        rejected={"s": "as a counter set, it "},
        not_in={GO: TYPES},
    ),
    Listed(
        id="a-malformed-type-of-partitions",
        inventory=Inventory(devices=(*HELD, MARK), partition_type_attribute="profile"),
        rejected={"partition_type_attribute": "its name has no domain before it"},
    ),
    Listed(
        id="reports",
        inventory=Inventory(
            devices=(*HELD, MARK),
            rejected=(
                RejectedDevice(device="/dev/x", reason="InUse", message="it is in use"),
                RejectedDevice(device="/dev/y", reason="Invalid", message="it is odd"),
            ),
        ),
        rejected={"/dev/y": "it is odd"},
    ),
)

# ---------------------------------------------------------------- calls

ONE, TWO = allocated("a"), allocated("b")

FULL_EDITS = Edits(
    env={"GPU_A": "b", "GPU": "c"},
    device_nodes=(
        DeviceNode(
            path="/dev/null",
            host_path="/dev/zero",
            type="c",
            major=1,
            minor=5,
            permissions="rw",
            file_mode=0o600,
            uid=0,
            gid=0,
            identity="x",
        ),
        DeviceNode(path="/dev/zero"),
    ),
    mounts=(
        Mount(host_path="/a", container_path="/b", options=("rw", "bind"), type="none"),
        Mount(host_path="/a", container_path="/c"),
    ),
    hooks=(Hook(name="prestart", path="/bin/sh", args=("sh", "x"), timeout_seconds=1),),
    net_devices=(NetDevice(host_interface_name="eth1", name="net"),),
    additional_gids=(44,),
    intel_rdt=IntelRdt(clos_id="a", schemata=("L3:0=f",), enable_monitoring=True),
    cdi_devices=("vendor.example/class=name",),
)
READY = Condition(type="Ready", status="True", reason="Lit", message="It is lit.")
FULL = PreparedDevice(
    edits=FULL_EDITS,
    conditions=(READY,),
    data={"watts": 5, "colors": ["red"]},
    network_data=NetworkData(
        interface_name="net1", ips=("192.0.2.5/24",), hardware_address="00:00:5e:00:53:01"
    ),
    attributes={"vendor": "x", "lanes": 4, "fast": True, "firmware": Version("1.2.3")},
)
LARGE = PreparedDevice(
    conditions=tuple(replace(READY, type=f"T{n}", message="é" * 1024) for n in range(8)),
    data={"k": "x" * 10_000},
)


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A result that fails a claim."""

    text: str
    """The beginning."""
    index: int | None = 0
    pending: bool = False


Answer = Sequence[PreparedDevice] | Failed | bool | None


@dataclass(frozen=True, kw_only=True)
class Called:
    """A call, the driver's actions in it, and the results for its claims."""

    id: str
    does: Mapping[str, Does]
    answers: Sequence[Answer]
    operation: str = "prepare"
    claims: Sequence[Sequence[AllocatedDevice[Any]]] = ((ONE,), (TWO,))
    go: Sequence[Answer] | None = None
    """The results of a driver in Go, if they differ."""
    why: str = ""
    """The reason why they differ."""
    not_in: Mapping[str, str] = field(default_factory=dict[str, str])


def given(name: str) -> PreparedDevice:
    return PreparedDevice(edits=Edits(env={"GPU": name}))


def fails(
    id: str,
    does: Does,
    text: str,
    *,
    operation: str = "prepare",
    go: str | None = "",
    why: str = "",
) -> Called:
    """The call fails for one claim of two, and `go` is the text in Go, or None if there is none."""
    other: Answer = None if operation == "unprepare" else [given("a")]
    failed = Failed(text=text, pending=does.pending)
    of_go = Failed(text=f"driver gpu.example.com: {go or text}", index=None, pending=does.pending)
    return Called(
        id=id,
        operation=operation,
        does={"b": does},
        answers=(other, failed),
        go=(other, of_go),
        why=why or PER_CLAIM,
        not_in={GO: TYPES} if go is None else {},
    )


def refuses(id: str, result: Any, text: str, *, sendable: bool = False) -> Called:
    """A result that violates a rule fails its claim."""
    called = fails(id, Does(result=result), "", go="" if sendable else None)
    failed = Failed(text="", index=None)
    return replace(called, answers=(called.answers[0], replace(failed, text=text)), go=None)


def beside(**fields: Any) -> PreparedDevice:
    return PreparedDevice(**fields)


BUG = "driver gpu.example.com failed in "
BLANK = "driver gpu.example.com"
BEFORE = BLANK + ": prepare returned a PreparedDevice whose "

CALLS: Sequence[Called] = (
    Called(id="edits", does={}, answers=([given("a")], [given("b")])),
    Called(
        id="every-field",
        does={"a": Does(result=FULL_EDITS), "b": Does(result=FULL)},
        answers=([PreparedDevice(edits=FULL_EDITS)], [FULL]),
    ),
    Called(
        id="devices-of-one-claim",
        does={"b": Does(result=FULL)},
        claims=((ONE, TWO), (allocated("a", pool="node-1/usb"),)),
        answers=([given("a"), FULL], [given("a")]),
    ),
    Called(
        id="as-large-as-the-limits-allow",
        does={f"d{n}": Does(result=LARGE) for n in range(32)},
        claims=[[allocated(f"d{n}") for n in range(32)]] * 6,  # more than a message can have
        answers=[[LARGE] * 32] * 6,
    ),
    Called(
        id="a-message-without-end",
        does={"a": Does(result=beside(conditions=(replace(READY, message="m" * 2000),)))},
        claims=((ONE,),),
        answers=([beside(conditions=(replace(READY, message="m" * 1024),))],),
    ),
    fails("an-error", Does(error="it is broken; replace it"), "it is broken; replace it"),
    fails("lines-and-controls", Does(error=" the fan\nis \x1bstuck "), "the fan is ?stuck"),
    fails("an-error-without-end", Does(error="x" * 100_000), "x" * 1000),
    fails("a-file-that-is-no-utf-8", Does(error="/dev/\udcff"), "/dev/\\udcff", go=None),
    fails(
        "an-error-without-text",
        Does(error=""),
        "DriverError (no message)",
        go="the driver returned an error of type *errors.errorString without a message",
        why=OWN_WORDS,
    ),
    fails(
        "a-bug",
        Does(bug=True),
        BUG + "prepare: KeyError: 'a bug'",
        go="the driver panicked; see the log of the backend",
        why=OWN_WORDS,
    ),
    fails("an-unprepare-fails", Does(error="it is hot"), "it is hot", operation="unprepare"),
    fails(
        "a-release-is-pending",
        Does(error="it cools down", pending=True),
        "it cools down",
        operation="unprepare",
    ),
    fails(
        "a-bug-of-unprepare",
        Does(bug=True),
        BUG + "unprepare: KeyError: 'a bug'",
        operation="unprepare",
        go="the driver panicked; see the log of the backend",
        why=OWN_WORDS,
    ),
    Called(id="check", operation="check", does={"b": Does(checks=False)}, answers=(True, False)),
    Called(
        id="a-check-that-fails",
        operation="check",
        does={"a": Does(error="it is gone"), "b": Does(bug=True)},
        answers=(False, False),
    ),
    Called(id="no-devices", does={}, claims=((),), answers=([],)),
    refuses("nothing", 5, BLANK + ": prepare returned int, which is neither an Edits"),
    refuses("no-edits", beside(edits=None), BEFORE + "edits are NoneType, which is not an Edits"),
    refuses("data-of-a-set", beside(data={"a": {1}}), BEFORE + "data cannot be written as JSON"),
    refuses("data-text", beside(data="text"), BEFORE),
    refuses("status", beside(conditions=(replace(READY, status="yes"),)), BLANK, sendable=True),  # type: ignore[arg-type]
    refuses("conditions", beside(conditions=(READY,) * 9), BLANK, sendable=True),
    refuses("twice", beside(conditions=(READY, READY)), BLANK, sendable=True),
    refuses("data-11-kib", beside(data={"k": "x" * 10_240}), BLANK, sendable=True),
    refuses("ips", beside(network_data=NetworkData(ips=("10.0.0.1",))), BLANK, sendable=True),
    refuses(
        "ips-17",
        beside(network_data=NetworkData(ips=tuple(f"10.0.0.{n}/8" for n in range(17)))),
        BLANK,
        sendable=True,
    ),
    refuses(
        "attributes-33", beside(attributes={f"a{n}": n for n in range(33)}), BLANK, sendable=True
    ),
    refuses("attribute-float", beside(attributes={"a": 1.5}), BLANK),
    refuses("env-number", Edits(env={"A": 5}), ""),  # type: ignore[dict-item]
    refuses("env-letters", Edits(env="AB"), ""),  # type: ignore[arg-type]
    refuses("names-as-letters", Edits(cdi_devices="ab"), ""),  # type: ignore[arg-type]
    refuses(
        "options-as-letters",
        Edits(mounts=(Mount(host_path="/a", container_path="/b", options="ro"),)),  # type: ignore[arg-type]
        "",
    ),
    refuses("gids-as-text", Edits(additional_gids="44"), ""),  # type: ignore[arg-type]
    refuses("a-node-of-text", Edits(device_nodes=("/dev/null",)), ""),  # type: ignore[arg-type]
    refuses("a-relative-node", Edits(device_nodes=(DeviceNode(path="null"),)), "", sendable=True),
)

# ---------------------------------------------------------------- parameters

WHITE: Mapping[str, Any] = {"color": "white", "watts": 5, "at": {"x": 0}}


@dataclass(frozen=True, kw_only=True)
class Configured:
    """The configs of a device, and the parameters that its driver gets."""

    configs: Sequence[Mapping[str, Any]]
    parameters: Mapping[str, Any] | None
    """None: the claim fails, and the text names the field."""
    names: str = ""
    """The field."""
    only_go: str = ""
    """The reason why a class in Python accepts it."""


LAX = "pydantic reads a text or a flag as a number; a class can be strict"

PARAMETERS: Mapping[str, Configured] = {
    "none": Configured(configs=(), parameters={}),
    "empty": Configured(configs=({},), parameters={}),
    "some": Configured(configs=({"color": "red"},), parameters={"color": "red"}),
    "a-later-one-wins": Configured(
        configs=({"color": "red", "at": {"x": 1}}, {"color": "blue"}),
        parameters={"color": "blue", "at": {"x": 1}},
    ),
    "nested": Configured(
        configs=({"at": {"x": -1}, "rooms": [{"name": "a"}, {}]},),
        parameters={"at": {"x": -1}, "rooms": [{"name": "a"}, {"name": ""}]},
    ),
    "large-numbers": Configured(configs=({"watts": 2**63 - 1},), parameters={"watts": 2**63 - 1}),
    "too-large": Configured(configs=({"watts": 2**63},), parameters=None, names="watts"),
    "unknown": Configured(configs=({"shade": "red"},), parameters=None, names="shade"),
    "another-case": Configured(configs=({"Color": "red"},), parameters=None, names="Color"),
    "null": Configured(configs=({"color": None},), parameters=None, names="color"),
    "a-number-for-a-text": Configured(configs=({"color": 3},), parameters=None, names="color"),
    "a-text-for-a-number": Configured(
        configs=({"watts": "3"},), parameters=None, names="watts", only_go=LAX
    ),
    "a-fraction": Configured(configs=({"watts": 1.5},), parameters=None, names="watts"),
    "a-flag-for-a-number": Configured(
        configs=({"watts": True},), parameters=None, names="watts", only_go=LAX
    ),
    "nested-unknown": Configured(configs=({"at": {"y": 1}},), parameters=None, names="at.y"),
    "nested-case": Configured(configs=({"at": {"X": 1}},), parameters=None, names="at.X"),
    "nested-null": Configured(configs=({"at": {"x": None}},), parameters=None, names="at.x"),
    "null-for-an-object": Configured(configs=({"at": None},), parameters=None, names="at"),
    "null-in-a-list": Configured(configs=({"rooms": [None]},), parameters=None, names="rooms[0]"),
    "case-in-a-list": Configured(
        configs=({"rooms": [{"Name": "a"}]},), parameters=None, names="rooms[0].Name"
    ),
    "a-list-for-an-object": Configured(configs=({"at": []},), parameters=None, names="at"),
    "an-object-for-a-list": Configured(configs=({"rooms": {}},), parameters=None, names="rooms"),
}

# ---------------------------------------------------------------- health

HEALTH: Mapping[str, tuple[object, Health, str]] = {
    # The reported health, its effect, and why Go cannot report it.
    "unhealthy": (Health.unhealthy("hot"), Health.unhealthy("hot"), ""),
    "broken": (
        Health.unhealthy("hot", evict_pods=True),
        Health.unhealthy("hot", evict_pods=True),
        "",
    ),
    "unknown": (Health.unknown("no answer"), Health.unknown("no answer"), ""),
    "surrogate": (Health.unhealthy("/\udcff"), Health.unhealthy("/\\udcff"), TYPES),
    "status": (
        Health("fine"),  # type: ignore[arg-type]
        Health.unknown("the driver returned Health, which is not a valid Health"),
        TYPES,
    ),
    "text": ("fine", Health.unknown("the driver returned str, which is not a valid Health"), TYPES),
}
