"""
``kubectl drakit devices``: each pool with its devices and what is wrong with it, and with ``-o
wide`` each device.

A pool is gathered per node, as the scheduler does: slices that name a node make one pool with the
others of this node. All other slices of a pool make one.

It must not know sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drakit_cli.kubectl.gather import NODES, Gathered
from drakit_cli.kubectl.output import Output, shortened
from drakit_explain.availability import Hardware
from drakit_explain.devices import DeviceFacts
from drakit_explain.model import ClaimFacts, DeviceID, PoolID, SliceFacts
from drakit_explain.pools import NodePool, PoolState
from drakit_explain.reports import UNHEALTHY
from drakit_explain.world import World

# ---------------------------------------------------------------- rows

_PLACES = ("all", "selected", "by device")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRow:
    """One device."""

    name: str
    claims: tuple[ClaimFacts, ...]
    taints: tuple[str, ...]
    shared: bool = False
    """Its claims have shares of it; more shares may fit."""

    blocked: bool = False
    """Other devices use the hardware that it needs: it is a partition."""

    @property
    def free(self) -> bool:
        return self.state == "free"

    @property
    def state(self) -> str:
        if self.claims:
            return "shared" if self.shared else "allocated"
        if self.blocked:
            return "hardware in use"
        return "tainted" if self.taints else "free"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRow:
    """A pool as one node sees it, or as all of its nodes do."""

    identity: PoolID
    node: str
    """The node that its slices name, or "all", "selected" or "by device"."""

    generation: int
    slices: int
    expected: int
    """The number of slices of a complete pool."""

    problem: str = ""
    """Why no device can be allocated from it."""

    vanished: bool = False
    """The node that its slices name does not exist."""

    devices: tuple[DeviceRow, ...]

    @property
    def named(self) -> bool:
        """Whether its slices name one node."""
        return self.node not in _PLACES

    @property
    def free(self) -> int:
        return 0 if self.problem else sum(1 for each in self.devices if each.free)

    @property
    def allocated(self) -> int:
        return sum(1 for each in self.devices if each.claims)

    @property
    def tainted(self) -> int:
        return sum(1 for each in self.devices if each.taints)

    @property
    def unhealthy(self) -> int:
        return sum(1 for each in self.devices if UNHEALTHY in each.taints)

    @property
    def state(self) -> str:
        return self.problem or "ready"

    def holders(self) -> list[ClaimFacts]:
        """Return the claims that hold devices, each once."""
        found = {claim.uid: claim for each in self.devices for claim in each.claims}
        return sorted(found.values(), key=lambda claim: (claim.namespace, claim.name))


def pool_rows(found: Gathered) -> list[PoolRow]:
    """Return the pools of a cluster, by driver, pool and node."""
    groups: dict[tuple[PoolID, str], list[SliceFacts]] = {}
    for each in found.world.slices():
        if each.driver:  # else it could not be read
            groups.setdefault((each.of_pool, _where(each, found.world)), []).append(each)
    views = None if found.lacks_all(NODES) else found.world.views()
    states, hardware = _states(found.world), Hardware(found.world)
    return [
        _row(identity, node, slices, views, states, hardware, found.world)
        for (identity, node), slices in sorted(groups.items())
    ]


def _row(
    identity: PoolID,
    node: str,
    slices: Sequence[SliceFacts],
    views: Collection[str] | None,
    states: Mapping[tuple[PoolID, str], NodePool],
    hardware: Hardware,
    world: World,
) -> PoolRow:
    generation = max(each.generation for each in slices)
    current = sorted(
        (each for each in slices if each.generation == generation), key=lambda each: each.name
    )
    named = node not in _PLACES
    vanished = named and views is not None and node not in views
    state = states.get((identity, node if named else ""))
    expected = current[0].pool_slices
    problem = ""
    if vanished:
        problem = "node does not exist"
    elif state is not None and state.state is PoolState.INVALID:
        problem = f"invalid: {state.problem}"
    elif len(current) != expected:
        problem = f"incomplete: {len(current)} of {expected} slices"
    return PoolRow(
        identity=identity,
        node=node,
        generation=generation,
        slices=len(current),
        expected=expected,
        problem=problem,
        vanished=vanished,
        devices=tuple(
            _device(identity, device, world, state, hardware)
            for each in current
            for device in each.devices
        ),
    )


def _device(
    pool: PoolID, device: DeviceFacts, world: World, state: NodePool | None, hardware: Hardware
) -> DeviceRow:
    name = DeviceID(*pool, device.name)
    holder = world.holder(name)
    blocked = False
    if state is not None and state.state is PoolState.READY:
        blocked = hardware.in_the_way(state, device) is not None
    return DeviceRow(
        name=device.name,
        claims=(holder,) if holder is not None else tuple(world.sharers(name)),
        taints=tuple(sorted({taint.key for taint in world.taints(name, device)})),
        shared=holder is None,
        blocked=blocked,
    )


def _where(each: SliceFacts, world: World) -> str:
    """Return the node of a slice's pool, or what other nodes it is for."""
    places = [one.place for one in world.slices_of_pool(each.of_pool)]
    if all(place is not None and place.node for place in places) and each.place is not None:
        return each.place.node
    if any(place is None for place in places):
        return _PLACES[2]
    return _PLACES[0] if any(place and place.every for place in places) else _PLACES[1]


