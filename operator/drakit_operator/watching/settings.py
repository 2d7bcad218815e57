"""
Kopf's settings: a watcher that writes nothing, restarts fast and stops fast.

Every value differs from Kopf's default for the reason beside it. The caller names the watched
kinds; the handlers process the events.

It must not know sessions, threads, or the store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drakit_operator.kinds import Served
from drakit_operator.watching.kopf_import import kopf

__all__ = ("operator_settings",)


class NoDiffBase(kopf.DiffBaseStorage):
    """Remembers nothing of an object: there are no change handlers, hence no differences."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return {}  # Kopf's own copies the whole body, for each event: two thirds of its CPU time

    def fetch(self, *, body: Any) -> Any:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        return None


class NoProgress(kopf.ProgressStorage):
    """Remembers nothing of handlers: those for events have no progress."""

    def fetch(self, *, key: Any, body: Any) -> Any:
        return None

    def store(self, *, key: Any, record: Any, body: Any, patch: Any) -> None:
        return None

    def purge(self, *, key: Any, body: Any, patch: Any) -> None:
        return None

    def touch(self, *, body: Any, patch: Any, value: str | None) -> None:
        return None

    def clear(self, *, essence: Any) -> Any:
        return essence


def operator_settings(kinds: Iterable[Served]) -> kopf.OperatorSettings:
    """Make the settings for watching these kinds."""
    settings = kopf.OperatorSettings()

    # It writes nothing: no Events (ours are deduplicated), no annotations, no finalizers. Kopf
    # removes its finalizer where it is not needed, also that of another operator made with Kopf on
    # the same kind: ours has a name that no operator sets.
    settings.posting.enabled = False
    settings.posting.loggers = False
    settings.persistence.finalizer = "drakit.dev/never-set"
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.progress_storage = NoProgress()

    # It is alone: our Lease decides the leader. The watched kinds are known, so CRDs and namespaces
    # are not watched (this saves two permissions).
    settings.peering.standalone = True
    settings.scanning.disabled = True

    # Few retries, because the supervisor restarts Kopf at once. Retries also delay its stop, and
    # the next leader does not wait for it.
    settings.networking.error_backoffs = (0.5, 1, 2, 4)
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.queueing.exit_timeout = 0.5
    # Otherwise, embedded Kopf kills this process ten minutes after it was canceled.
    settings.process.ultimate_exiting_timeout = None

    # Each object has a task until it has been idle for this long.
    settings.queueing.idle_timeout = 1
    for served in kinds:
        kind = served.kind
        if kind.field_selector:
            where = (kind.group, served.version, kind.plural)
            settings.watching.field_selectors[where] = kind.field_selector
    return settings
