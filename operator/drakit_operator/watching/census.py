"""
Lists of all kinds: before each run of Kopf, and periodically to find missed deletions.

Kopf never reports deletions in a gap that ends in a new list, and it does not report when its first
list is complete. So this module lists everything before each run of Kopf, which makes the store
complete, and Kopf's watches begin where these lists end. Periodically it lists only names and UIDs,
which finds deletions that no watch has reported.

It must not know Kopf, queues, or what a deletion means.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from drakit.kube import ApiError, Listing
from drakit.kube.paths import resource_path
from drakit_operator.kinds import Fact, Kind, Name, name_of
from drakit_operator.store import Change, Store
from drakit_operator.watching.observer import Observer

__all__ = ("Census", "Reader", "Relisted")

logger = logging.getLogger(__name__)

Kept = TypeVar("Kept")

LIST_SECONDS = 30.0
"""Longest wait for a page; the API server's own timeout is 60 s."""


class Reader(Protocol):
    """The used part of a session."""

    async def read_list(
        self,
        path: str,
        keep: Callable[[dict[str, Any]], Kept],
        *,
        params: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
        metadata_only: bool = False,
    ) -> Listing[Kept]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Relisted:
    """The changes of a complete list in the store, and where watches begin after it."""

    changes: list[Change]
    versions: Mapping[Kind, str]


class Census:
    """Lists the kinds, and updates the store from the lists."""

    def __init__(
        self, reader: Reader, store: Store, kinds: Iterable[Kind], *, observer: Observer
    ) -> None:
        self._reader = reader
        self._store = store
        self._kinds = tuple(kinds)
        self._observer = observer

    async def relist(self) -> Relisted:
        """
        List all kinds and store the results at once, so that the store is never incomplete.

        It tries each kind, so that it reports every kind that cannot be listed. Then it raises the
        first error, because conclusions need all kinds.
        """
        listed: dict[Kind, list[Fact]] = {}
        versions: dict[Kind, str] = {}
        errors: list[ApiError] = []
        for kind in self._kinds:
            try:
                listing = await self._list(kind, self._fact_of(kind))
            except ApiError as error:
                self._observer.listed(kind, str(error))
                errors.append(error)
                continue
            self._observer.listed(kind, None)
            for each in listing.skipped:
                self._observer.skipped(kind, each.metadata, each.reason)
            unreadable = [kind.project_unreadable(each.metadata) for each in listing.skipped]
            listed[kind] = listing.items + unreadable
            versions[kind] = listing.resource_version
        if errors:
            raise errors[0]
        changes = [
            change for kind, facts in listed.items() for change in self._store.replace(kind, facts)
        ]
        return Relisted(changes=changes, versions=versions)

    async def sweep(self) -> list[Change]:
        """Remove objects from the store that the API server no longer has."""
        changes: list[Change] = []
        for kind in self._kinds:
            before = self._store.uids(
                kind
            )  # the list does not decide about objects that arrive meanwhile
            if not before:
                continue
            listing = await self._list(kind, _named, metadata_only=True)
            listed = dict(listing.items)
            gone = [name for name, uid in before.items() if listed.get(name) != uid]
            removed = [self._store.remove(kind, name, uid=before[name]) for name in gone]
            changes += [change for change in removed if change is not None]
            if gone:
                logger.info("missed deletions found", extra={"kind": str(kind), "count": len(gone)})
        return changes

    def _fact_of(self, kind: Kind) -> Callable[[dict[str, Any]], Fact]:
        def keep(body: dict[str, Any]) -> Fact:
            fact = kind.project(body)
            known = self._store.find(kind, name_of(body))
            return (
                known if known is not None and known == fact else fact
            )  # unchanged objects are not in memory twice

        return keep

    async def _list(
        self, kind: Kind, keep: Callable[[dict[str, Any]], Kept], *, metadata_only: bool = False
    ) -> Listing[Kept]:
        return await self._reader.read_list(
            resource_path(kind.group_version, kind.plural),
            keep,
            params=kind.params,
            timeout_seconds=LIST_SECONDS,
            metadata_only=metadata_only,
        )


def _named(body: dict[str, Any]) -> tuple[Name, str]:
    return name_of(body), str(body["metadata"]["uid"])
