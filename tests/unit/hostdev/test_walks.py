"""
Random walks of held devices: sticks are plugged, moved and renumbered, firmware changes ids, admins
edit policies, the driver and the node restart, while pods come and go.

A world with a kernel, a scheduler and pods checks after each step that no two tenants have one
function of the hardware, and that no pod gets another piece of hardware than the one that it had.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from drakit import ClaimReference, Device, DriverError
from tests.fakes.hostdev import Rig
from tests.fakes.sysfs import FakeHost, policy
from tests.fakes.usb_descriptors import FTDI

CONTROLLER = "pci0000:00/0000:00:14.0"
PORTS = ("1", "2", "3", "4")
STEPS = 60

TTY = policy("tty", "/dev/ttyUSB*")
SERIAL_IDS, EMPTY, LOADED = ("0403", "6001"), ("1a6e", "089a"), ("18d1", "9302")


def usb(*ids: tuple[str, str], **fields: object) -> dict:
    matchers = [dict(zip(("vendorID", "productID"), each, strict=True)) for each in ids]
    return {"match": [{"subsystem": "usb", "usb": each} for each in matchers], **fields}


CORAL = {"coral": usb(EMPTY, LOADED)}
POLICIES = (
    {"serial": TTY, **CORAL},
    {"serial": TTY | {"sharing": {"mode": "Capacity", "users": 2}}, **CORAL},
    {"serial": TTY | {"sharing": {"mode": "Capacity", "users": 1}}, **CORAL},
    {"serial": TTY | {"sharing": {"mode": "Users", "users": 2}}, **CORAL},
    {"serial": TTY | {"group": "Unit"}, "coral": usb(EMPTY, LOADED, onVanish="Evict")},
    {"raw": usb(SERIAL_IDS), "serial": TTY, "coral": usb(EMPTY, LOADED, identity="Port")},
    {"serial": TTY, "raw": usb(SERIAL_IDS), **CORAL},
    {"all": {"match": [*TTY["match"], *usb(SERIAL_IDS)["match"]]}, "coral": usb(LOADED)},
    {"raw": usb(SERIAL_IDS, sharing={"mode": "Users", "users": 2}),
     "serial": TTY | {"sharing": {"mode": "Capacity", "users": 2}}, **CORAL},
    {"serial": TTY | {"identity": "Port"}, "other": usb(EMPTY), "coral": usb(LOADED)},
)  # fmt: skip


@dataclass(eq=False)
class Hardware:
    """A stick with two serial ports, or an accelerator whose ids change."""

    name: str
    serial: str | None
    is_stick: bool
    port: str | None = None
    ids: tuple[str, str] = EMPTY
    directory: Path | None = None

    @property
    def model(self) -> tuple[bool, str | None]:
        """The properties that a device shares with another one of the same model at one port."""
        return self.is_stick, self.serial


Number = tuple[str, int, int]
Function = tuple[str, int]
"""The hardware's name, and the number of an interface."""


@dataclass
class Tenant:
    """A pod with a claim of one device."""

    claim: ClaimReference
    device: str
    shared: bool
    functions: frozenset[Function] = frozenset()
    """The last functions that the container got. Empty before the device is prepared."""

    port: str | None = None
    numbers: set[Number] = field(default_factory=set)
    """The numbers that its containers can use, former ones included."""


