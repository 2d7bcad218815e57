"""
``kubectl drakit devices NAME`` for one device: its attributes, its state, who set its taints, and
its users.

Does not depend on sessions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drakit_cli.kubectl.devices import (
    DeviceRow,
    PoolRow,
    device_body,
    named,
    pods_cell,
    share_of,
    words_of_state,
)
from drakit_cli.kubectl.gather import Gathered
from drakit_cli.kubectl.output import Output
from drakit_explain.model import ClaimFacts, DeviceID
from drakit_explain.pools import newest
from drakit_explain.reports import words_of
from drakit_formats.resource.objects import Object, child, children, text


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Everything that is known about a device."""

    pool: PoolRow
    row: DeviceRow
    slice: str
    """The name of the ResourceSlice that publishes the device, or an empty string."""

    attributes: Mapping[str, str]
    capacity: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...]
    """The taints, each with its key, value, effect, time and author."""

    words: str
    """The message of the driver, if the device is unhealthy."""

    found: Gathered

    @property
    def identity(self) -> DeviceID:
        return DeviceID(*self.pool.identity, self.row.name)

    def body(self) -> dict[str, Any]:
        """Return the device as JSON."""
        return {
            "driver": self.identity.driver,
            "pool": self.identity.pool,
            "device": self.identity.device,
            "node": self.pool.node,
            "state": self.row.state,
            "detail": self.row.detail,
            "left": device_body(self.row)["left"],
            "message": self.words,
            "resourceSlice": self.slice,
            "attributes": dict(self.attributes),
            "capacity": dict(self.capacity),
            "taints": [dict(each) for each in self.taints],
            "usedBy": [_use(claim, self.identity) for claim in users(self.identity, self.found)],
            "notEvaluated": [str(gap) for gap in self.found.gaps],
        }

    def show(self, output: Output) -> None:
        """Print the device."""
        output.line(f"Device {'/'.join(self.identity)}", color="head")
        for key, value in (
            ("node", self.pool.node),
            ("state", words_of_state(self.row)),
            ("message", self.words),
            ("slice", self.slice or "none: its driver no longer lists it"),
        ):
            if value:
                output.line(f"{key}: {value}", indent=2)
        for head, values in (("Attributes", self.attributes), ("Capacity", self.capacity)):
            output.lines(head, (f"{key}: {value}" for key, value in values.items()))
        output.lines("Taints", map(_taint_line, self.taints))
        claims = users(self.identity, self.found)
        output.line()
        if claims:
            rows = [_use_cells(_use(each, self.identity)) for each in claims]
            output.table(("USED BY CLAIM", "PODS", "ACCESS"), rows)
        else:
            output.line("No claim uses it.")
        output.lines("Not evaluated", (str(gap) for gap in self.found.gaps))


def users(device: DeviceID, found: Gathered) -> list[ClaimFacts]:
    """Return the claims to which a device is allocated, including claims with admin access."""
    claims = found.world.of(ClaimFacts).values()
    using = [each for each in claims if any(one.device == device for one in each.results)]
    return sorted(using, key=named)


def slice_of(pool: PoolRow, row: DeviceRow, found: Gathered) -> str:
    """Return the name of the ResourceSlice that publishes a device, or an empty string."""
    for each in newest(found.world.slices_of_pool(pool.identity)):
        here = not pool.named or each.place is None or each.place.node in ("", pool.node)
        if here and row.name in each.devices.names:
            return each.name
    return ""


def describe(pool: PoolRow, row: DeviceRow, published: Object | None, found: Gathered) -> Device:
    """
    Return everything that is known about a device.

    :param published: the ResourceSlice from the API server. None if it cannot be read.
    """
    identity = DeviceID(*pool.identity, row.name)
    entries = children(published or {}, "spec", "devices")
    entry = next((each for each in entries if text(each, "name") == row.name), child({}))
    entry = child(entry, "basic") or entry  # only v1beta1 has the field ``basic``
    return Device(
        pool=pool,
        row=row,
        slice=slice_of(pool, row, found),
        attributes={
            name: _value_of(child(entry, "attributes", name))
            for name in sorted(child(entry, "attributes"))
        },
        capacity={
            name: text(entry, "capacity", name, "value")
            for name in sorted(child(entry, "capacity"))
        },
        taints=(*_own_taints(entry, identity), *_rule_taints(identity, found)),
        words=words_of(identity, found.world) or "",
        found=found,
    )


def _value_of(attribute: Object) -> str:
    """Return an attribute's value. The API has a separate field for each type."""
    values = [each for each in attribute.values() if each is not None]
    value = values[0] if values else ""
    return json.dumps(value) if isinstance(value, bool | list) else str(value)


def _own_taints(entry: Object, identity: DeviceID) -> Iterator[dict[str, str]]:
    for each in children(entry, "taints"):
        yield _taint(each, by=f"driver {identity.driver}", since=text(each, "timeAdded"))


def _rule_taints(identity: DeviceID, found: Gathered) -> Iterator[dict[str, str]]:
    for each in found.world.rules_of_pool(identity.of_pool):
        if each.selects(identity):
            taint = each.taint
            body = {"key": taint.key, "value": taint.value, "effect": taint.effect}
            yield _taint(body, by=f"DeviceTaintRule {each.name}")


def _taint(body: Object, *, by: str, since: str = "") -> dict[str, str]:
    found = {key: text(body, key) for key in ("key", "value", "effect")}
    return found | {"timeAdded": since, "addedBy": by}


def _taint_line(taint: Mapping[str, str]) -> str:
    value = f"={taint['value']}" if taint["value"] else ""
    since = f" since {taint['timeAdded']}" if taint["timeAdded"] else ""
    return f"{taint['key']}{value}:{taint['effect']}, added by {taint['addedBy']}{since}"


# ---------------------------------------------------------------- users


def _use(claim: ClaimFacts, device: DeviceID) -> dict[str, Any]:
    access = "admin"
    if device in claim.devices:
        access = "exclusive"
    elif any(each.device == device for each in claim.shares):
        access = "share"
    return {
        "namespace": claim.namespace,
        "claim": claim.name,
        "pods": sorted(claim.reserved_for),
        "users": claim.users,
        "access": access,
        "consumed": share_of(claim, device),
    }


def _use_cells(use: Mapping[str, Any]) -> list[str]:
    consumed = ", ".join(f"{name} {amount}" for name, amount in use["consumed"].items())
    access = f"{use['access']} ({consumed})" if consumed else use["access"]
    return [f"{use['namespace']}/{use['claim']}", pods_cell(use["users"]), access]
