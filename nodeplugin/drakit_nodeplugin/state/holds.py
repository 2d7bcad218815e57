"""
Holds: the devices and hardware that each claim holds, and whether further claims fit alongside
them.

A device is held by one claim exclusively, or by any number of shares, never both. Admin access is
possible in addition to either, and does not consume anything. In addition, claims together must not
exceed the counter sets that their devices consume, nor the capacity that their shares consume.
Therefore, devices that consume from the same counters, and shares of one device, can conflict
although they are different devices or shares. A device consumes its counters once, regardless of
the number of claims that share it. Amounts are integers (:func:`.quantity_units`), so that sums are
exact.

The limits are taken from the main inventory. Each decision is made in the transaction that writes
it, so it is valid across processes. :mod:`.rows` decides when to write rows.

Functions that take a connection block. The others are pure. The module does not depend on
generations, bodies or taints.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from drakit.device import Capacity, CounterSet, Device
from drakit.quantity import quantity_units
from drakit_nodeplugin.state.records import StoredClaim, StoredDevice

# ---------------------------------------------------------------- hardware

Amounts = Mapping[str, int]
"""Amounts in billionths, keyed by counter or capacity name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolContent:
    """An endpoint's validated inventory for a pool. Immutable."""

    devices: Mapping[str, Device]
    counter_sets: tuple[CounterSet, ...] = ()
    fallback: Mapping[str, Device] | None = None
    ordered: bool = False
    """See `Inventory.ordered`."""

    partition_type_attribute: str = ""

    def device(self, name: str) -> Device | None:
        """Return a device in the main inventory, even if the fallback is published, or a device
        that only the fallback contains."""
        found = self.devices.get(name)
        return found if found is not None or self.fallback is None else self.fallback.get(name)

    def totals(self, counter_set: str) -> Amounts:
        """Return the total amounts of a counter set. Empty if the counter set does not exist."""
        for each in self.counter_sets:
            if each.name == counter_set:
                return units_of(each.counters)
        return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The main inventories of a driver at one point in time. Can be read from other threads."""

    pools: Mapping[str, PoolContent] = field(default_factory=dict[str, PoolContent])
    """The pools, keyed by API name, except pools of stopped endpoints."""

    def device(self, pool: str, name: str) -> Device | None:
        """Return a device, or None if no endpoint lists it."""
        content = self.pools.get(pool)
        return None if content is None else content.device(name)

    def totals(self, pool: str, counter_set: str) -> Amounts:
        """Return the total amounts of a counter set."""
        content = self.pools.get(pool)
        return {} if content is None else content.totals(counter_set)

    def capacity(self, pool: str, name: str) -> Amounts:
        """Return the shareable capacity of a device."""
        found = self.device(pool, name)
        return {} if found is None else _capacity(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldDevice:
    """The holds on one device, not counting admin access."""

    pool: str
    """The API name of the pool."""
    device: str
    consumes: Mapping[str, Amounts] | None
    """The consumption of the device, keyed by counter set. None if no inventory has listed the
    device since a rebuild."""

    shared: Amounts | None = field(default_factory=dict[str, int])
    """The capacity that all shares consume in total. None if the consumption of any share is
    unknown."""

    exclusive: bool = True
    """Whether one claim holds the device exclusively. Meaningful only if `unpreparing` is set."""

    unpreparing: bool = False
    """Whether a claim that is still being unprepared holds the device."""


def units_of(quantities: Mapping[str, str]) -> Amounts:
    """Return quantities as integers. Raises ValueError for an invalid quantity."""
    return {name: quantity_units(text) for name, text in quantities.items()}


def blocked_by_held(content: PoolContent, held: Collection[str]) -> frozenset[str]:
    """Return the devices of a pool that no claim holds, but for which the held devices leave too
    little of a counter set."""
    used: dict[str, dict[str, int]] = {}
    for name in held:
        device = content.device(name)
        if device is None:
            continue
        for counter_set, counters in device.consumes.items():
            _add(used.setdefault(counter_set, {}), units_of(counters))
    totals = {name: content.totals(name) for name in used}
    return frozenset(
        name
        for name, device in content.devices.items()
        if name not in held
        and any(
            _exceeds(used[counter_set], units_of(counters), totals[counter_set])
            for counter_set, counters in device.consumes.items()
            if counter_set in used
        )
    )


def blocked_by_unpreparing(
    content: PoolContent | None, held: Collection[HeldDevice]
) -> frozenset[str]:
    """
    Return the devices of a pool that unpreparing claims block for new claims.

    These are the devices that such claims hold exclusively, and all other devices that do not fit
    alongside the holds. The scheduler no longer sees such claims, and considers their devices free.
    """
    leaving = [each for each in held if each.unpreparing]
    names = {each.device for each in leaving if each.exclusive}
    if content is None or not leaving:
        return frozenset(names)
    names |= {each.device for each in leaving if not each.exclusive and _is_full(each, content)}
    consumed = {each.device: _consumed(each, content) for each in held}
    unknown = any(consumed[each.device] is None for each in leaving)
    wanted = {name for each in leaving for name in consumed[each.device] or ()}
    used: dict[str, dict[str, int]] = {name: {} for name in wanted}
    for counters in consumed.values():
        for counter_set in wanted & (counters or {}).keys():
            _add(used[counter_set], (counters or {})[counter_set])
    totals = {name: content.totals(name) for name in wanted}
    for name, device in content.devices.items():
        if not device.consumes or name in consumed:
            continue
        if unknown or any(
            _exceeds(used[counter_set], units_of(counters), totals[counter_set])
            for counter_set, counters in device.consumes.items()
            if counter_set in wanted
        ):
            names.add(name)
    return frozenset(names)


def _consumed(held: HeldDevice, content: PoolContent) -> Mapping[str, Amounts] | None:
    if held.consumes is not None:
        return held.consumes
    device = content.device(held.device)
    if device is None:
        return None
    return {name: units_of(counters) for name, counters in device.consumes.items()}


def _is_full(held: HeldDevice, content: PoolContent) -> bool:
    """Return whether not even the smallest share fits alongside the held shares."""
    device = content.device(held.device)
    if device is None:
        return False
    if held.shared is None:
        return bool(device.capacity)
    least = {name: _least(capacity) for name, capacity in device.capacity.items()}
    return _exceeds(held.shared, least, _capacity(device))


def _least(capacity: str | Capacity) -> int:
    """Return the smallest amount of a capacity that a share consumes. For a capacity without a
    request policy, return the whole capacity, although claims can request any amount of it."""
    if isinstance(capacity, str):
        return quantity_units(capacity)
    if capacity.valid_range is not None:
        return quantity_units(capacity.valid_range.min)
    if capacity.valid_values:
        return quantity_units(capacity.valid_values[0])
    # If a policy has only a default, claims can request any amount, and the smallest is one unit.
    return quantity_units(capacity.value) if capacity.default is None else 1


def _capacity(device: Device) -> Amounts:
    return units_of(
        {
            name: amount.value if isinstance(amount, Capacity) else amount
            for name, amount in device.capacity.items()
        }
    )


def _exceeds(used: Amounts, wanted: Amounts, limit: Amounts) -> bool:
    return any(
        amount > 0 and used.get(name, 0) + amount > limit.get(name, 0)
        for name, amount in wanted.items()
    )


# ---------------------------------------------------------------- rows

HeldAs = tuple[str, str, str, str]
"""A row of the devices table, without the claim: pool, device, hold, and the consumption of a
share."""

TakenFrom = tuple[str, str, str, str]
"""A row of the counters table, without the claim: pool, counter set, device, and consumption. The
counter set is empty if the counter sets of the device are unknown."""

UNKNOWN = "?"
"""Stands for the consumption of a share whose row was rebuilt only from the kubelet's list."""

