"""
The ResourceSlices of one driver on one node: requests in the served API version, a store of the
slices at the API server, and the Node that owns them.

Inside the node plugin slices are those of ``resource.k8s.io/v1``. Listed slices are projected page
by page: as JSON, all slices of a full node are large. The answer to a write and the watch both
report a slice, in any order: the newer report counts. After a restore of etcd, a new slice can have
a lower version than an old one. So a list, and a read after a conflict, count regardless of their
versions.

It must not know which slices are desired, or how errors are handled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

from drakit.kube import ApiError, Listing, NotFoundError, Session, WatchEvent, resource_path
from drakit.kube.discovery import VersionNotServedError, served_version
from drakit.resource.raw import Object, text
from drakit.resource.versions import GROUP, VERSIONS, from_version, to_version
from drakit_nodeplugin.slices.contents import StoredSlice

__all__ = ("NodeOwner", "OnWrite", "SliceApi", "SliceStore", "Verb", "slice_of")

Verb = Literal["create", "update", "delete"]
OnWrite = Callable[[Verb, float, bool], None]
"""Called after each write: the verb, the seconds that it took, and whether it succeeded."""

KeptT = TypeVar("KeptT")

PAGE_SIZE = 20
"""Slices of a page: each has up to 128 devices, and a page is parsed as a whole."""


class SliceApi:
    """Also a :class:`~drakit.kube.reflector.Collection`, whose objects hold a StoredSlice each."""

    def __init__(self, session: Session, *, driver: str, node: str, on_write: OnWrite) -> None:
        self._session = session
        self._query = {"fieldSelector": f"spec.driver={driver},spec.nodeName={node}"}
        self._on_write = on_write
        self._version: str | None = None

    # ------------------------------------------------------------ for the reflector

    async def read_list(
        self,
        path: str,
        keep: Callable[[dict[str, Any]], KeptT],
        *,
        params: Mapping[str, str] | None = None,
        page_size: int = PAGE_SIZE,
    ) -> Listing[KeptT]:
        """List all slices. The path and the size of the pages are ours, not the reflector's."""
        version = await self._served()
        async with self._guarded():
            return await self._session.read_list(
                _path(version),
                lambda item: keep(_projected(item, version)),
                params={**(params or {}), **self._query},
                page_size=PAGE_SIZE,
            )

    async def watch(
        self, path: str, *, resource_version: str, params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[WatchEvent]:
        """Watch all slices; resource versions are the same in all versions of the API."""
        version = await self._served()
        query = {**(params or {}), **self._query}
        async with self._guarded():
            events = self._session.watch(
                _path(version), resource_version=resource_version, params=query
            )
            async with aclosing(events):
                async for event in events:
                    if event.type != "BOOKMARK":
                        event = replace(event, object=_projected(event.object, version))
                    yield event

    # ------------------------------------------------------------ single slices

    async def get(self, name: str) -> StoredSlice:
        """Return the slice of this name, which may be another driver's or another node's."""
        version = await self._served()
        async with self._guarded():
            body = await self._session.get(_path(version, name))
        return StoredSlice.of(from_version(body, version))

    async def write(self, body: Object, *, exists: bool, dry_run: bool = False) -> dict[str, Any]:
        """Create or replace a slice; return it as the API server stored it, or would without the
        dry run."""
        version = await self._served()
        sent = to_version(body, version)
        verb = "update" if exists else "create"
        async with self._guarded(), self._measured(verb, dry_run=dry_run):
            if exists:
                path = _path(version, text(body, "metadata", "name"))
                answer = await self._session.replace(path, sent, dry_run=dry_run)
            else:
                answer = await self._session.create(_path(version), sent, dry_run=dry_run)
        return from_version(answer, version)

    async def delete(self, stored: StoredSlice) -> None:
        """Delete a slice of exactly this version; one that is gone counts as deleted."""
        version = await self._served()
        try:
            async with self._guarded(), self._measured("delete"):
                await self._session.delete(
                    _path(version, stored.name), uid=stored.uid, resource_version=stored.version
                )
        except NotFoundError:
            return

    # ------------------------------------------------------------ versions and metrics

    async def _served(self) -> str:
        if self._version is None:
            try:
                self._version = await served_version(self._session, GROUP, VERSIONS)
            except VersionNotServedError as error:
                path = f"/apis/{GROUP}"
                raise _not_served(str(error), method="GET", path=path) from error
        return self._version

    @asynccontextmanager
    async def _guarded(self) -> AsyncGenerator[None]:
        """Distinguish an API version that is no longer served from a missing slice."""
        try:
            yield
        except NotFoundError as error:
            if error.details.get("name"):
                raise
            self._version = None
            raise _not_served(error.message, method=error.method, path=error.path) from error

    @asynccontextmanager
    async def _measured(self, verb: Verb, *, dry_run: bool = False) -> AsyncGenerator[None]:
        loop = asyncio.get_running_loop()
        began, ok = loop.time(), False
        try:
            yield
            ok = True
        except NotFoundError:
            ok = verb == "delete"
            raise
        finally:
            if not dry_run:
                self._on_write(verb, loop.time() - began, ok)


class SliceStore:
    """Slices by name; empty until all have been listed once."""

    def __init__(self) -> None:
        self.listed = asyncio.Event()
        self._slices: dict[str, StoredSlice] = {}

    def of_pool(self, pool: str) -> list[StoredSlice]:
        """Return the slices of one pool."""
        return [each for each in self._slices.values() if each.pool == pool]

    def pools(self) -> set[str]:
        """Return the pools that have slices."""
        return {each.pool for each in self._slices.values()}

    @property
    def device_count(self) -> int:
        """The number of devices in all slices; one that moves between two slices counts once."""
        return len({(each.pool, name) for each in self._slices.values() for name in each.devices})

    def find(self, name: str) -> StoredSlice | None:
        return self._slices.get(name)

    def replace_all(self, slices: Iterable[StoredSlice]) -> bool:
        """Keep only these slices; return whether any slice is gone."""
        before, self._slices = self._slices, {each.name: each for each in slices}
        self.listed.set()
        return bool(before.keys() - self._slices.keys())

    def correct(self, new: StoredSlice, *, held: StoredSlice | None) -> None:
        """Keep a slice that was read because `held` is outdated; if the store holds another one
        meanwhile, the newer of the two."""
        if self._slices.get(new.name) is held:
            self._slices[new.name] = new
        else:
            self.apply(new)

    def apply(self, new: StoredSlice) -> bool:
        """Keep the newer of two; return whether it is the new one."""
        old = self._slices.get(new.name)
        if old is not None and not _is_newer(new.version, old.version):
            return False
        self._slices[new.name] = new
        return True

    def remove(self, name: str, uid: str) -> bool:
        """Forget a deleted slice; return whether it was held. A new slice of the same name has
        another UID."""
        old = self._slices.get(name)
        if old is None or old.uid != uid:
            return False
        del self._slices[name]
        return True


def _is_newer(one: str, other: str) -> bool:
    """Compare resource versions of one object; they are integers that grow (KEP-5504)."""
    if not (one.isdigit() and other.isdigit()):
        return one != other
    return int(one) > int(other)


class NodeOwner:
    """The UID of our Node, which owns our slices; read when it is needed."""

    def __init__(self, session: Session, node: str) -> None:
        self._session = session
        self._path = resource_path("v1", "nodes", name=node)
        self._uid: str | None = None
        self._reading = asyncio.Lock()
        self._reads = 0

    def forget(self) -> None:
        """Read it again next time: an admin may have replaced the Node, which deletes its
        slices."""
        self._uid = None

    async def uid(self, *, again: bool = False) -> str:
        """Return the UID, read again if requested; raises ApiError."""
        reads = self._reads
        async with self._reading:  # many pools ask at once
            if self._uid is None or (again and self._reads == reads):
                node = await self._session.get(self._path)
                self._uid = str(node["metadata"]["uid"])
                self._reads += 1
            return self._uid


def _path(version: str, name: str | None = None) -> str:
    return resource_path(f"{GROUP}/{version}", "resourceslices", name=name)


def slice_of(item: Mapping[str, Any]) -> StoredSlice:
    """Return the slice of an object of :class:`SliceApi`."""
    return item["slice"]


def _projected(body: dict[str, Any], version: str) -> dict[str, Any]:
    metadata = {"resourceVersion": text(body, "metadata", "resourceVersion")}
    return {"metadata": metadata, "slice": StoredSlice.of(from_version(body, version))}


def _not_served(message: str, *, method: str, path: str) -> ApiError:
    return ApiError(status=404, reason="NotServed", message=message, method=method, path=path)
