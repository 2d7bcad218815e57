"""The driver hostdev on a fake host, and the claims that hold its devices."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from drakit import AllocatedDevice, ClaimReference, Device, Edits, HeldDevice, HeldNode, Inventory
from drakit_drivers.hostdev import HostDevices
from tests.fakes.sysfs import FakeHost, as_policies, prepared

ONE, TWO = (
    ClaimReference(namespace="default", name=name, uid=f"uid-{name}") for name in ("one", "two")
)


@dataclass
class Labeled:
    """A node whose labels a test changes."""

    name: str = "node-1"
    labels: Mapping[str, str] | None = field(default_factory=dict)


class Rig:
    """A driver, and the claims that hold its devices as the node plugin's checkpoint has them."""

    def __init__(
        self, host: FakeHost, policies: dict[str, dict], node: Labeled | None = None, **options
    ):
        self._config = host.config({}, **options)
        self.node = node or Labeled()
        self.holds: dict[str, HeldDevice] = {}
        self.listed: dict[str, Device] = {}
        self.restart(policies)

    def restart(self, policies: dict[str, dict]) -> None:
        """Start the driver again, without its earlier findings."""
        self.driver = HostDevices(self._config, self.node)
        self.driver.held_devices = lambda: dict(self.holds)
        self.apply(policies)

    def apply(self, policies: dict[str, dict]) -> None:
        self.driver.apply_policies({each.name: each for each in as_policies(policies)})

    async def scan(self) -> Inventory:
        found = await inventory(self.driver)
        self.listed = {each.name: each for each in (*(found.fallback or ()), *found.devices)}
        return found

    async def devices(self) -> dict[str, Device]:
        return {each.name: each for each in (await self.scan()).devices}

    async def paths(self) -> dict[str, object]:
        return {name: each.attributes["path"] for name, each in (await self.devices()).items()}

    async def prepare(self, name: str, claim: ClaimReference = ONE) -> Edits:
        """Prepare a device for a claim that holds it from then on; a second time, the numbers that
        the claim had before are no longer current."""
        edits = await prepared(self.driver, AllocatedDevice(name=name, pool="", request="main"))
        nodes = [
            HeldNode(type=n.type, major=n.major, minor=n.minor, identity=n.identity)
            for n in edits.device_nodes
        ]
        held = self.holds.get(name)
        former = [replace(node, current=False) for node in held.nodes] if held else []
        # The node plugin keeps no nodes of an earlier boot.
        former = [
            n for n in former if n.major is not None and replace(n, current=True) not in nodes
        ]
        # A share stays one when the policy stops sharing.
        shared = name in self.listed and self.listed[name].allow_multiple_allocations
        shared |= held is not None and bool(held.shares)
        claims = dict.fromkeys((*(held.claims if held and shared else ()), claim))
        self.holds[name] = HeldDevice(
            claims=tuple(claims),
            nodes=(*nodes, *former),
            shares=tuple({"users": "1"} for _ in claims if shared),
        )
        return edits

    async def rejected(self) -> dict[str, tuple[str, str]]:
        return {each.device: (each.reason, each.message) for each in (await self.scan()).rejected}


def taints(device: Device) -> dict[str, str]:
    return {taint.key: taint.effect for taint in device.taints}


async def inventory(driver: HostDevices) -> Inventory:
    """Return the first inventory of a driver."""
    async with aclosing(driver.devices()) as stream:
        return await anext(stream)