_CHUNK = 500
"""Maximum number of devices per SQL statement."""

# SQLite uses a partial index only if the query repeats the index condition literally.
_HELD = (
    "WITH wanted (pool, device) AS (VALUES {}) SELECT * FROM wanted WHERE EXISTS (SELECT 1 FROM "
    "devices AS held WHERE held.pool = wanted.pool AND held.device = wanted.device AND held.hold = "
    "'exclusive') OR EXISTS (SELECT 1 FROM devices AS held WHERE held.pool = wanted.pool AND "
    "held.device = wanted.device AND held.hold = 'share')"
)

_HOLDER = (
    "SELECT min(claim) FROM devices WHERE pool = ? AND device = ? AND claim <> ? AND hold = '{}'"
)

# Thousands of claims can share a device, so group those with equal consumption.
_SHARES = (
    "SELECT ?2, amounts, count(*), min(claim) FROM devices "
    "WHERE pool = ?1 AND device = ?2 AND hold = 'share' AND claim <> ?3 GROUP BY amounts"
)

# A device consumes its counters once, however many claims share it.
_COUNTERS = (
    "SELECT device, amounts, count(DISTINCT device), min(claim) FROM counters "
    "WHERE pool = ? AND counter_set = ? AND claim <> ? AND device NOT IN ({}) GROUP BY amounts"
)

