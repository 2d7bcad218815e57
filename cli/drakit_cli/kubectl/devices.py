"""
``kubectl drakit devices``: each pool with its devices and problems, and with ``-o wide`` each
device.

A device has exactly one state (:mod:`drakit_explain.counts`). The numbers of a pool add up to the
number of its devices. They equal the values of the node plugin's metric ``drakit_devices``, except
that the metric ignores DeviceTaintRules, which the node plugin does not read.

As in the scheduler, pools are gathered per node: the slices that name a node form one pool with the
other slices for this node. All other slices of a pool form another pool. Does not depend on
sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from drakit.quantity import quantity_units
from drakit_cli.kubectl.gather import Gathered
from drakit_cli.kubectl.output import Output, shortened
from drakit_explain.allocation import consumed_of
from drakit_explain.availability import Hardware
from drakit_explain.broken import node_of_claim
from drakit_explain.counts import STATES, states_in
from drakit_explain.devices import DeviceFacts, bits
from drakit_explain.kinds import NODES, SLICES
from drakit_explain.model import ClaimFacts, DeviceID, PoolID, SliceFacts
from drakit_explain.pools import NodePool, PoolState, place_includes
from drakit_explain.wording import quantity_text
from drakit_explain.world import World

# ---------------------------------------------------------------- rows

_PLACES = ("all", "selected", "by device", "unknown")


class Left(NamedTuple):
    """The remaining amount of a capacity."""

    name: str
    amount: int
    """The amount in billionths, like `total`."""

    total: int

    @property
    def has_rest(self) -> bool:
        return self.amount > 0

    def __str__(self) -> str:
        return f"{quantity_text(self.amount)} of {quantity_text(self.total)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRow:
    """One device in the output."""

    name: str
    claims: tuple[ClaimFacts, ...]
    taints: tuple[str, ...] = ()
    """The keys of all taints, including those of DeviceTaintRules."""

    state: str
    """The state, which is one of `STATES`."""

    detail: str = ""
    """Details that the state does not show."""

    left: tuple[Left, ...] = ()
    """How much of each capacity of a shared device is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRow:
    """A pool as seen by one node, or by all of its nodes."""

    identity: PoolID
    node: str
    """The node named by the pool's slices, or "all", "selected", "by device" or "unknown"."""

    generation: int = 0
    slices: int = 0
    expected: int = 0
    """The number of slices of a complete pool."""

    problem: str = ""
    """The reason why no device can be allocated from the pool."""

    vanished: bool = False
    """Whether the slices name a node that does not exist."""

    devices: tuple[DeviceRow, ...]
    """Devices that are published or held."""

    @property
    def named(self) -> bool:
        """Whether the pool's slices name one node."""
        return self.node not in _PLACES

    @property
    def published(self) -> tuple[DeviceRow, ...]:
        """The devices in slices."""
        return tuple(each for each in self.devices if each.state != "gone")

    @property
    def numbers(self) -> dict[str, int]:
        """The number of devices in each state."""
        found: dict[str, int] = dict.fromkeys(STATES, 0)
        for each in self.devices:
            found[each.state] += 1
        return found

    @property
    def state(self) -> str:
        return self.problem or "ready"

    def holders(self) -> list[ClaimFacts]:
        """Return the claims that hold devices, without duplicates."""
        found = {claim.uid: claim for each in self.devices for claim in each.claims}
        return sorted(found.values(), key=lambda claim: (claim.namespace, claim.name))


UNREACHABLE = "unreachable"
"""The state of a pool whose slices do not select any node in the cluster."""


def pool_rows(found: Gathered) -> list[PoolRow]:
    """Return the pools of a cluster, sorted by driver, pool and node."""
    groups: dict[tuple[PoolID, str], list[SliceFacts]] = {}
    for each in found.world.slices():
        if each.driver:  # if the slice could be read
            groups.setdefault((each.of_pool, _where(each, found.world)), []).append(each)
    views = None if found.lacks_all(NODES) else found.world.views()
    states, hardware = _states(found.world), Hardware(found.world)
    rows = [
        _row(identity, node, slices, views, states, hardware, found.world)
        for (identity, node), slices in sorted(groups.items())
    ]
    # If the user cannot see some slices, the devices that claims hold may be in those.
    return rows if found.lacks(SLICES) else _with_gone(rows, found.world)


