"""
Device sources in the node plugin: where an endpoint comes from, and the diagnostics that it
reports, which become Events about the Node.

A plugin or driver that keeps failing, or uses many names, must not flood the log or the API server.
Therefore, :class:`Diagnostics` reports the same message at most once a minute or once a day, and
limits the total rate.
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
    """The parameters that the node plugin passes to an endpoint."""

    report: Callable[[Diagnostic], None]
    """Reports a diagnostic. Returns immediately."""


class DriverSource(Protocol):
    """The source of a hosted driver's devices."""

    @property
    def name(self) -> str:
        """The driver's name."""
        ...

    @property
    def where(self) -> str:
        """The origin of the driver for error messages, such as the file and key of its
        configuration."""
        ...

    @property
    def traits(self) -> DriverTraits:
        """The driver traits. Also available while the driver is stopped."""
        ...

    @property
    def expected(self) -> Collection[str]:
        """The names of the endpoints that are expected at startup. Others may appear."""
        ...

    @property
    def foreign(self) -> bool:
        """Whether the devices come from other processes. If so, the node plugin becomes ready
        without them, because it cannot start those processes."""
        ...

    def endpoint(self, context: HostContext) -> HostedEndpoint:
        """Create the endpoint, in the daemon's loop. Called again, after the previous endpoint was
        closed, if this instance of the plugin becomes active again."""
        ...


# ---------------------------------------------------------------- diagnostics


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostic:
    """A problem with an endpoint that users must know about. It becomes a log line and an Event
    about the Node, and is counted by its reason."""

    reason: NodeReason
    """The reason of the Event."""

    note: str
    """A sentence that names the endpoint, the cause and the remedy. The same cause results in the
    same sentence."""

    source: str = ""
    """The affected driver or entry, if the reporter has several, so that one of them cannot use up
    the Events of the other ones."""


REPEAT_SECONDS = 60.0
"""Minimum time between two reports of the same message."""

ONCE_SECONDS = 86_400.0
"""Minimum time between two reports of a condition that lasts until the plugin changes."""

MAX_REMEMBERED = 256
"""Maximum number of different messages to remember. The oldest are forgotten first."""

BURST = 50.0
SECONDS_EACH = 5.0
"""The burst of diagnostics, and the seconds per additional diagnostic. Further diagnostics are
dropped."""


class Diagnostics:
    """Deduplicates and limits the diagnostics of one source."""

    def __init__(self, report: Callable[[Diagnostic], None], *, source: str = "") -> None:
        self._report = report
        self._source = source
        self._quiet_until: dict[Diagnostic, float] = {}
        """The time until which each diagnostic must not be repeated (loop clock)."""
        self._limiter = RateLimiter(burst=BURST, per_second=1 / SECONDS_EACH)
        self._dropping = False

    def report(self, reason: NodeReason, note: str, *, once: bool = False) -> None:
        """Report a message, unless it was reported recently."""
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