_Group = tuple[str, Amounts, int, int]
"""A group of holds with equal amounts: the device of the oldest hold, the amounts, the number of
holds, and the row of the oldest claim."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A device that a claim in a batch cannot get, with the reason."""

    device: StoredDevice
    holder: StoredClaim | None
    """The conflicting claim. None if the claim itself exceeds the inventory."""

    beside: str = ""
    """The name of the holder's device. Empty if `holder` is None."""

    shortage: str | None = None
    """The reason why the two devices do not fit together, as a clause. None if both claims want the
    same device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """All rows except that of the claim in question."""

    connection: sqlite3.Connection
    row: int
    """The ID of the claim's own row, which is excluded."""

    claim: Callable[[int], StoredClaim]
    """Loads the claim of a row."""


def refusal(claim: StoredClaim, rest: Rest, *, hardware: Hardware | None) -> Held | None:
    """
    Return the reason why a claim conflicts with other rows, or None.

    If `hardware` is None, devices are compared only by name.
    """
    holding = [device for device in claim.devices if device.hold != "admin"]
    for device in holding:
        if (holder := _holder(device, rest)) is not None:
            return Held(device=device, holder=rest.claim(holder), beside=device.device)
    if hardware is None:
        return None
    return _too_few_counters(holding, rest, hardware) or _too_little_capacity(
        holding, rest, hardware
    )


def contested(connection: sqlite3.Connection, claims: Collection[StoredClaim]) -> set[str]:
    """
    Return the UIDs of claims that must be passed to :func:`refusal`.

    The other claims cannot be refused: no other row, and no other claim among these, has one of
    their devices, and they consume only whole devices.
    """
    doubtful: set[str] = set()
    wanted: dict[tuple[str, str], str] = {}
    """The UID of one claim that wants each device."""
    for claim in claims:
        for device in claim.devices:
            if device.hold == "admin":
                continue
            if device.hold == "share" or device.consumes:
                doubtful.add(claim.uid)
            if (other := wanted.setdefault(_key(device), claim.uid)) != claim.uid:
                doubtful |= {claim.uid, other}
    names = [key for key, uid in wanted.items() if uid not in doubtful]
    for start in range(0, len(names), _CHUNK):
        chunk = names[start : start + _CHUNK]
        query = _HELD.format(",".join(["(?, ?)"] * len(chunk)))
        for key in connection.execute(query, [text for name in chunk for text in name]):
            doubtful.add(wanted[key])
    return doubtful


def devices_of(claim: StoredClaim) -> frozenset[HeldAs]:
    """Return a claim's devices as stored in the index."""
    shares: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for device in claim.devices:
        if device.hold == "share":
            _add(shares[device.pool, device.device], units_of(device.consumed_capacity))
    listed = claim.rebuilt == "listed"
    texts = {key: UNKNOWN if listed else _text(amounts) for key, amounts in shares.items()}
    return frozenset(
        (d.pool, d.device, d.hold, texts[d.pool, d.device] if d.hold == "share" else "")
        for d in claim.devices
    )


