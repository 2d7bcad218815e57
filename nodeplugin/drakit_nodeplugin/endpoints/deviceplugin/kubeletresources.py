"""
Which resources are free of the kubelet's own device manager: it does not serve them, and no
container has devices of them from it. Two may not give out one device.

A resource that the kubelet had must be missing in several complete answers over two minutes before
it is free. One that the kubelet has not been seen with needs two complete answers: a kubelet that
has just started adds its pods one by one, within a moment. No answer, or an incomplete one, proves
nothing.

It must not know how the kubelet is asked, endpoints, or who registers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from drakit.backoff import Backoff

__all__ = ("Bar", "KubeletAnswer", "KubeletResources")

ANSWER_SECONDS = 2.0
"""How long an answer may take: a plugin that registers waits for it."""

SETTLE_SECONDS = 2.0
"""Between two complete answers, before a resource that was in neither is free."""

CLEAR_SECONDS = 120.0
"""How long a resource that the kubelet had must be missing: as long as a claim must have been
stale. After a restart of the kubelet its device manager serves nothing until its plugins have
registered again."""

PERIOD_SECONDS = 30.0
"""Between two answers while nothing waits for one. After twice this time without one, what came
before counts no more: so several answers lie within the time above."""


class KubeletAnswer(Protocol):
    """What the kubelet has answered."""

    @property
    def resources(self) -> Mapping[str, bool]:
        """Those that it serves (True), or of which containers only still have devices (False)."""
        ...

    @property
    def unknown(self) -> str | None:
        """Why it may have others; None if it has not."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Why the devices of a resource may not be used."""

    text: str
    """A sentence."""

    reason: str | None
    """Of a remark; None while it only takes a moment."""

    of_kubelet: bool = False
    """Whether the kubelet has the resource in this moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Complete answers without a break."""

    since: float
    until: float

    @property
    def seconds(self) -> float:
        return self.until - self.since


class KubeletResources:
    """Asks the kubelet, and remembers what it had."""

    def __init__(self, read: Callable[[], Awaitable[KubeletAnswer]]) -> None:
        self._read = read
        self._named: Mapping[str, bool] = {}
        """In the last answer."""
        self._unknown: str | None = None
        """Why the last answer is none, or incomplete."""
        self._run: _Run | None = None
        self._had: dict[str, _Run | None] = {}
        """Resources that somebody wanted while the kubelet had them, each with the answers since in
        which it was missing."""
        self._retry = Backoff(first_seconds=SETTLE_SECONDS, limit_seconds=PERIOD_SECONDS, jitter=0)

    async def check(self, resource: str) -> Bar | None:
        """Ask now, and give why a resource may not be used; None if it may."""
        await self.ask()
        return self.bar(resource)

    def bar(self, resource: str) -> Bar | None:
        """Give why a resource may not be used, as of the last answer; None if it may."""
        if (served := self._named.get(resource)) is not None:
            self._had[resource] = None
            text = _of_kubelet(resource, served=served)
            return Bar(text=text, reason="ResourceServedByKubelet", of_kubelet=True)
        if resource in self._had:
            return Bar(
                text=f"the kubelet's own device manager has served {resource} on this node; the node "
                f"plugin uses the device plugin once the kubelet has been without the resource for "
                f"{CLEAR_SECONDS:g} s",
                reason="ResourceServedByKubelet",
            )
        if self._unknown is not None:
            return Bar(
                text=f"the node plugin cannot determine whether the kubelet has allocated devices of "
                f"{resource} to pods, so a device could be allocated twice: {self._unknown}",
                reason="KubeletResourcesUnknown",
            )
        if not self.settled:
            return Bar(
                text=f"the node plugin is checking whether the kubelet has allocated devices of "
                f"{resource} to pods",
                reason=None,
            )
        return None

    @property
    def settled(self) -> bool:
        """Whether answers were complete for long enough, up to the last one."""
        run = self._run
        return run is not None and run.seconds >= SETTLE_SECONDS

    @property
    def idle(self) -> bool:
        """Whether nothing changes by more answers while nobody registers."""
        return self.settled and not self._had

    def pause_seconds(self) -> float:
        """Give the time until it should be asked again."""
        if self._unknown is not None:
            return self._retry.next_seconds()
        self._retry.succeeded()
        return PERIOD_SECONDS if self.settled else SETTLE_SECONDS

    async def ask(self) -> None:
        """Ask the kubelet."""
        # All who ask at once wait at the same time: the client makes one call for them.
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._read()
        except TimeoutError:
            self._note({}, f"the kubelet does not answer within {ANSWER_SECONDS:g} s")
        except Exception as error:  # of a client that is handed in
            self._note({}, str(error) or type(error).__name__)
        else:
            self._note(answer.resources, answer.unknown)

    def _note(self, named: Mapping[str, bool], unknown: str | None) -> None:
        now = asyncio.get_running_loop().time()
        self._named, self._unknown = named, unknown
        if unknown is not None:
            self._run = None
            self._had = dict.fromkeys(self._had)
            return
        self._run = _next(self._run, now)
        runs = {
            resource: None if resource in named else _next(run, now)
            for resource, run in self._had.items()
        }
        self._had = {
            resource: run
            for resource, run in runs.items()
            if run is None or run.seconds < CLEAR_SECONDS
        }


def _next(run: _Run | None, now: float) -> _Run:
    """Add an answer."""
    if run is None or now - run.until > 2 * PERIOD_SECONDS:
        return _Run(since=now, until=now)
    return replace(run, until=now)


def _of_kubelet(resource: str, *, served: bool) -> str:
    if not served:
        return (
            f"pods on this node still hold devices of {resource} that the kubelet has allocated, "
            f"so a device could be allocated twice; delete these pods"
        )
    return (
        f"the kubelet's own device manager serves {resource} on this node, and only one "
        f"component may serve it; remove the device plugin that registers with the kubelet, or the one that registers with the "
        f"node plugin"
    )
