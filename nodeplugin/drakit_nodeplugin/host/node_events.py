"""
Events on this node's Node, for what concerns no claim: devices left out, damage, dropped fields.

Whoever has something to say hands in a sentence and goes on; it is written when the API server can
be reached. What is said of claims is :mod:`.claims.announcing`'s.

It must not know why something is said.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from drakit.kube import Session
from drakit.kube.events import EventRecorder

__all__ = ("NodeEvents",)

logger = logging.getLogger(__name__)

WAITING = 256
"""Sentences that wait for the API server; what comes on top is in the log alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sentence:
    reason: str
    action: str
    note: str


class NodeEvents:
    """Says things about the node in the name of one driver's parts."""

    def __init__(self, node: str, session: asyncio.Future[Session]) -> None:
        self._node = node
        self._session = session
        self._waiting: asyncio.Queue[_Sentence] = asyncio.Queue(WAITING)

    def tell(self, *, reason: str, action: str, note: str) -> None:
        """Say a sentence as a warning, some time; the same sentence is one Event that counts."""
        try:
            self._waiting.put_nowait(_Sentence(reason=reason, action=action, note=note))
        except asyncio.QueueFull:
            logger.warning("no Event is written", extra={"reason": reason, "note": note})

    async def run(self) -> None:
        """Write what is said, until cancelled."""
        session = await asyncio.shield(self._session)
        recorder = EventRecorder(
            session, controller="drakit.dev/nodeplugin", instance=self._node, shared=False
        )
        while True:
            sentence = await self._waiting.get()
            await recorder.record(
                {"apiVersion": "v1", "kind": "Node", "name": self._node},
                reason=sentence.reason,
                action=sentence.action,
                note=sentence.note,
            )