def counters_of(claim: StoredClaim) -> frozenset[TakenFrom]:
    """Return a claim's consumption of counter sets as stored in the index."""
    found: set[TakenFrom] = set()
    for device in claim.devices:
        if device.hold == "admin":
            continue
        if device.consumes is None:
            found.add((device.pool, "", device.device, UNKNOWN))
            continue
        for counter_set, quantities in device.consumes.items():
            text = _text(units_of(quantities))
            found.add((device.pool, counter_set, device.device, text))
    return frozenset(found)


def incomplete(connection: sqlite3.Connection, claims: Iterable[StoredClaim]) -> set[str]:
    """Return the UIDs of claims with unknown consumption that can affect these claims."""
    pools = {device.pool for claim in claims for device in claim.devices if device.consumes}
    query = (
        "SELECT uid FROM counters CROSS JOIN claims ON claims.id = counters.claim "
        "WHERE pool = ? AND counter_set = ''"
    )
    return {uid for pool in pools for (uid,) in connection.execute(query, (pool,))}


def held_devices(connection: sqlite3.Connection) -> Mapping[str, frozenset[str]]:
    """Return the names of all devices that rows hold, keyed by pool. Admin access holds nothing."""
    found: dict[str, set[str]] = defaultdict(set)
    query = "SELECT DISTINCT pool, device FROM devices WHERE hold <> 'admin'"
    for pool, device in connection.execute(query):
        found[pool].add(device)
    return {pool: frozenset(names) for pool, names in found.items()}


def held_beside_unpreparing(connection: sqlite3.Connection) -> list[HeldDevice]:
    """
    Return the holds of claims that are being unprepared, and of other claims that consume counters
    in the same pools.

    Admin access is ignored. The result is empty while no claim is being unprepared.
    """
    leaving: dict[tuple[str, str], set[str]] = defaultdict(set)
    for pool, device, hold in connection.execute(
        "SELECT pool, device, hold FROM claims CROSS JOIN devices ON devices.claim = claims.id "
        "WHERE state = 'unpreparing' AND hold <> 'admin'"
    ):
        leaving[pool, device].add(hold)
    consumed: dict[tuple[str, str], dict[str, Amounts] | None] = {}
    for each in {pool for pool, _ in leaving}:
        # Unknown consumption comes last, so that it overrides the values from other rows of the
        # device.
        for device, counter_set, text in connection.execute(
            "SELECT DISTINCT device, counter_set, amounts FROM counters WHERE pool = ? "
            "ORDER BY counter_set DESC",
            (each,),
        ):
            if counter_set == "":
                consumed[each, device] = None
            elif (known := consumed.setdefault((each, device), {})) is not None:
                known[counter_set] = _amounts(text)
    return [
        HeldDevice(
            pool=pool,
            device=device,
            consumes=consumed.get((pool, device), {}),
            shared=_shared(connection, pool, device) if (pool, device) in leaving else {},
            exclusive="share" not in leaving.get((pool, device), ()),
            unpreparing=(pool, device) in leaving,
        )
        for pool, device in sorted(consumed.keys() | leaving.keys())
    ]


def _shared(connection: sqlite3.Connection, pool: str, device: str) -> Amounts | None:
    """Return the capacity that all shares of a device consume, or None if it is unknown for any
    share."""
    total: dict[str, int] = {}
    for _, text, number, _ in connection.execute(_SHARES, (pool, device, 0)):
        if text == UNKNOWN:
            return None
        _add(total, _amounts(text), times=number)
    return total


# ---------------------------------------------------------------- refusals


def _holder(device: StoredDevice, rest: Rest) -> int | None:
    """Return the row of a claim that conflicts with this hold on the device itself, if any."""
    # Shares do not exclude each other, so don't read other shares, of which there may be thousands.
    for hold in ("exclusive", "share") if device.hold == "exclusive" else ("exclusive",):
        # SQLite uses a partial index only if the query repeats the index condition literally.
        query = _HOLDER.format(hold)
        key = (device.pool, device.device, rest.row)
        (holder,) = rest.connection.execute(query, key).fetchone()
        if holder is not None:
            return holder
    return None