def _has_node(of: SliceFacts, world: World) -> bool:
    views = world.views().values()
    return of.place is None or any(place_includes(of.place, each) for each in views)


def _with_gone(rows: Sequence[PoolRow], world: World) -> list[PoolRow]:
    """Add the devices that claims hold but that are no longer published."""
    published = {DeviceID(*row.identity, each.name) for row in rows for each in row.devices}
    gone: dict[DeviceID, list[ClaimFacts]] = {}
    for claim in world.of(ClaimFacts).values():
        held = {*claim.devices, *(share.device for share in claim.shares)}
        for device in sorted(held - published):
            gone.setdefault(device, []).append(claim)
    where = {(row.identity, row.node): row for row in rows}
    first = {row.identity: row for row in reversed(rows)}
    for device, claims in sorted(gone.items()):
        node = node_of_claim(claims[0]) or "unknown"
        old = where.get((device.of_pool, node)) or first.get(device.of_pool)
        old = old or PoolRow(
            identity=device.of_pool, node=node, problem="not published", devices=()
        )
        row = DeviceRow(name=device.device, claims=tuple(claims), state="gone")
        # Include the devices that were added in earlier iterations.
        old = where.get((old.identity, old.node), old)
        where[old.identity, old.node] = replace(old, devices=(*old.devices, row))
    return [row for _, row in sorted(where.items())]


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
    elif not any(each.devices for each in current) and any(each.devices for each in slices):
        problem = f"empty: the scheduler ignores slices of generations before {generation}"
    elif views is not None and not named and not any(_has_node(each, world) for each in current):
        problem = f"{UNREACHABLE}: its node selector matches no node"
    ready = state if state is not None and state.state is PoolState.READY else None
    devices: list[DeviceRow] = []
    for each in current:
        masks = states_in(each, ready, world, hardware, usable=not problem)
        by_index = {index: name for name, mask in masks.items() for index in bits(mask)}
        devices += [
            _device(DeviceID(*identity, device.name), device, by_index[index], problem, world)
            for index, device in enumerate(each.devices)
        ]
    return PoolRow(
        identity=identity,
        node=node,
        generation=generation,
        slices=len(current),
        expected=expected,
        problem=problem,
        vanished=vanished,
        devices=tuple(devices),
    )


def _device(
    name: DeviceID, device: DeviceFacts, state: str, problem: str, world: World
) -> DeviceRow:
    holder = world.holder(name)
    # A device can have shares even if sharing is no longer allowed.
    claims = (*((holder,) if holder is not None else ()), *sorted(world.sharers(name), key=named))
    detail = ""
    if state == "allocated" and holder is None:
        detail = "shared" if claims else "hardware in use"
    elif state == "unhealthy":
        detail = problem
    return DeviceRow(
        name=device.name,
        claims=claims,
        taints=tuple(sorted({each.key for each in world.taints(name, device)})),
        state=state,
        detail=detail,
        left=_left(name, device, world),
    )


def _left(name: DeviceID, device: DeviceFacts, world: World) -> tuple[Left, ...]:
    used = world.consumed(name)
    if used is None:
        return ()
    totals = {each.name: quantity_units(each.value) for each in device.kind.capacity}
    return tuple(Left(name, total - used.get(name, 0), total) for name, total in totals.items())


def _where(each: SliceFacts, world: World) -> str:
    """Return the node of a slice's pool, or a word for the nodes that can use it."""
    places = [one.place for one in world.slices_of_pool(each.of_pool)]
    if all(place is not None and place.node for place in places) and each.place is not None:
        return each.place.node
    if any(place is None for place in places):
        return _PLACES[2]
    return _PLACES[0] if any(place and place.every for place in places) else _PLACES[1]


def _states(world: World) -> dict[tuple[PoolID, str], NodePool]:
    """Return the pools as the scheduler sees them, keyed by pool and node. A pool that any node
    sees is also keyed by an empty node name."""
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
    *("DRIVER", "POOL", "NODE", "DEVICES", *(each.upper() for each in STATES)),
    *("STATE", "ALLOCATED TO"),
)
_DEVICE = ("DRIVER", "POOL", "NODE", "DEVICE", "STATE", "TAINTS", "ALLOCATED TO")