def _states(world: World) -> dict[tuple[PoolID, str], NodePool]:
    """Return what the scheduler finds: by pool and node, and by pool where any node finds it."""
    states: dict[tuple[PoolID, str], NodePool] = {}
    for name, view in world.views().items():
        for pool in world.pools_of_node(view):
            states[pool.identity, name] = pool
            if pool.state is not PoolState.READY:
                states[pool.identity, ""] = pool
            states.setdefault((pool.identity, ""), pool)
    return states


# ---------------------------------------------------------------- the command

_POOL = (
    *("DRIVER", "POOL", "NODE", "DEVICES", "FREE", "ALLOCATED", "TAINTED", "UNHEALTHY"),
    *("STATE", "ALLOCATED TO"),
)
_DEVICE = ("DRIVER", "POOL", "NODE", "DEVICE", "STATE", "TAINTS", "ALLOCATED TO")


def body(found: Gathered) -> dict[str, Any]:
    """Return the pools for programs."""
    return {
        "pools": [pool_body(each) for each in pool_rows(found)],
        "notEvaluated": [str(gap) for gap in found.gaps],
    }


def fails(found: Gathered, states: Collection[str]) -> bool:
    """Return whether a pool has a problem, or devices are in one of these states."""
    rows = pool_rows(found) if states else []
    return any(
        ("problem" in states and each.problem)
        or ("tainted" in states and each.tainted)
        or ("unhealthy" in states and each.unhealthy)
        for each in rows
    )


def show(found: Gathered, output: Output) -> None:
    """Print the pools."""
    rows = pool_rows(found)
    if not rows:
        output.line("No ResourceSlice publishes a device.")
    else:
        show_rows(rows, output)
    output.lines("Not evaluated", (str(gap) for gap in found.gaps))


def show_rows(rows: Sequence[PoolRow], output: Output) -> None:
    """Print a table of pools, or with ``-o wide`` of their devices."""
    if output.wide:
        output.table(_DEVICE, [_device_cells(pool, each) for pool in rows for each in pool.devices])
    else:
        output.table(_POOL, [_pool_cells(each) for each in rows])


def _pool_cells(pool: PoolRow) -> list[str]:
    numbers = (len(pool.devices), pool.free, pool.allocated, pool.tainted, pool.unhealthy)
    holders = shortened([_named(claim) for claim in pool.holders()])
    return [*pool.identity, pool.node, *map(str, numbers), pool.state, holders]


def _device_cells(pool: PoolRow, device: DeviceRow) -> list[str]:
    taints, claims = ", ".join(device.taints), ", ".join(map(_named, device.claims))
    return [*pool.identity, pool.node, device.name, _state(pool, device), taints, claims]


def _state(pool: PoolRow, device: DeviceRow) -> str:
    return pool.problem if pool.problem and not device.claims else device.state


def _named(claim: ClaimFacts) -> str:
    return f"{claim.namespace}/{claim.name}"


def pool_body(pool: PoolRow) -> dict[str, Any]:
    """Return a pool for programs."""
    return {
        "driver": pool.identity.driver,
        "pool": pool.identity.pool,
        "node": pool.node,
        "state": pool.state,
        "generation": pool.generation,
        "slices": {"published": pool.slices, "expected": pool.expected},
        "count": len(pool.devices),
        "free": pool.free,
        "allocated": pool.allocated,
        "tainted": pool.tainted,
        "unhealthy": pool.unhealthy,
        "devices": [
            {
                "name": each.name,
                "state": _state(pool, each),
                "taints": list(each.taints),
                "claims": [_named(claim) for claim in each.claims],
            }
            for each in pool.devices
        ],
    }
