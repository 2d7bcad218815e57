"""
The ResourceSlices of one driver on one node in the API server: requests in the served API version,
a store of the slices, the Node that owns them, and the writes for a pool.

The node plugin represents slices as in ``resource.k8s.io/v1``. Listed slices are projected page by
page, because all slices of a full node are large as JSON. The response to a write and the watch
both report a slice, in any order, so the newer report applies. After etcd has been restored, a new
slice can have a lower version than an old one. Therefore, the results of a list, and of a read
after a conflict, apply regardless of their versions.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeVar

from drakit_daemon.backoff import Backoff
from drakit_daemon.kube import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    Listing,
    NotFoundError,
    Session,
    WatchEvent,
    resource_path,
)
from drakit_daemon.kube.discovery import VersionNotServedError, served_version
from drakit_formats.resource.device import Feature, dropped_from_slice, forbidden_features, refusal
from drakit_formats.resource.objects import GROUP, VERSIONS, Object, from_version, text, to_version
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.devices.model import DesiredDevice
from drakit_nodeplugin.slices.contents import (
    Difference,
    SliceContent,
    StoredSlice,
    compare_contents,
)
from drakit_nodeplugin.slices.plan import KnownSlice, Plan, SliceWrite

logger = logging.getLogger(__name__)

Verb = Literal["create", "update", "delete"]
OnWrite = Callable[[Verb, float, bool], None]
"""Called after each write, with the verb, the duration in seconds, and whether the write
succeeded."""

KeptT = TypeVar("KeptT")

PAGE_SIZE = 20
"""Number of slices per page. A slice has up to 128 devices, and a page is parsed as a whole."""

MAX_KEPT = 1000
"""Maximum number of features and extra fields to remember as kept. Beyond that, all are checked
again."""

RETRY_SECONDS = (2.0, 60.0)
"""Initial and maximum delay after a failed write. The delay doubles each time, with jitter."""


class SliceApi:
    """Makes requests in the served API version. It is also a
    :class:`~drakit_daemon.kube.reflector.Collection`."""

    def __init__(self, session: Session, *, driver: str, node: str, on_write: OnWrite) -> None:
        self._session = session
        self._query = {"fieldSelector": f"spec.driver={driver},spec.nodeName={node}"}
        self._on_write = on_write
        self._version: str | None = None
        self._followed = VERSIONS[0]
        """The version of the latest list or watch. A write may discover another version in the
        meantime."""

    # ------------------------------------------------------------ for the reflector

    def project(self, body: dict[str, Any]) -> StoredSlice:
        """Return the slice of a listed or watched object."""
        return StoredSlice.of(from_version(body, self._followed))

    async def read_list(
        self,
        path: str,
        keep: Callable[[dict[str, Any]], KeptT],
        *,
        params: Mapping[str, str] | None = None,
        page_size: int = PAGE_SIZE,
    ) -> Listing[KeptT]:
        """List all slices. Ignores the reflector's path and page size."""
        self._followed = await self._served()
        query = {**(params or {}), **self._query}
        async with self._guarded():
            return await self._session.read_list(
                _path(self._followed), keep, params=query, page_size=PAGE_SIZE
            )

    async def watch(
        self, path: str, *, resource_version: str, params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[WatchEvent]:
        """Watch all slices. Resource versions are the same in all versions of the API."""
        self._followed = await self._served()
        query = {**(params or {}), **self._query}
        async with self._guarded():
            events = self._session.watch(
                _path(self._followed), resource_version=resource_version, params=query
            )
            async with aclosing(events):
                async for event in events:
                    yield event

    # ------------------------------------------------------------ single slices

    async def get(self, name: str) -> StoredSlice:
        """Return the slice with a name, which may belong to another driver or node."""
        version = await self._served()
        async with self._guarded():
            body = await self._session.get(_path(version, name))
        return StoredSlice.of(from_version(body, version))

    async def write(self, body: Object, *, exists: bool, dry_run: bool = False) -> dict[str, Any]:
        """Create or replace a slice. Return it as stored by the API server, or, with `dry_run`, as
        it would be stored."""
        version = await self._served()
        sent = to_version(body, version)
        verb = "update" if exists else "create"
        async with self._guarded(None if dry_run else verb):
            if exists:
                path = _path(version, text(body, "metadata", "name"))
                answer = await self._session.replace(path, sent, dry_run=dry_run)
            else:
                answer = await self._session.create(_path(version), sent, dry_run=dry_run)
        return from_version(answer, version)

    async def delete(self, stored: StoredSlice) -> None:
        """Delete exactly this version of a slice. A missing slice is not an error."""
        version = await self._served()
        try:
            async with self._guarded("delete"):
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
    async def _guarded(self, verb: Verb | None = None) -> AsyncGenerator[None]:
        """Distinguish an API version that is no longer served from a missing slice. For writes,
        also measure the request."""
        loop = asyncio.get_running_loop()
        began, ok = loop.time(), False
        try:
            yield
            ok = True
        except NotFoundError as error:
            if error.details.get("name"):
                ok = verb == "delete"
                raise
            self._version = None
            raise _not_served(error.message, method=error.method, path=error.path) from error
        finally:
            if verb is not None:
                self._on_write(verb, loop.time() - began, ok)


class SliceStore:
    """The known slices, keyed by name. Empty until all slices have been listed once."""

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
        """The number of devices in all slices. A device that is moving between two slices is
        counted once."""
        return len({(each.pool, name) for each in self._slices.values() for name in each.devices})

    def find(self, name: str) -> StoredSlice | None:
        return self._slices.get(name)

    def replace_all(self, slices: Iterable[StoredSlice]) -> bool:
        """Keep only these slices. Return whether any slice was removed."""
        before, self._slices = self._slices, {each.name: each for each in slices}
        self.listed.set()
        return bool(before.keys() - self._slices.keys())

    def correct(self, new: StoredSlice, *, held: StoredSlice | None) -> None:
        """Store a slice that was read because `held` is outdated. If `held` has been replaced in
        the meantime, keep the newer version."""
        if self._slices.get(new.name) is held:
            self._slices[new.name] = new
        else:
            self.apply(new)

    def apply(self, new: StoredSlice) -> bool:
        """Store a slice unless the stored version is newer. Return whether it was stored. Resource
        versions of an object are increasing integers (KEP-5504)."""
        if (old := self._slices.get(new.name)) is not None:
            one, other = new.version, old.version
            numbered = one.isdigit() and other.isdigit()
            is_newer = int(one) > int(other) if numbered else one != other
            if not is_newer:
                return False
        self._slices[new.name] = new
        return True

    def remove(self, name: str, uid: str) -> bool:
        """Forget a deleted slice. Return whether it was stored. A new slice with the same name has
        a different UID."""
        old = self._slices.get(name)
        if old is None or old.uid != uid:
            return False
        del self._slices[name]
        return True


class NodeOwner:
    """The UID of this plugin's Node, which owns the slices. The UID is read when it is needed."""

    def __init__(self, session: Session, node: str) -> None:
        self._session = session
        self._path = resource_path("v1", "nodes", name=node)
        self._uid: str | None = None
        self._reading = asyncio.Lock()
        self._reads = 0

    def forget(self) -> None:
        """Read the UID again next time, because an administrator may have replaced the Node, which
        deletes its slices."""
        self._uid = None

    async def uid(self, *, again: bool = False) -> str:
        """Return the UID, read again if requested. Raises ApiError."""
        reads = self._reads
        async with self._reading:  # many pools may request the UID at the same time
            if self._uid is None or (again and self._reads == reads):
                node = await self._session.get(self._path)
                self._uid = str(node["metadata"]["uid"])
                self._reads += 1
            return self._uid


def _path(version: str, name: str | None = None) -> str:
    return resource_path(f"{GROUP}/{version}", "resourceslices", name=name)


def _not_served(message: str, *, method: str, path: str) -> ApiError:
    return ApiError(status=404, reason="NotServed", message=message, method=method, path=path)


# ---------------------------------------------------------------- writes for a pool


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolContext:
    """The objects that all pools of a driver share."""

    manager: DeviceManager
    node: str
    owner: NodeOwner
    api: SliceApi
    store: SliceStore
    dropped: Callable[[], Collection[Feature]]
    """Returns the features that the API server is known to drop."""

    on_dropped: Callable[[Collection[Feature]], bool]
    """Called with the features that are missing from a response. Returns whether this invalidates
    plans."""

    kept: set[Feature | str]
    """The features and paths of extra fields that the API server keeps, as dry runs have shown."""

    on_name_taken: Callable[[str], None]
    """Called with a message about an object that uses the name of a slice."""

    on_rejected: Callable[[Mapping[str, str]], None]
    """Called with the reasons why devices are not published, keyed by ``pool/device`` with the
    driver's pool names."""


class StaleError(Exception):
    """The plan is outdated. Plan again."""


class DroppedError(Exception):
    """The API server drops fields, so the plan is wrong. Plan again immediately, because published
    devices may lack these fields, or the pool may be incomplete. Several pools can raise this for
    the same feature."""


class Verdict(Enum):
    """The result of the dry runs for a plan."""

    ACCEPTED = "accepted"
    PLAN_AGAIN = "plan again"
    """The API server rejected the plan. It may accept a new plan without the rejected devices or
    slices."""

    REFUSED = "refused"


class PoolWriter:
    """
    Makes the writes for one pool. All times are in loop time.

    The responses of the API server show what it does not accept:

    * Another client may have created a slice for another driver or node under a name that the pool
      needs. New slices then get unguessable names.
    * A device that is named in a rejection is rejected until it changes.
    * A slice that is rejected for any other reason is retried later, because a policy of the
      cluster may have rejected it. The other slices are still written, unless the pool would be
      incomplete.
    * An API server that does not support a field drops it silently.
    """

    def __init__(self, pool: str, context: PoolContext) -> None:
        self.known: dict[str, KnownSlice] = {}
        """The slices that were correct after their last write or check, keyed by name."""

        self.error: str | None = None
        """The reason why the API server rejects slices, or None."""

        self.refused: dict[str, SliceContent] = {}
        """The rejected contents, keyed by slice name."""

        self.refused_layout: dict[str, SliceContent] = {}
        """The contents that dry runs have rejected, keyed by slice name. Their plan was not
        written."""

        self.refused_devices: dict[str, tuple[DesiredDevice, str]] = {}
        """The devices named in rejections, with the reasons, keyed by name."""

        self.retry_at = 0.0
        """The time at which rejected slices are retried."""

        self.secret = b""
        """The secret in the names of new slices. Empty until a name is taken."""

        self._renaming = False
        """Whether a name was found to be taken in the last round."""

        self._context = context
        self._pool = pool
        self._facts = {"driver": context.manager.driver, "pool": pool}
        self._retry = Backoff(*RETRY_SECONDS)

    def forget(self) -> None:
        """Retry rejected slices, because the API server may accept them now."""
        self.known.clear()
        self.refused.clear()
        self.refused_layout.clear()
        self.refused_devices.clear()

    async def check(self, plan: Plan) -> Verdict:
        """
        Use dry runs to detect rejections and dropped fields that must be known before the first
        write.

        A rejection between the writes of a layout would leave the pool incomplete. An API server
        that drops taints would make a broken device available, even if only briefly. Some other
        dropped fields have the same effect.
        """
        writes = (*plan.replace, *plan.create)
        if plan.changes_layout and any(map(self._is_refused, writes)):
            return Verdict.REFUSED
        verdict = Verdict.PLAN_AGAIN
        errors: list[ApiError] = []
        refused: dict[str, SliceContent] = {}
        for write in writes:
            unproven = write.needs - self._context.kept
            if not (plan.changes_layout and write.changed) and not unproven:
                continue
            try:
                await self._send(write, dry_run=True)
            except (InvalidError, ForbiddenError) as error:
                if isinstance(error, ForbiddenError) and not plan.changes_layout:
                    raise
                errors.append(error)
                refused[write.name] = write.content
                if not self._note_refusal(write, error) and plan.changes_layout:
                    verdict = Verdict.REFUSED
                    break
        if not errors:
            return Verdict.ACCEPTED
        if plan.changes_layout:
            self.refused_layout = refused
        else:
            self.refused |= refused
        self._fail(errors)
        return verdict

    def _is_refused(self, write: SliceWrite) -> bool:
        """Return whether dry runs have rejected this content, ignoring taints."""
        before = self.refused_layout.get(write.name)
        return before is not None and compare_contents(before, write.content) in (
            Difference.NONE,
            Difference.TAINTS,
        )

    def _fail(self, errors: Sequence[ApiError]) -> None:
        self.error = "; ".join(map(str, errors))
        self.retry_at = asyncio.get_running_loop().time() + self._retry.next_seconds()

    async def write(self, plan: Plan) -> bool:
        """Make the writes of a plan. Return whether the rest of the pool must be planned again,
        without devices that the API server rejects."""
        errors: list[ApiError] = []
        again = False
        for each in plan.delete:
            await self._delete(each)
        for write in (*plan.replace, *plan.create):
            try:
                await self._send(write)
            except InvalidError as error:
                errors.append(error)
                self.refused[write.name] = write.content
                again |= self._note_refusal(write, error)
        if not plan.empty:
            facts = {"creates": len(plan.create), "updates": len(plan.replace)}
            facts |= {"deletes": len(plan.delete)}
            logger.info("slices published", extra=self._facts | facts)
        self._renaming = False
        if errors:
            self._fail(errors)
        elif not self.refused and not self.refused_layout:
            self.error = None
            self._retry.succeeded()
        return again

    async def _delete(self, stored: StoredSlice) -> None:
        try:
            await self._context.api.delete(stored)
        except ConflictError:
            await self._read(stored.name)
            raise
        self._context.store.remove(stored.name, stored.uid)
        self.known.pop(stored.name, None)

    async def _send(self, write: SliceWrite, *, dry_run: bool = False) -> None:
        api, body = self._context.api, write.body()
        try:
            answer = await api.write(body, exists=write.stored is not None, dry_run=dry_run)
        except AlreadyExistsError:
            found = await self._read(write.name)
            if found is None or not self._is_ours(found):
                self._rename(write.name, found)
            raise
        except (ConflictError, NotFoundError):
            # Read the slice, because the store is outdated.
            await self._read(write.name)
            raise
        except ForbiddenError as error:
            if self._context.on_dropped(forbidden_features(error.message, body)):
                raise DroppedError from error
            raise
        dropped = dropped_from_slice(body, answer)
        if dry_run:
            # Another pool may have already reported the dropped fields.
            if self._context.on_dropped(dropped) or dropped & write.needed_features:
                raise DroppedError
            if len(self._context.kept) > MAX_KEPT:  # the driver keeps using new field names
                self._context.kept.clear()
            self._context.kept.update(write.needs)
            return
        stored = StoredSlice.of(answer)
        self._context.store.apply(stored)
        self.known[write.name] = KnownSlice(
            version=stored.version, content=write.content, owner=write.pool.node_uid
        )
        self.refused.pop(write.name, None)
        if dropped and self._context.on_dropped(dropped):
            raise DroppedError

    def _note_refusal(self, write: SliceWrite, error: ApiError) -> bool:
        """Return whether the rejection names devices. These devices are rejected from now on."""
        found = refusal(error.details, write.body())
        if self._context.on_dropped(found.features):
            raise DroppedError from error
        logger.error(
            "the API server rejects a slice",
            extra=self._facts | {"slice": write.name, "error": str(error)},
        )
        named = {name: why for name, why in found.devices.items() if name in write.content.devices}
        for name, why in named.items():
            device = write.content.devices[name]
            self.refused_devices[name] = (device, f"the API server rejects it: {why}")
        return bool(named)

    def _rename(self, name: str, found: StoredSlice | None) -> None:
        """Give new slices unguessable names, from the next round on."""
        self.secret = secrets.token_bytes(16)
        if found is not None:  # otherwise, the slice is already deleted, and may have been ours
            node = f"node {found.node}" if found.node else "not bound to one node"
            note = (
                f"the node plugin uses different names for new slices of pool {self._pool} of "
                f"driver {self._context.manager.driver}, because ResourceSlice {name} already "
                f"exists (driver {found.driver}, pool {found.pool}, {node}); identify the client "
                f"that created it, and delete the slice"
            )
            logger.warning("a slice's name is taken", extra=self._facts | {"error": note})
            self._context.on_name_taken(note)
        if not self._renaming:
            self._renaming = True
            raise StaleError

    def _is_ours(self, found: StoredSlice) -> bool:
        context = self._context
        ours = (context.manager.driver, context.node, self._pool)
        return (found.driver, found.node, found.pool) == ours

    async def _read(self, name: str) -> StoredSlice | None:
        """Read a slice again, because the stored version is outdated. The slice may now belong to
        another node."""
        store = self._context.store
        held = store.find(name)
        try:
            found = await self._context.api.get(name)
        except NotFoundError:
            found = None
        if found is not None and self._is_ours(found):
            store.correct(found, held=held)
        elif (gone := store.find(name)) is not None and gone.pool == self._pool:
            store.remove(name, gone.uid)
        return found
