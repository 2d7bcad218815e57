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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from drakit.kube import ApiError, ForbiddenError, Listing, NotFoundError
from drakit_operator.kinds import Fact, Kind, Name, Served, name_of
from drakit_operator.store import Change, Store
from drakit_operator.watching.discovery import (
    Absence,
    Client,
    Coverage,
    KindsMissingError,
    discover,
)
from drakit_operator.watching.observer import Observer

__all__ = ("Census", "Reader", "Relisted", "Swept")

logger = logging.getLogger(__name__)

Kept = TypeVar("Kept")

LIST_SECONDS = 30.0
"""Longest wait for a page; the API server's own timeout is 60 s."""


class Reader(Client, Protocol):
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
    versions: Mapping[Served, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """The deletions that a sweep found."""

    changes: list[Change]
    outdated: bool
    """The API server serves other versions than the watches use, or permissions have changed."""

    errors: Sequence[ApiError] = ()
    """Why kinds could not be listed."""


class Census:
    """Lists the kinds, and updates the store from the lists."""

    def __init__(
        self, reader: Reader, store: Store, kinds: Iterable[Kind], *, observer: Observer
    ) -> None:
        self._reader = reader
        self._store = store
        self._kinds = tuple(kinds)
        self._observer = observer
        self._coverage: Coverage | None = None
        self._refused: Mapping[Kind, Absence] = {}
        """Kinds that could not be listed in spite of their discovery: the next sweep asks again."""

    async def relist(self) -> Relisted:
        """
        List all kinds and store the results at once, so that the store is never incomplete.

        It tries each kind, so that it reports every kind that cannot be listed. Kinds that are not
        served or not allowed are left out, if causes are certain without them. Otherwise, and if a
        list fails, it raises ApiError or KindsMissingError: conclusions need these kinds.
        """
        coverage = await discover(self._reader, self._kinds)
        listings: dict[Served, Listing[Fact]] = {}
        refused: dict[Kind, Absence] = {}
        errors: list[ApiError] = []
        for served in coverage.served:
            try:
                listings[served] = await self._list(served, self._fact_of(served))
            except (ForbiddenError, NotFoundError) as error:
                forbidden = isinstance(error, ForbiddenError)
                refused[served.kind] = Absence(reason=error.message, forbidden=forbidden)
            except ApiError as error:
                self._observer.listed(served.kind, str(error))
                errors.append(error)
            else:
                self._observer.listed(served.kind, None)
        left_out = {**coverage.left_out, **refused}
        for kind, absence in left_out.items():
            self._observer.left_out(kind, absence)
        missing = {kind: absence for kind, absence in left_out.items() if kind.required}
        if errors or missing:
            raise errors[0] if errors else KindsMissingError(missing)
        self._coverage, self._refused = coverage, refused
        return Relisted(
            changes=self._replace(listings, left_out),
            versions={served: listing.resource_version for served, listing in listings.items()},
        )

    def _replace(
        self, listings: Mapping[Served, Listing[Fact]], left_out: Mapping[Kind, Absence]
    ) -> list[Change]:
        changes: list[Change] = []
        for served, listing in listings.items():
            for each in listing.skipped:
                self._observer.skipped(served.kind, each.metadata, each.reason)
            unreadable = [served.project_unreadable(each.metadata) for each in listing.skipped]
            changes += self._store.replace(served.kind, [*listing.items, *unreadable])
        for kind in left_out:  # what was known of it is no longer kept up to date
            changes += self._store.replace(kind, ())
        forbidden = (kind.type for kind, absence in left_out.items() if absence.forbidden)
        self._store.world.hidden = frozenset(forbidden)
        return changes

    async def sweep(self) -> Swept:
        """Remove objects from the store that the API server no longer has. Raises ApiError."""
        coverage = await discover(self._reader, self._kinds)
        changes: list[Change] = []
        errors: list[ApiError] = []
        outdated = coverage != self._coverage or bool(self._refused)
        for served in coverage.served:
            try:
                changes += await self._find_gone(served)
            except (ForbiddenError, NotFoundError):
                outdated = True
            except ApiError as error:
                errors.append(error)
        return Swept(changes=changes, outdated=outdated, errors=errors)

    async def _find_gone(self, served: Served) -> list[Change]:
        kind = served.kind
        # Taken before: the list does not decide about objects that arrive meanwhile.
        before = self._store.uids(kind)
        if not before:
            return []
        listing = await self._list(served, _named, metadata_only=True)
        listed = dict(listing.items)
        gone = [name for name, uid in before.items() if listed.get(name) != uid]
        removed = [self._store.remove(kind, name, uid=before[name]) for name in gone]
        if gone:
            logger.info("missed deletions found", extra={"kind": str(kind), "count": len(gone)})
        return [change for change in removed if change is not None]

    def _fact_of(self, served: Served) -> Callable[[dict[str, Any]], Fact]:
        def keep(body: dict[str, Any]) -> Fact:
            fact = served.read(body, on_skipped=self._observer.skipped)
            # Unchanged objects are not in memory twice.
            known = self._store.find(served.kind, name_of(body))
            return known if known is not None and known == fact else fact

        return keep

    async def _list(
        self, served: Served, keep: Callable[[dict[str, Any]], Kept], *, metadata_only: bool = False
    ) -> Listing[Kept]:
        return await self._reader.read_list(
            served.path,
            keep,
            params=served.kind.params,
            timeout_seconds=LIST_SECONDS,
            metadata_only=metadata_only,
        )


def _named(body: dict[str, Any]) -> tuple[Name, str]:
    return name_of(body), str(body["metadata"]["uid"])
