"""
Sources of devices, as the node plugin hosts them: where an endpoint comes from, and the diagnostics
that it reports, which become Events of the Node.

A plugin or driver that fails all the time, or under many names, must flood neither the log nor the
API server: :class:`Diagnostics` reports a sentence once a minute or once a day, and all sentences
at a rate that people can read.

Does not depend on how any kind of endpoint works, or on the receiver of a diagnostic.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from drakit_daemon.rate_limiter import RateLimiter
from drakit_driver.runtime.contract import DriverTraits, EndpointContext, HostedEndpoint
from drakit_nodeplugin.reasons import NodeReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostContext(EndpointContext):
    """The parameters that the node plugin gives an endpoint."""

    report: Callable[[Diagnostic], None]
    """Reports a diagnostic; returns at once."""


class DriverSource(Protocol):
    """The source of a hosted driver's devices."""

    @property
    def name(self) -> str:
        """The driver's name."""
        ...

    @property
    def where(self) -> str:
        """The file and key of its configuration, or another origin, for errors."""
        ...

    @property
    def traits(self) -> DriverTraits:
        """The calls that it needs; also known while it is stopped."""
        ...

    @property
    def expected(self) -> Collection[str]:
        """The endpoints that are expected from the start; others may come."""
        ...

    @property
    def foreign(self) -> bool:
        """Whether its devices come from other processes. The node plugin is then ready without
        them, because it cannot start those processes."""
        ...

    def endpoint(self, context: HostContext) -> HostedEndpoint:
        """Make the endpoint, in the daemon's loop. Called again after the one before was closed, if
        this instance of the plugin is active again."""
        ...


# ---------------------------------------------------------------- diagnostics


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostic:
    """A problem of an endpoint that users must know: it becomes a log line and an Event of the
    Node, and is counted by its reason."""

    reason: NodeReason
    """The reason of the Event."""

    note: str
    """A sentence that names endpoint, cause and remedy; the same cause gives the same text."""

    source: str = ""
    """The driver or the entry that it is about, if the reporter has several: none of them may use
    up the Events of the others."""


REPEAT_SECONDS = 60.0
"""Minimum time between two reports of the same sentence."""

ONCE_SECONDS = 86_400.0
"""Minimum time between two reports of a condition that lasts until the plugin changes."""

MAX_REMEMBERED = 256
"""Different sentences that are remembered; the oldest is forgotten first."""

BURST = 50.0
SECONDS_EACH = 5.0
"""The burst of diagnostics, and the seconds per diagnostic after it; others are dropped."""


class Diagnostics:
    """Deduplicates and limits the diagnostics of one source."""

    def __init__(self, report: Callable[[Diagnostic], None], *, source: str = "") -> None:
        self._report = report
        self._source = source
        self._quiet_until: dict[Diagnostic, float] = {}
        """The time until which a diagnostic is not repeated; loop time."""
        self._limiter = RateLimiter(burst=BURST, per_second=1 / SECONDS_EACH)
        self._dropping = False

    def report(self, reason: NodeReason, note: str, *, once: bool = False) -> None:
        """Report a sentence, unless it was reported a moment ago."""
        now = asyncio.get_running_loop().time()
        diagnostic = Diagnostic(reason=reason, note=note, source=self._source)
        if now < self._quiet_until.get(diagnostic, -math.inf) or not self._within_limit():
            return
        self._quiet_until.pop(diagnostic, None)
        self._quiet_until[diagnostic] = now + (ONCE_SECONDS if once else REPEAT_SECONDS)
        if len(self._quiet_until) > MAX_REMEMBERED:
            del self._quiet_until[next(iter(self._quiet_until))]
        self._report(diagnostic)

    def _within_limit(self) -> bool:
        within = self._limiter.take()
        if not within and not self._dropping:
            logger.warning("too many diagnostics of device plugins; some are dropped")
        self._dropping = not within
        return within
