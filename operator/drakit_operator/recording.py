"""
Announcements become Events: only while we lead, and never silently lost.

The recorder deduplicates across replicas and restarts. By itself it lets nobody know that a write
failed; here a failure is an error, so that the queue brings the object again.

It must not know what is announced, or when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from drakit.kube import AlreadyExistsError, ApiError, NotFoundError, Session
from drakit.kube.events import EventRecorder
from drakit_operator.announcing import Announcement, NotToldError

__all__ = ("EventWriter",)

CONTROLLER = "drakit.dev/operator"


class EventWriter:
    """Writes announcements as Events of type Warning."""

    def __init__(self, session: Session, *, instance: str, may_write: Callable[[], bool]) -> None:
        self._recorder = EventRecorder(
            _LoudSession(session), controller=CONTROLLER, instance=instance
        )
        self._may_write = may_write

    async def __call__(self, announcement: Announcement) -> None:
        """Write it, or count it up where it stands already; NotToldError if that failed."""
        if not self._may_write():
            raise NotToldError("this replica does not lead any more")
        await self._recorder.record(
            announcement.regarding.body(),
            reason=str(announcement.code),
            action="Allocating",
            note=announcement.note,
        )


class _LoudSession:
    """What the recorder needs of a session, with errors that it does not keep to itself."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def get(self, path: str, *, timeout_seconds: float | None = None) -> dict[str, Any]:
        try:
            return await self._session.get(path, timeout_seconds=timeout_seconds)
        except ApiError as error:
            raise _loud(error) from error

    async def create(
        self, path: str, body: Mapping[str, Any], *, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        try:
            return await self._session.create(path, body, timeout_seconds=timeout_seconds)
        except ApiError as error:
            raise _loud(error) from error

    async def patch(
        self, path: str, body: Mapping[str, Any], *, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        try:
            return await self._session.patch(path, body, timeout_seconds=timeout_seconds)
        except ApiError as error:
            raise _loud(error) from error


def _loud(error: ApiError) -> Exception:
    """Keep the answers that the recorder acts on: there already, or gone (also the namespace)."""
    if isinstance(error, (AlreadyExistsError, NotFoundError)):
        return error
    return NotToldError(str(error))
