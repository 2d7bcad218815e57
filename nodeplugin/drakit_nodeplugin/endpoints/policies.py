"""
The policies of one driver, between the host that reads them and the connection that applies them.

The host offers all valid policies. The connection applies the newest offer, and reports what the
driver did with it: the policies are in force, or the driver refused them and the previous ones
remain. A driver that restarts first gets the policies in force. Otherwise it would have none if it
refused the newest ones.

It also has the devices that claims hold, for the driver. The host reads the checkpoint every few
seconds; a device of a claim that a call has just prepared counts at once. Otherwise, another policy
could take the device, and its new name could be prepared for a second claim.

It is used in the daemon's loop only, except for `held`. It must not know the API server, files,
threads, or the content of a policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from drakit.driver import Policy

__all__ = ("AnyPolicies", "PolicyFeed")

STORED_SECONDS = 30.0
"""From a call that prepared claims until the checkpoint must list their devices, loop clock: the
time for two reads of it on a slow disk. A claim that is not stored by then has failed."""

AnyPolicies = Mapping[str, Policy[Any]]
"""Policies by name."""


class PolicyFeed:
    """The policies of one driver."""

    def __init__(self) -> None:
        self.in_force: AnyPolicies | None = None
        """The policies that the driver applied last; None if it has not applied any."""

        self.refusal: str | None = None
        """The reason why the driver refused the newest policies; None if it did not."""

        self.on_applied: Callable[[], None] | None = None
        """Called after each attempt to apply policies."""

        self._stored: frozenset[str] = frozenset()
        """Devices that claims hold according to the checkpoint."""
        self._prepared: Mapping[str, float] = {}
        """Devices that a call has prepared since then, and when they are released, loop clock."""
        self._offered: AnyPolicies | None = None
        self._changed = asyncio.Event()

    @property
    def held(self) -> frozenset[str]:
        """The names of the driver's devices that claims hold. The driver's thread reads it."""
        # In this order: a name moves from the first to the second.
        return frozenset(self._prepared) | self._stored

    def stored(self, names: Iterable[str]) -> None:
        """The checkpoint lists these devices as held."""
        self._stored = frozenset(names)
        self._prepared = {n: at for n, at in self._prepared.items() if n not in self._stored}

    def prepared(self, names: Iterable[str]) -> None:
        """A call has prepared claims with these devices."""
        loop = asyncio.get_running_loop()
        until = loop.time() + STORED_SECONDS
        # Also those that are stored: that may be an earlier claim, which was just released.
        self._prepared = {**self._prepared, **dict.fromkeys(names, until)}
        loop.call_at(until, self._expire, until)

    def _expire(self, until: float) -> None:
        self._prepared = {n: at for n, at in self._prepared.items() if at > until}

    @property
    def known(self) -> bool:
        """Whether there is something to apply, which may be no policies at all."""
        return self._offered is not None

    def offer(self, policies: AnyPolicies) -> None:
        """Offer these policies as the newest ones."""
        self._offered = policies
        self._changed.set()

    async def next(self, applied: AnyPolicies | None) -> AnyPolicies:
        """Wait for policies other than those that this connection has got last, and return them.
        A connection that has got none gets those in force first."""
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
        if self.on_applied is not None:
            self.on_applied()