def _too_few_counters(
    holding: Iterable[StoredDevice], rest: Rest, hardware: Hardware
) -> Held | None:
    wanted: dict[tuple[str, str], dict[str, StoredDevice]] = defaultdict(dict)
    for device in holding:
        for counter_set in device.consumes or ():
            wanted[device.pool, counter_set][device.device] = device
    for (pool, counter_set), devices in wanted.items():
        own: dict[str, int] = {}
        for device in devices.values():
            _add(own, units_of((device.consumes or {})[counter_set]))
        one = next(iter(devices.values()))
        unknown = (pool, "", rest.row)
        for name, _, _, holder in rest.connection.execute(_COUNTERS.format(""), unknown):
            shortage = (
                f"the driver does not list device {name}, so the counters that this device "
                "consumes are unknown"
            )
            return Held(device=one, holder=rest.claim(holder), beside=name, shortage=shortage)
        query = _COUNTERS.format(",".join("?" * len(devices)))
        others = _groups(rest.connection.execute(query, (pool, counter_set, rest.row, *devices)))
        limit = hardware.totals(pool, counter_set)
        if (counter := _exceeded(own, others, limit)) is not None:
            of = f"{counter} of counter set {counter_set}"
            return _shortage(one, counter, own, others, limit, of=of, rest=rest)
    return None


def _too_little_capacity(
    holding: Iterable[StoredDevice], rest: Rest, hardware: Hardware
) -> Held | None:
    wanted: dict[tuple[str, str], list[StoredDevice]] = defaultdict(list)
    for device in holding:
        # Skip unlisted devices: they are in use, so their capacity is already held.
        if device.hold == "share" and hardware.device(*_key(device)) is not None:
            wanted[_key(device)].append(device)
    for key, shares in wanted.items():
        own: dict[str, int] = {}
        for share in shares:
            _add(own, units_of(share.consumed_capacity))
        if not own:
            continue  # a share that consumes nothing fits alongside any others
        limit = hardware.capacity(*key)
        others = _groups(rest.connection.execute(_SHARES, (*key, rest.row)), unknown=limit)
        if (name := _exceeded(own, others, limit)) is not None:
            of = f"capacity {name}"
            return _shortage(shares[0], name, own, others, limit, of=of, rest=rest)
    return None


def _groups(
    rows: Iterable[tuple[str, str, int, int]], *, unknown: Amounts | None = None
) -> list[_Group]:
    return [
        (device, (unknown or {}) if text == UNKNOWN else _amounts(text), number, claim)
        for device, text, number, claim in rows
    ]


def _exceeded(own: Amounts, others: Iterable[_Group], limit: Amounts) -> str | None:
    """Return the name of a counter or capacity that would be exceeded, or None."""
    total = dict(own)
    for _, amounts, number, _ in others:
        _add(total, amounts, times=number)
    wanted = (name for name, amount in own.items() if amount > 0)
    return min((name for name in wanted if total[name] > limit.get(name, 0)), default=None)


def _shortage(
    device: StoredDevice,
    name: str,
    own: Amounts,
    others: Iterable[_Group],
    limit: Amounts,
    *,
    of: str,
    rest: Rest,
) -> Held:
    """Return the conflict with the largest holder, because releasing it frees the most. If several
    are equally large, choose the oldest."""
    if own[name] > limit.get(name, 0):
        shortage = f"the claim requires more {of} than the driver provides"
        return Held(device=device, holder=None, shortage=shortage)
    _, holder, held = min(
        (-amounts.get(name, 0), claim, held) for held, amounts, _, claim in others
    )
    holder_claim = rest.claim(holder)
    # Other holders may consume it as well.
    shortage = f"both consume {of}, and not enough is left"
    return Held(device=device, holder=holder_claim, beside=held, shortage=shortage)


# ---------------------------------------------------------------- amounts


def _add(total: dict[str, int], amounts: Amounts, *, times: int = 1) -> None:
    for name, amount in amounts.items():
        total[name] = total.get(name, 0) + amount * times


def _text(amounts: Amounts) -> str:
    """Serialize amounts so that equal amounts have equal strings, regardless of the quantity
    notation."""
    return json.dumps(sorted(amounts.items()), separators=(",", ":"))


def _amounts(text: str) -> Amounts:
    return dict(json.loads(text))


def _key(device: StoredDevice) -> tuple[str, str]:
    return device.pool, device.device
