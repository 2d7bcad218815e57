"""
Lists of all kinds: before each run of Kopf, and now and then to find what is gone.

Kopf never reports what was deleted in a gap that ends in a new list, and it does not say when its
first list is complete. So it is not Kopf that lists: everything is listed here before each of its
runs, which makes the store complete, and its watches begin where these lists end. Now and then only
names and UIDs are listed, which finds deletions that no watch has reported.

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
"""Longest wait for a page; the API server gives up at 60 s."""


class Reader(Protocol):
    """What is needed of a session."""

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
    """What a complete list has changed in the store, and where watches begin after it."""

    changes: list[Change]
    versions: Mapping[Kind, str]


class Census:
    """Lists the kinds, and keeps the store in step with the lists."""

    def __init__(
        self, reader: Reader, store: Store, kinds: Iterable[Kind], *, observer: Observer
    ) -> None:
        self._reader = reader
        self._store = store
        self._kinds = tuple(kinds)
        self._observer = observer

    async def relist(self) -> Relisted:
        """
        List all and put it into the store, all kinds at once: no half knowledge in between.

        Each kind is tried, so that each that cannot be listed is reported; then the first error is
        raised, for without one of the kinds nothing is certain.
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
        """Find what the store holds and the API server does not, and remove it."""
        changes: list[Change] = []
        for kind in self._kinds:
            before = self._store.uids(kind)  # what comes in during the list is not judged by it
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
            )  # not twice in memory where nothing changed

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