def selected(found: Gathered, name: str | None) -> tuple[list[PoolRow], bool]:
    """
    Return the pools or devices with the given name, and whether the rows are for devices.

    :param name: a driver, a pool, ``driver/pool``, a device, ``pool/device``, or
        ``driver/pool/device``. None for all pools.
    """
    known = pool_rows(found)
    words = [(row.identity.driver, row.identity.pool, "/".join(row.identity)) for row in known]
    pools = [row for row, of in zip(known, words, strict=True) if name in of]
    if pools or not name:
        return pools or known, False
    rows: list[PoolRow] = []
    for row in known:
        devices = tuple(each for each in row.devices if is_named(name, row.identity, each.name))
        if devices:
            rows.append(replace(row, devices=devices))
    return rows, True


def is_named(name: str, pool: PoolID, device: str) -> bool:
    """Return whether a name refers to a device, with or without its pool and driver."""
    return name in (device, f"{pool.pool}/{device}", f"{pool.driver}/{pool.pool}/{device}")


def body(rows: Iterable[PoolRow], found: Gathered) -> dict[str, Any]:
    """Return the pools as JSON."""
    return {
        "pools": [pool_body(each) for each in rows],
        "notEvaluated": [str(gap) for gap in found.gaps],
    }


def fails(rows: Iterable[PoolRow], states: Collection[str]) -> bool:
    """Return whether a pool has a problem, or a device is in one of these states."""
    return any(
        ("problem" in states and each.problem) or any(each.numbers.get(one) for one in states)
        for each in rows
    )


def show(rows: Sequence[PoolRow], found: Gathered, output: Output, *, wide: bool) -> None:
    """Print the pools, or each of their devices."""
    if not rows:
        output.line("No ResourceSlice publishes a device.")
    else:
        show_rows(rows, output, wide=wide)
    output.lines("Not evaluated", (str(gap) for gap in found.gaps))


def show_rows(rows: Sequence[PoolRow], output: Output, *, wide: bool) -> None:
    """Print a table of pools, or of their devices."""
    if wide:
        output.table(_DEVICE, [_device_cells(pool, each) for pool in rows for each in pool.devices])
    else:
        output.table(_POOL, [_pool_cells(each) for each in rows])


def _pool_cells(pool: PoolRow) -> list[str]:
    numbers = (len(pool.devices), *pool.numbers.values())
    holders = shortened([named(claim) for claim in pool.holders()])
    shared = sum(any(one.has_rest for one in each.left) for each in pool.devices)
    state = f"{pool.state}, {shared} with shares left" if shared else pool.state
    return [*pool.identity, pool.node, *map(str, numbers), state, holders]


def _device_cells(pool: PoolRow, device: DeviceRow) -> list[str]:
    taints, claims = ", ".join(device.taints), ", ".join(map(named, device.claims))
    return [*pool.identity, pool.node, device.name, words_of_state(device), taints, claims]


def words_of_state(device: DeviceRow) -> str:
    """Return a device's state with its detail."""
    left = [f"{each.name}: {each} left" for each in device.left]
    detail = "; ".join(filter(None, (device.detail, *left)))
    return f"{device.state} ({detail})" if detail else device.state


def pods_cell(users: Iterable[str]) -> str:
    """Return a claim's users for a table cell. Pods are shown by name only."""
    return ", ".join(each.removeprefix("pod ") for each in users)


def share_of(claim: ClaimFacts, device: DeviceID) -> dict[str, str]:
    """Return how much of each capacity of a shared device a claim consumes."""
    return {
        name: quantity_text(amount)
        for name, amount in (consumed_of(device, claim.shares) or {}).items()
    }


def named(claim: ClaimFacts) -> str:
    """Return a claim's namespace and name."""
    return f"{claim.namespace}/{claim.name}"


def pool_body(pool: PoolRow) -> dict[str, Any]:
    """Return a pool as JSON."""
    return {
        "driver": pool.identity.driver,
        "pool": pool.identity.pool,
        "node": pool.node,
        "state": pool.state,
        "generation": pool.generation,
        "slices": {"published": pool.slices, "expected": pool.expected},
        "count": len(pool.devices),
        **pool.numbers,
        "devices": [device_body(each) for each in pool.devices],
    }


def device_body(device: DeviceRow) -> dict[str, Any]:
    """Return a device as JSON."""
    return {
        "name": device.name,
        "state": device.state,
        "detail": device.detail,
        "left": {each.name: quantity_text(each.amount) for each in device.left},
        "taints": list(device.taints),
        "claims": [named(claim) for claim in device.claims],
    }
