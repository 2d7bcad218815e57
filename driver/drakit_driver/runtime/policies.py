"""
Passes the policies of one driver from the host that reads them to the connection that applies them.

The host offers all valid policies. The connection applies the newest offer, and reports the
outcome: the policies are in effect, or the driver refused them and the previous ones remain. After
a restart, a driver first gets the policies in effect: if it got only the newest policies and
refused them, it would run without policies.

The feed also provides the driver with the devices that claims hold, including the claims and the
device numbers. The host reads the checkpoint only every few seconds, so the results of a prepare
are recorded immediately. Otherwise, another policy could take over the device, and a second claim
could be prepared with the device under its new name.

Use the feed only in the daemon's loop, except for `held`. The module does not depend on the API
server, files or threads.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, cast

from pydantic import ValidationError

from drakit.device import (
    AllocatedClaim,
    ClaimReference,
    DeviceNode,
    Edits,
    HeldDevice,
    HeldNode,
    PreparedDevice,
)
from drakit.driver import DevicePolicy, Policy
from drakit.settings import describe
from drakit_driver.runtime.failures import kind_and_text, text_of
from drakit_formats.resource.nodes import device_place

STORED_SECONDS = 30.0
"""Maximum time from a prepare call until the checkpoint lists the claim's devices: two reads of the
checkpoint on a slow disk. A claim that is not stored by then has failed."""

AnyPolicies = Mapping[str, Policy[Any]]
"""Policies, keyed by name. The spec of a policy for a backend is the JSON object itself."""


HeldClaims = Mapping[str, Mapping[ClaimReference, HeldDevice]]
"""The claims that hold each device, with the part of the device that each of them holds. The key of
a device in a named pool is ``pool/name``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """A device that a call has prepared for a claim."""

    held: HeldDevice
    until: float
    """The time until which the device is treated as held without being stored (loop clock)."""


# ---------------------------------------------------------------- reading

MAX_SPEC_BYTES = 64 * 1024
"""Maximum size of a policy spec, as JSON."""

MAX_PROBLEM = 1024
"""Maximum length of a problem message."""


class InvalidPolicyError(Exception):
    """A policy is invalid. The message names the field and the reason."""


def read_policy(
    kind: type[DevicePolicy] | None,
    *,
    name: str,
    created: datetime,
    generation: int,
    spec: Mapping[str, Any] | None,
) -> Policy[Any]:
    """
    Validate a policy. Raises :class:`InvalidPolicyError`. Runs the vendor's code, and may block.

    If `kind` is None, the spec is returned unchanged.
    """
    try:
        if spec is None:
            raise ValueError("spec: it is missing, or too large to be read")
        size = len(json.dumps(spec, separators=(",", ":"), ensure_ascii=False).encode())
        if size > MAX_SPEC_BYTES:
            raise ValueError(f"spec: it has {size} bytes, and at most {MAX_SPEC_BYTES} are allowed")
        checked: Any = dict(spec)
        if kind is not None:
            # Accept only aliases, as in manifests, because a field with two names could be set
            # twice.
            checked = kind.model_validate(checked, by_alias=True, by_name=False)
    except ValidationError as error:
        lines = describe(error, file="", below="spec").splitlines()
        problem = "; ".join(line.removeprefix(": ") for line in lines)
    except ValueError as error:
        problem = text_of(error)
    except Exception as error:  # the vendor's validator may raise anything
        problem = f"spec: the driver fails to read it: {kind_and_text(error)}"
    else:
        return Policy(name=name, created=created, generation=generation, spec=checked)
    raise InvalidPolicyError(problem[:MAX_PROBLEM])


# ---------------------------------------------------------------- the feed