@dataclass
class World:
    """The kernel, the scheduler and the pods."""

    host: FakeHost
    dice: random.Random
    rig: Rig = field(init=False)
    policies: dict[str, dict] = field(init=False)
    tenants: list[Tenant] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    nodes: dict[Number, frozenset[Function]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hardware = [
            Hardware("twin-a", "0001", True),
            Hardware("twin-b", "0001", True),
            Hardware("stick", "B2", True),
            Hardware("coral-a", None, False),
            Hardware("coral-b", None, False),
        ]
        self.policies = POLICIES[0]
        self.rig = Rig(self.host, self.policies)

    # ------------------------------------------------------------ the kernel

    def free(self, kind: str, major: int, minors: range) -> int:
        """Choose a free minor: the kernel gives away those of unplugged devices again."""
        return self.dice.choice([n for n in minors if (kind, major, n) not in self.nodes])

    def plug(self, it: Hardware, port: str) -> None:
        where = f"{CONTROLLER}/usb1/1-{port}"
        self.host.parent(CONTROLLER, "pci")
        self.host.parent(f"{CONTROLLER}/usb1", "usb", idVendor="1d6b", idProduct="2", speed="480")
        minor = self.free("c", 189, range(1, 9))
        interfaces = (0, 1) if it.is_stick else (0,)
        self.nodes["c", 189, minor] = frozenset((it.name, n) for n in interfaces)
        it.directory = self.host.usb_device(where, f"189:{minor}", FTDI, node=True)
        (it.directory / "serial").unlink()
        vendor, product = SERIAL_IDS if it.is_stick else it.ids
        serial = {"serial": it.serial} if it.serial else {}
        self.host.write(it.directory, idVendor=vendor, idProduct=product, **serial)
        for n in interfaces if it.is_stick else ():
            tty = self.free("c", 188, range(8))
            self.nodes["c", 188, tty] = frozenset({(it.name, n)})
            interface = f"{where}/1-{port}:1.{n}"
            self.host.parent(interface, "usb", bInterfaceNumber=f"0{n}")
            self.host.device(f"{interface}/ttyUSB{tty}/tty/ttyUSB{tty}", f"188:{tty}",
                             subsystem="tty", node=True)  # fmt: skip
        it.port = port

    def unplug(self, it: Hardware) -> None:
        assert it.directory is not None
        self.host.unplug(it.directory)
        self.nodes = {
            number: functions
            for number, functions in self.nodes.items()
            if not any(name == it.name for name, _ in functions)
        }
        it.port = it.directory = None

    def ports_for(self, it: Hardware) -> list[str]:
        """Return the free ports. An equal device in the port of a held one looks the same."""
        taken = {each.port for each in self.hardware}
        return [
            port
            for port in PORTS
            if port not in taken
            and not any(
                other is not it and self.last_port.get(other.name) == port
                and self.is_held(other) and other.model[0] == it.model[0]
                and (other.model == it.model or not it.is_stick or self.by_port)
                for other in self.hardware
            )
        ]  # fmt: skip

    @property
    def by_port(self) -> bool:
        return any(spec.get("identity") == "Port" for spec in self.policies.values())

    def is_held(self, it: Hardware) -> bool:
        return any(name == it.name for t in self.tenants for name, _ in t.functions)

    def reach(self, tenant: Tenant) -> frozenset[Function]:
        """Return the hardware that a tenant has, or can have when its containers restart. Hardware
        in another port is other hardware, because a twin could have moved there."""
        found = {f for n in tenant.numbers for f in self.nodes.get(n, ())}
        in_place = {each.name for each in self.hardware if each.port == tenant.port}
        return frozenset(found | {each for each in tenant.functions if each[0] in in_place})

    last_port: dict[str, str] = field(default_factory=dict)

    # ------------------------------------------------------------ steps

    def step_plug(self) -> str:
        it = self.dice.choice(self.hardware)
        if it.port:
            self.last_port[it.name] = it.port
            self.unplug(it)
            return f"unplug {it.name}"
        ports = self.ports_for(it)
        former = self.last_port.get(it.name)
        if not ports:
            return "no port"
        port = former if former in ports and self.dice.random() < 0.6 else self.dice.choice(ports)
        if not it.is_stick:
            it.ids = EMPTY
        self.plug(it, port)
        return f"plug {it.name} into {port}"

    def step_renumber(self) -> str:
        plugged = [each for each in self.hardware if each.port]
        again = self.dice.sample(plugged, k=min(2, len(plugged)))
        ports = [each.port for each in again]
        for it in again:
            self.unplug(it)
        for it, port in zip(again, ports, strict=True):
            if not it.is_stick:
                it.ids = self.dice.choice((EMPTY, LOADED))
            self.plug(it, port or "")
        return f"renumber or load {[each.name for each in again]}"

    def step_policies(self) -> str:
        # An equal device that was plugged before stays, although the port identifies it by now.
        index = self.dice.randrange(len(POLICIES))
        self.policies = POLICIES[index]
        self.rig.apply(self.policies)
        return f"policies {index}"

    def step_restart(self) -> str:
        self.rig.restart(self.policies)
        return "restart of the driver"

    def step_reboot(self) -> str:
        plugged = [(each, each.port or "") for each in self.hardware if each.port]
        for it, _ in plugged:
            self.unplug(it)
        self.dice.shuffle(plugged)
        for it, port in plugged:
            it.ids = self.dice.choice((it.ids, EMPTY))
            self.plug(it, port)
        for tenant in self.tenants:
            tenant.numbers.clear()
        for name, device in self.rig.holds.items():
            nodes = tuple(replace(each, major=None, minor=None) for each in device.nodes)
            self.rig.holds[name] = replace(device, nodes=nodes)
        self.rig.restart(self.policies)
        return "reboot"

    def step_schedule(self) -> str:
        """Allocate a device of the last inventory; the world may change before it is prepared."""
        free = [each for each in self.rig.listed.values() if self.is_allocatable(each)]
        if not free:
            return "nothing is free"
        device = self.dice.choice(free)
        number = len(self.log)
        claim = ClaimReference(namespace="lab", name=f"c{number}", uid=f"uid-{number}")
        shared = self.is_shared(device)
        self.tenants.append(Tenant(claim=claim, device=device.name, shared=shared))
        return f"allocate {device.name} to {claim.name}"

    def is_allocatable(self, device: Device) -> bool:
        holders = [each for each in self.tenants if each.device == device.name]
        users = device.capacity.get("users")
        room = 1 if isinstance(users, str) or users is None else int(str(users.value))
        limit = room if device.allow_multiple_allocations else 1
        return not device.taints and len(holders) < limit and all(each.shared for each in holders)

    def is_shared(self, device: Device) -> bool:
        return "sharing" in self.policies[str(device.attributes["policy"])]

    def step_release(self) -> str:
        if not self.tenants:
            return "no pod"
        tenant = self.tenants.pop(self.dice.randrange(len(self.tenants)))
        held = self.rig.holds.pop(tenant.device, None)
        if held and (claims := tuple(c for c in held.claims if c != tenant.claim)):
            shares = held.shares[: len(claims)]
            self.rig.holds[tenant.device] = replace(held, claims=claims, shares=shares)
        return f"release {tenant.claim.name}"

    async def step_prepare(self) -> str:
        """Start a pod, or a container of it again."""
        if not self.tenants:
            return "no pod"
        new = [each for each in self.tenants if not each.functions]
        tenant = self.dice.choice(new if new and self.dice.random() < 0.5 else self.tenants)
        for other in self.tenants:
            is_same = other is not tenant and other.device == tenant.device and other.functions
            if is_same and not (tenant.shared and other.shared):
                return f"prepare {tenant.claim.name}: the node plugin refuses it"
        before = dict(self.rig.holds)
        try:
            edits = await self.rig.prepare(tenant.device, tenant.claim)
        except DriverError as error:
            return f"prepare {tenant.claim.name}: {error}"
        if not tenant.shared:  # although the policy may share the device by now
            self.rig.holds[tenant.device] = replace(self.rig.holds[tenant.device], shares=())
        numbers = {("c", node.major or 0, node.minor or 0) for node in edits.device_nodes}
        given = frozenset(function for number in numbers for function in self.nodes[number])
        (owner,) = {name for name, _ in given}
        others = [each for each in self.tenants if each.device != tenant.device]
        if not tenant.numbers and any(numbers & each.numbers for each in others):
            # As the node plugin does: a claim that no container uses gets no number of another.
            self.rig.holds = before
            return f"prepare {tenant.claim.name}: the number is taken"
        if tenant.functions:
            assert owner == min(tenant.functions)[0], f"{tenant} gets the hardware {owner}"
        for other in self.tenants:
            # The numbers of two tenants can be swapped. Then both devices are tainted.
            if other is not tenant and not tenant.functions and given & self.reach(other):
                assert tenant.shared, f"{tenant} gets what {other} has"
                assert other.shared, f"{tenant} gets what {other} has"
        tenant.functions, tenant.numbers = given, tenant.numbers | numbers
        tenant.port = next(each.port for each in self.hardware if each.name == owner)
        return f"prepare {tenant.claim.name}: {sorted(given)}"

    # ------------------------------------------------------------ the invariant

    async def check(self) -> None:
        inventory = await self.rig.scan()
        scan = self.rig.driver._scan
        assert scan is not None
        for device in inventory.devices:
            if device.taints or not self.is_allocatable(device):
                continue
            hosts = scan.selection.devices[device.name].hosts
            functions = {f for h in hosts for f in self.nodes[h.type, h.major, h.minor]}
            for tenant in self.tenants:
                if not functions & self.reach(tenant):
                    continue
                if tenant.device == device.name:
                    offered = device.allow_multiple_allocations or not tenant.shared
                    is_entry = tenant.shared and not self.rig.holds[device.name].shares
                    assert offered or is_entry, f"{device.name} is exclusive for a share"
                    continue
                both = tenant.shared and self.is_shared(device)
                assert both, f"{device.name} is free, and {tenant} has it"


STEPS_AND_WEIGHTS = {
    World.step_plug: 5,
    World.step_renumber: 2,
    World.step_policies: 2,
    World.step_restart: 1,
    World.step_reboot: 1,
    World.step_schedule: 4,
    World.step_prepare: 6,
    World.step_release: 2,
}


@pytest.mark.parametrize("seed", range(4))
async def test_no_two_tenants_have_one_function_and_no_pod_gets_other_hardware(
    host, seed, monkeypatch
):
    # The world reports held devices at once; what the driver remembers must not hide an error.
    monkeypatch.setattr("drakit_drivers.hostdev.driver._REPORTED_SECONDS", 0.0)
    world = World(host=host, dice=random.Random(seed))
    for it, port in zip(world.hardware, PORTS, strict=False):
        world.plug(it, port)
    try:
        await world.check()
        for _ in range(STEPS):
            (step,) = world.dice.choices(
                list(STEPS_AND_WEIGHTS), weights=list(STEPS_AND_WEIGHTS.values())
            )
            result = step(world)
            world.log.append(result if isinstance(result, str) else await result)
            await world.check()
    except AssertionError as error:
        error.add_note("\n".join(world.log))
        raise
    assert any("prepare c" in line and "[" in line for line in world.log), "a pod has run"
