"""
Determines which resources the kubelet's own device manager does not use: it does not serve them,
and no container has devices of them from it. Otherwise a device could be allocated twice.

A resource that the kubelet had must be missing in several complete answers over two minutes before
it is free. Any other resource must be missing in two complete answers: a kubelet that has just
started adds its pods one by one. A missing or incomplete answer proves nothing.

It must not know how the kubelet is called, endpoints, or device plugins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from drakit_daemon.backoff import Backoff
from drakit_nodeplugin.reasons import NodeReason
from drakit_nodeplugin.state.podresources import KubeletAnswer

__all__ = ("Bar", "KubeletResources")

ANSWER_SECONDS = 2.0
"""The timeout of an answer: a plugin that registers waits for it."""

SETTLE_SECONDS = 2.0
"""Minimum time between two complete answers before a resource that is in neither is free."""

CLEAR_SECONDS = 120.0
"""The time for which a resource that the kubelet had must be missing: the grace period of a stale
claim. After a restart of the kubelet, its device manager serves nothing until its plugins have
registered again."""

PERIOD_SECONDS = 30.0
"""Pause between two answers while nothing waits for one. After twice this time without an answer,
earlier answers no longer count, so there are several answers within the time above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """The reason not to use the devices of a resource."""

    text: str
    """The reason as a sentence."""

    reason: NodeReason | None
    """Reason of the Event; None while the wait is short."""

    of_kubelet: bool = False
    """Whether the kubelet currently has the resource."""


class KubeletResources:
    """Polls the kubelet, and remembers its resources."""

    def __init__(self, read: Callable[[], Awaitable[KubeletAnswer]]) -> None:
        self._read = read
        self._named: Mapping[str, bool] = {}
        """The resources in the last answer."""
        self._unknown: str | None = None
        """The reason why the last answer is missing or incomplete; None if it is complete."""
        self._complete_since: float | None = None
        """Loop time since when all answers are complete, without a gap."""
        self._complete_at = 0.0
        """Loop time of the last complete answer."""
        self._had: dict[str, float | None] = {}
        """Resources that a device plugin wanted while the kubelet had them, each with the loop time
        since when it is missing; None while it is not."""
        self._retry = Backoff(first_seconds=SETTLE_SECONDS, limit_seconds=PERIOD_SECONDS, jitter=0)

    async def check(self, resource: str) -> Bar | None:
        """Poll now, and return why a resource must not be used; None if it is free."""
        await self.ask()
        return self.bar(resource)

    def bar(self, resource: str) -> Bar | None:
        """Return why a resource must not be used, as of the last answer; None if it is free."""
        if (served := self._named.get(resource)) is not None:
            self._had[resource] = None
            text = _of_kubelet(resource, served=served)
            return Bar(text=text, reason="ResourceServedByKubelet", of_kubelet=True)
        if resource in self._had:
            return Bar(
                text=f"the kubelet's own device manager served {resource} on this node; the node "
                f"plugin uses the device plugin when the resource has been absent from the "
                f"kubelet's list for {CLEAR_SECONDS:g} s",
                reason="ResourceServedByKubelet",
            )
        if self._unknown is not None:
            return Bar(
                text=f"the node plugin cannot determine whether the kubelet has allocated devices "
                f"of {resource} to pods, so a device could be allocated twice: {self._unknown}",
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
        """Whether the answers have been complete for long enough."""
        since = self._complete_since
        return since is not None and self._complete_at - since >= SETTLE_SECONDS

    @property
    def idle(self) -> bool:
        """Whether more answers change nothing until a device plugin registers."""
        return self.settled and not self._had

    def pause_seconds(self) -> float:
        """Return the time until the next poll."""
        if self._unknown is not None:
            return self._retry.next_seconds()
        self._retry.succeeded()
        return PERIOD_SECONDS if self.settled else SETTLE_SECONDS

    async def ask(self) -> None:
        """Poll the kubelet."""
        # Concurrent callers share one call of the client.
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._read()
        except TimeoutError:
            self._note({}, f"the kubelet did not answer within {ANSWER_SECONDS:g} s")
        except Exception as error:  # the client is passed in, so its errors are unknown
            self._note({}, str(error) or type(error).__name__)
        else:
            self._note(answer.resources, answer.unknown)

    def _note(self, named: Mapping[str, bool], unknown: str | None) -> None:
        now = asyncio.get_running_loop().time()
        self._named, self._unknown = named, unknown
        if unknown is not None or now - self._complete_at > 2 * PERIOD_SECONDS:
            self._complete_since = None
            self._had = dict.fromkeys(self._had)
        if unknown is not None:
            return
        self._complete_at = now
        if self._complete_since is None:
            self._complete_since = now
        for resource, since in list(self._had.items()):
            if resource in named:
                self._had[resource] = None
            elif since is None:
                self._had[resource] = now
            elif now - since >= CLEAR_SECONDS:
                del self._had[resource]


def _of_kubelet(resource: str, *, served: bool) -> str:
    if not served:
        return (
            f"pods on this node still hold devices of {resource} that the kubelet has allocated, "
            f"so a device could be allocated twice; delete these pods"
        )
    return (
        f"the kubelet's own device manager serves {resource} on this node, and only one "
        f"component may serve it; remove the device plugin that registers with the kubelet, or the "
        f"one that registers with the node plugin"
    )
