"""
The ResourceSlices of one driver on one node at the API server, in the version that it serves.

Inside of the plugin slices are those of ``resource.k8s.io/v1``, and what is watched is made small
before it is kept, page by page: as JSON, all slices of a full node are large.

It must not know what is wanted, or what is done about an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

from drakit.kube import ApiError, Listing, NotFoundError, Session, WatchEvent, resource_path
from drakit.kube.discovery import VersionNotServedError, served_version
from drakit.resource.raw import Object, text
from drakit.resource.versions import GROUP, VERSIONS, from_version, to_version
from drakit_nodeplugin.slices.stored import StoredSlice

__all__ = ("OnWrite", "SliceApi", "Verb")

Verb = Literal["create", "update", "delete"]
OnWrite = Callable[[Verb, float, bool], None]
"""Told of each write: what, for how many seconds, and whether it succeeded."""

PAGE_SIZE = 20
"""Slices a page: each has up to 128 devices, and is parsed as a whole."""


class SliceApi:
    """Also a :class:`~drakit.kube.reflector.Collection`, whose objects hold a StoredSlice each."""

    def __init__(
        self, session: Session, *, driver: str, node: str, on_write: OnWrite | None = None
    ) -> None:
        self._session = session
        self._query = {"fieldSelector": f"spec.driver={driver},spec.nodeName={node}"}
        self._on_write = on_write
        self._version: str | None = None

    # ------------------------------------------------------------ what the reflector needs

    async def list(
        self, path: str, *, params: Mapping[str, str] | None = None
    ) -> Listing[dict[str, Any]]:
        """List all of them; the path is ours."""
        version = await self._served()
        async with self._guarded():
            return await self._session.read_list(
                _path(version),
                lambda item: _small(item, version),
                params={**(params or {}), **self._query},
                page_size=PAGE_SIZE,
            )

    async def watch(
        self, path: str, *, resource_version: str, params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[WatchEvent]:
        """Watch them; resource versions are the same in all versions of the API."""
        version = await self._served()
        query = {**(params or {}), **self._query}
        async with self._guarded():
            events = self._session.watch(
                _path(version), resource_version=resource_version, params=query
            )
            async with aclosing(events):
                async for event in events:
                    if event.type != "BOOKMARK":
                        event = replace(event, object=_small(event.object, version))
                    yield event

    # ------------------------------------------------------------ single slices

    async def get(self, name: str) -> StoredSlice:
        """Read one."""
        version = await self._served()
        async with self._guarded():
            body = await self._session.get(_path(version, name))
        return StoredSlice.of(from_version(body, version))

    async def create(self, body: Object, *, dry_run: bool = False) -> dict[str, Any]:
        """Create one, and give what the API server has made of it, or would in a dry run."""
        version = await self._served()
        sent = to_version(body, version)
        async with self._guarded(), self._measured("create", dry_run=dry_run):
            answer = await self._session.create(_path(version), sent, dry_run=dry_run)
        return from_version(answer, version)

    async def replace(self, body: Object, *, dry_run: bool = False) -> dict[str, Any]:
        """Replace one, and give what the API server has made of it, or would in a dry run."""
        version = await self._served()
        path = _path(version, text(body, "metadata", "name"))
        sent = to_version(body, version)
        async with self._guarded(), self._measured("update", dry_run=dry_run):
            answer = await self._session.replace(path, sent, dry_run=dry_run)
        return from_version(answer, version)

    async def delete(self, stored: StoredSlice) -> None:
        """Delete one just as it was seen; one that is gone is fine."""
        version = await self._served()
        try:
            async with self._guarded(), self._measured("delete"):
                await self._session.delete(
                    _path(version, stored.name), uid=stored.uid, resource_version=stored.version
                )
        except NotFoundError:
            return

    # ------------------------------------------------------------ versions and measures

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
        """Tell an API version that is not served any more from a slice that is not there."""
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
            if self._on_write is not None and not dry_run:
                self._on_write(verb, loop.time() - began, ok)


def _path(version: str, name: str | None = None) -> str:
    return resource_path(f"{GROUP}/{version}", "resourceslices", name=name)


def _small(body: dict[str, Any], version: str) -> dict[str, Any]:
    metadata = {"resourceVersion": text(body, "metadata", "resourceVersion")}
    return {"metadata": metadata, "slice": StoredSlice.of(from_version(body, version))}


def _not_served(message: str, *, method: str, path: str) -> ApiError:
    return ApiError(status=404, reason="NotServed", message=message, method=method, path=path)
