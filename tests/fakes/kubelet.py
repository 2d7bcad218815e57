"""The kubelet that vendors also get, and an engine whose responses a test delays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from drakit import ClaimReference
from drakit.testing.kubelet import FakeKubelet
from drakit_nodeplugin.claims.work import ClaimResult, ClaimWork, KubeletDevice

__all__ = ("FakeKubelet", "HeldClaims", "device", "reference")


def reference(uid: str, *, namespace: str = "lab", name: str | None = None) -> ClaimReference:
    return ClaimReference(namespace=namespace, name=name or f"claim-{uid}", uid=uid)


class HeldClaims:
    """
    An engine that responds at once or, for a held claim, when the test releases it.

    `done` has its completed work in order: ``prepare a``, ``unprepare a``. `begun` has the started
    work.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.batches: list[int] = []
        self.done: list[str] = []
        self.errors: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self.abandoned: list[str] = []
        self.failure: Exception | None = None
        self._held: dict[str, asyncio.Event] = {}
        self._news = asyncio.Event()

    def hold(self, *uids: str) -> None:
        for uid in uids:
            self._held[uid] = asyncio.Event()

    def let_go(self, *uids: str) -> None:
        for uid in uids:
            self._held.pop(uid).set()

    async def until_begun(self, what: str) -> None:
        async with asyncio.timeout(5):
            while what not in self.begun:
                self._news.clear()
                await self._news.wait()

    async def until_done(self, what: str) -> None:
        async with asyncio.timeout(5):
            while what not in self.done:
                self._news.clear()
                await self._news.wait()

    async def prepare(self, works: Sequence[ClaimWork]) -> None:
        for work in works:
            work.on_abandon = partial(self.abandoned.append, work.claim.uid)
        await self._work("prepare", [work.claim for work in works])
        for work in works:
            uid = work.claim.uid
            if uid in self.errors:
                work.finish(ClaimResult(error=self.errors[uid]))
            elif uid not in self.forgotten:
                work.finish(ClaimResult(devices=(self.device(uid),)))

    async def unprepare(self, works: Sequence[ClaimWork]) -> None:
        await self._work("unprepare", [work.claim for work in works])
        for work in works:
            work.finish(ClaimResult(error=self.errors.get(work.claim.uid)))

    def device(self, uid: str) -> KubeletDevice:
        return device(uid)

    async def _work(self, operation: str, claims: Sequence[ClaimReference]) -> None:
        self.batches.append(len(claims))
        self.begun += [f"{operation} {claim.uid}" for claim in claims]
        self._news.set()
        for claim in claims:
            if claim.uid in self._held:
                await self._held[claim.uid].wait()
        if self.failure is not None:
            raise self.failure
        self.done += [f"{operation} {claim.uid}" for claim in claims]
        self._news.set()


def device(uid: str) -> KubeletDevice:
    return KubeletDevice(
        requests=("main",),
        pool="node-1",
        device=f"cam-{uid}",
        cdi_ids=(f"camera.example.com/claim={uid}-0",),
        share_id="share-1",
    )
