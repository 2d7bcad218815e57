"""
Writes announcements as Events: only while this replica leads, and never silently lost.

The recorder deduplicates across replicas and restarts. A failure raises an error, so that the queue
retries the object.

It must not know what is announced, or when.
"""

from __future__ import annotations

from collections.abc import Callable

from drakit.kube import ApiError, Session
from drakit.kube.events import EventRecorder, EventTimings
from drakit_operator.announcing import Announcement, NotWrittenError

__all__ = ("EventWriter",)

CONTROLLER = "drakit.dev/operator"


class EventWriter:
    """Writes announcements as Events of type Warning."""

    def __init__(self, session: Session, *, instance: str, may_write: Callable[[], bool]) -> None:
        self._recorder = EventRecorder(
            session,
            controller=CONTROLLER,
            instance=instance,
            timings=EventTimings(count_seconds=0),  # the announcer has paused already
        )
        self._may_write = may_write

    async def __call__(self, announcement: Announcement) -> None:
        """Write it, or increase the count of its Event. Raises NotWrittenError."""
        if not self._may_write():
            raise NotWrittenError("this replica no longer leads")
        try:
            await self._recorder.write(
                announcement.regarding.body(),
                reason=str(announcement.code),
                action="Allocating",
                note=announcement.note,
            )
        except ApiError as error:
            raise NotWrittenError(str(error)) from error