class PolicyFeed:
    """The policies of one driver."""

    def __init__(self) -> None:
        self.in_force: AnyPolicies | None = None
        """The policies that the driver last applied. None if it has not applied any."""

        self.refusal: str | None = None
        """The reason why the driver refused the newest policies, or None."""

        self.on_applied: Callable[[], None] | None = None
        """Called after each attempt to apply policies."""

        self.on_connected: Callable[[], None] | None = None
        """Called when a new connection begins to apply policies."""

        self.on_invalid: Callable[[AnyPolicies, Mapping[str, str]], None] | None = None
        """Called when a backend has found some of the offered policies invalid, with the offered
        policies and the problems, keyed by name. The callback must offer other policies."""

        self.held_changed = asyncio.Event()
        """Set when the held devices change. Cleared by its only user."""

        self._reported: AnyPolicies | None = None
        """The policies that the driver last reported as applied or refused."""
        self._news_of_report = asyncio.Event()
        self._stored: HeldClaims = {}
        """Devices that claims hold according to the checkpoint."""
        self._prepared: Mapping[tuple[str, ClaimReference], _Prepared] = {}
        """Devices that calls have prepared for claims since the checkpoint was last read."""
        self._unreadable = False
        """Whether the last read of the checkpoint failed."""
        self._offered: AnyPolicies | None = None
        self._changed = asyncio.Event()

    def held(self) -> Mapping[str, HeldDevice]:
        """Return the driver's devices that claims hold. Can be called in the driver's thread."""
        return {
            name: _merged(of_device.values())
            for name, of_device in self.held_claims().items()
            if of_device
        }

    def held_claims(self) -> HeldClaims:
        """Return the claims that hold each device. Can be called in the driver's thread."""
        # Read `_prepared` first, because a device moves from there to `_stored`.
        prepared, stored = self._prepared, self._stored
        claims = {name: dict(of_device) for name, of_device in stored.items()}
        for (name, claim), each in prepared.items():
            of_device = claims.setdefault(name, {})
            stored_nodes = of_device[claim].nodes if claim in of_device else ()
            of_device[claim] = replace(each.held, nodes=_renewed(each.held.nodes, stored_nodes))
        return claims

    def stored(self, held: HeldClaims) -> None:
        """Record that the checkpoint lists these devices, with the claims that hold them."""
        self._stored = held
        self._unreadable = False
        self._prepared = {
            key: each
            for key, each in self._prepared.items()
            if not _is_stored(each, held.get(key[0], {}).get(key[1]))
        }
        self._expire(asyncio.get_running_loop().time())
        self.held_changed.set()

    def unreadable(self) -> None:
        """Record that the checkpoint cannot be read. Until it can be read again, all held devices
        remain held."""
        self._unreadable = True

    def prepared(self, claim: ClaimReference, device: str, held: HeldDevice) -> None:
        """Record that a call has prepared a device for a claim, with these current nodes."""
        loop = asyncio.get_running_loop()
        until = loop.time() + STORED_SECONDS
        # Record the device even if the claim is stored, because its nodes may have changed.
        each = _Prepared(held=held, until=until)
        self._prepared = {**self._prepared, (device, claim): each}
        self.held_changed.set()
        loop.call_at(until, self._expire, until)

    def prepared_claims(
        self,
        batch: Iterable[AllocatedClaim],
        results: Mapping[str, Sequence[PreparedDevice] | Exception],
    ) -> None:
        """Record that a call has prepared claims, with these results, keyed by UID."""
        for item in batch:
            result = results.get(item.claim.uid)
            if result is None or isinstance(result, Exception):
                continue
            held: dict[str, list[HeldDevice]] = {}
            for device, each in zip(item.devices, result, strict=False):
                nodes = () if device.admin_access else held_nodes(each.edits)
                shares = () if device.share_id is None else (device.consumed_capacity,)
                held.setdefault(device_place(device.pool, device.name), []).append(
                    HeldDevice(claims=(item.claim,), nodes=nodes, shares=shares)
                )
            for place, devices in held.items():
                self.prepared(item.claim, place, _merged(devices))

    def _expire(self, until: float) -> None:
        if not self._unreadable:
            self._prepared = {k: each for k, each in self._prepared.items() if each.until > until}
            self.held_changed.set()

    @property
    def known(self) -> bool:
        """Whether policies have been offered, possibly an empty set."""
        return self._offered is not None

    def offer(self, policies: AnyPolicies) -> None:
        """Offer these policies as the newest policies."""
        self._offered = policies
        self._changed.set()

    async def next(self, applied: AnyPolicies | None) -> AnyPolicies:
        """Wait until there are policies other than `applied`, which this connection got last, and
        return them. A new connection first gets the policies in effect."""
        while True:
            if applied is None and self.in_force is not None:
                return self.in_force
            if self._offered is not None and self._offered is not applied:
                return self._offered
            self._changed.clear()
            await self._changed.wait()

    def report(self, policies: AnyPolicies, refusal: str | None) -> None:
        """Record that the driver has applied, or refused, policies that :meth:`next` returned."""
        if refusal is None:
            self.in_force = policies
        if refusal is not None or policies is self._offered:
            self.refusal = refusal
        self._reported = policies
        self._news_of_report.set()
        if self.on_applied is not None:
            self.on_applied()

    def connected(self) -> None:
        """Record that a new connection begins to apply policies."""
        if self.on_connected is not None:
            self.on_connected()

    def invalid(self, policies: AnyPolicies, problems: Mapping[str, str]) -> None:
        """Record that some policies are invalid, so the driver applied none of the policies."""
        if self.on_invalid is not None:
            self.on_invalid(policies, problems)

    async def result(self, policies: AnyPolicies) -> str | None:
        """Wait until these policies, which are the newest, are applied or refused. Return the
        reason for a refusal."""
        while self._reported is not policies:
            self._news_of_report.clear()
            await self._news_of_report.wait()
        return self.refusal

    @property
    def stop_reason(self) -> str | None:
        """The reason why a driver that has not listed any devices is still waiting. None if it is
        not waiting for policies."""
        if not self.known:
            return (
                "its policies are unknown: the API server has not responded yet, and this node has "
                "no copy of them"
            )
        return None if self.refusal is None else f"it refuses its policies: {self.refusal}"


