"""
One run of Kopf: a thread with its own event loop, started once, stopped through its flag.

Kopf cancels every task of its loop when it ends, and takes over the signals of a main thread;
neither may happen to ours. Its handlers only hand over the objects that they saw. When it has
ended, for any reason, ``ended`` notifies our loop, and the supervisor decides what follows.

It must not know the store, queues, or leadership.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, cast

import aiohttp

from drakit.kube import ApiError, Session
from drakit_operator.intake import Intake, Seen
from drakit_operator.kinds import OnSkipped, Served, name_of
from drakit_operator.watching.guard import GuardedClient
from drakit_operator.watching.kopf_import import kopf
from drakit_operator.watching.settings import operator_settings

__all__ = ("KopfThread",)

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""Pause between two heartbeats of Kopf's loop."""


FLAG_SECONDS = 0.7
"""Seconds for Kopf to stop by its flag (it usually needs 0.1) before it is canceled."""


class KopfThread:
    """Runs Kopf once, in a thread; ``ended`` is done when Kopf has ended, with its error if any."""

    def __init__(
        self,
        *,
        connect: Callable[[], Awaitable[Session]],
        versions: Mapping[Served, str],
        intake: Intake,
        on_skipped: OnSkipped,
    ) -> None:
        """
        Prepare a run that watches each kind from its version.

        ``connect`` is called in Kopf's loop: a session belongs to the loop that opened it.
        ``on_skipped`` is called in its thread.
        """
        self._connect = connect
        self._versions = dict(versions)
        self._kinds = tuple(versions)
        self._on_skipped = on_skipped
        self._intake = intake
        self._owner = asyncio.get_running_loop()
        self.ended: asyncio.Future[BaseException | None] = self._owner.create_future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()  # touched in Kopf's loop only
        self._gap: ApiError | None = None
        self._beat = time.monotonic()
        # A daemon thread: whatever Kopf still does, it cannot keep the process from ending.
        self._thread = threading.Thread(target=self._main, name="kopf", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self, *, timeout_seconds: float) -> bool:
        """Stop it, and ignore all that it sees from now on. Return whether it ended in time."""
        self._intake.close()
        if not self.ended.done():
            self._call(self._stop.set)
        done, _ = await asyncio.wait((self.ended,), timeout=timeout_seconds)
        if not done:
            logger.warning("kopf did not stop in time and is abandoned")
        return bool(done)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last heartbeat of its loop."""
        return time.monotonic() - self._beat

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # its loop has just been closed: it has ended by itself
            logger.debug("kopf has already ended")

    # ---- in Kopf's thread

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._operate())
        except BaseException as problem:  # also Kopf's own cancellation: the supervisor must know
            error = problem
        try:
            self._owner.call_soon_threadsafe(self._report, error)
        except RuntimeError:  # our loop is closed: there is no receiver
            logger.debug("kopf ended after its owner")

    def _report(self, error: BaseException | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    async def _operate(self) -> None:
        # Begun before Kopf, which cancels at its end the tasks that were begun after it.
        beating = asyncio.create_task(self._give_signs_of_life(), name="beat")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        operating = asyncio.create_task(self._run_kopf(), name="kopf")
        try:
            await asyncio.wait({operating, stopping}, return_when=asyncio.FIRST_COMPLETED)
            # Its flag makes Kopf end. Where it waits for tasks of its own, up to 5 s, or for
            # a session, it is canceled.
            await asyncio.wait({operating}, timeout=FLAG_SECONDS)
            while not operating.done():
                operating.cancel()
                await asyncio.wait({operating}, timeout=FLAG_SECONDS)
            if self._gap is not None:
                raise self._gap
            if not operating.cancelled():
                operating.result()
        finally:
            beating.cancel()
            stopping.cancel()

    async def _run_kopf(self) -> None:
        before = asyncio.all_tasks()
        async with AsyncExitStack() as sessions:
            # Opened here, not at Kopf's first login: if it cannot be, that is known at once.
            session = await sessions.enter_async_context(await self._connect())
            if self._stop.is_set():
                return
            # Unused without peering. Of itself Kopf asks for the user's name, and images have none.
            identity: Any = "drakit"
            try:
                await kopf.operator(
                    registry=self._registry(session, sessions),
                    settings=operator_settings(self._kinds),
                    clusterwide=True,
                    identity=identity,
                    stop_flag=self._stop,
                )
            finally:
                # Requests that Kopf has left behind, before their session is closed.
                strays = asyncio.all_tasks() - before
                for stray in strays:
                    stray.cancel()
                if strays:
                    await asyncio.wait(strays, timeout=FLAG_SECONDS)

    def _end(self, error: ApiError) -> None:
        """End this run: Kopf alone needs 5 s to end after an error."""
        self._gap = error
        self._stop.set()

    async def _give_signs_of_life(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT_SECONDS)

    def _registry(self, session: Session, sessions: AsyncExitStack) -> kopf.OperatorRegistry:
        """Register one handler per kind: only ``event``, the one sort that writes nothing."""
        registry = kopf.OperatorRegistry()
        unused = [session]

        async def login(**_: Any) -> kopf.AiohttpSession:
            # Ours puts the current token into each request, so a rotated token costs nothing: a
            # new login would close the session and with it all watches. Kopf asks for another
            # only after a 401, and closes the HTTP client of the first.
            if not unused:
                unused.append(await sessions.enter_async_context(await self._connect()))
            current = unused.pop()
            guarded = GuardedClient(
                current.http,
                server=current.server,
                kinds=self._kinds,
                versions=self._versions,
                on_skipped=self._on_skipped,
                on_gap=self._end,
            )
            return kopf.AiohttpSession(
                server=current.server, aiohttp_session=cast("aiohttp.ClientSession", guarded)
            )

        # A failure is final for this run: Kopf would wait a minute, its supervisor waits a second.
        kopf.on.login(errors=kopf.ErrorsMode.PERMANENT, registry=registry)(login)
        for served in self._kinds:
            kind = served.kind
            register = kopf.on.event(
                kind.group, served.version, kind.plural, id=kind.plural, registry=registry
            )
            register(self._handler(served))
        return registry

    def _handler(self, served: Served) -> Callable[..., Any]:
        async def seen(*, event: Any, **_: Any) -> None:
            # It returns None: Kopf would write any other value into the object's status.
            body: dict[str, Any] = event["object"]
            gone = event["type"] == "DELETED"
            self._intake.put(
                Seen(
                    kind=served.kind,
                    name=name_of(body),
                    uid=body["metadata"]["uid"],
                    fact=None if gone else served.read(body, on_skipped=self._on_skipped),
                )
            )

        return seen