def held_nodes(edits: Edits) -> tuple[HeldNode, ...]:
    """Return the device nodes in edits that have an identity. If the edits have a wrong type,
    return no nodes, because CDI validation rejects such edits later."""
    given = cast("object", edits.device_nodes)
    nodes = cast("tuple[object, ...]", given) if isinstance(given, tuple | list) else ()
    return tuple(
        [
            HeldNode(type=node.type, major=node.major, minor=node.minor, identity=node.identity)
            for node in nodes
            if isinstance(node, DeviceNode)
            and isinstance(node.identity, str)
            and isinstance(node.type, str)
            and isinstance(node.major, int)
            and isinstance(node.minor, int)
        ]
    )


def _is_stored(prepared: _Prepared, stored: HeldDevice | None) -> bool:
    return stored is not None and frozenset(prepared.held.nodes) == frozenset(
        node for node in stored.nodes if node.current
    )


def _renewed(nodes: Iterable[HeldNode], stored: Iterable[HeldNode]) -> tuple[HeldNode, ...]:
    """Return the nodes of a claim that was prepared again. The stored nodes are included as not
    current, because running containers can still use them."""
    current = dict.fromkeys(nodes)
    former = [replace(node, current=False) for node in stored if node not in current]
    return (*current, *(node for node in former if replace(node, current=True) not in current))


def _merged(devices: Collection[HeldDevice]) -> HeldDevice:
    nodes = dict.fromkeys(node for each in devices for node in each.nodes)
    return HeldDevice(
        claims=tuple(dict.fromkeys(claim for each in devices for claim in each.claims)),
        # If a node is current for any claim, omit its outdated entries.
        nodes=tuple(n for n in nodes if n.current or replace(n, current=True) not in nodes),
        shares=tuple(share for each in devices for share in each.shares),
    )
