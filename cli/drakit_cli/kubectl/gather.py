"""
Gathers the facts of a cluster with the user's permissions.

If the user is not allowed to list a kind, the result is limited: a :class:`Gap` describes which
checks are missing. The same applies to an object that cannot be read. Does not depend on how the
facts are used.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from drakit_cli.answers import CommandError
from drakit_daemon.kube import (
    ApiError,
    ForbiddenError,
    NotFoundError,
    Session,
    UnauthorizedError,
    resource_path,
)
from drakit_daemon.kube.discovery import served_versions, version_of
from drakit_daemon.kube.listing import Listing
from drakit_explain.evidence import NO_EVENTS, Events
from drakit_explain.kinds import RULES, UNREADABLE, Kind
from drakit_explain.model import TaintRuleFacts
from drakit_explain.selectors import FeatureGates
from drakit_explain.world import Fact, World
from drakit_formats.resource.objects import GROUP, RULE_VERSIONS, VERSIONS, Object, child

PAGE_SIZE = 2_000
"""The number of objects per page of a list. With kubectl's page size of 500, the API server takes
more than twice as long for 100,000 claims."""

MAX_PAGE_BYTES = 16 << 20
"""Maximum size of a page. It can be large, because a command keeps few pages in memory, and runs
only briefly. A page of full slices is larger, and is requested again with fewer objects."""


Item = TypeVar("Item")


PREFIXES = ("DRA", "DynamicResourceAllocation", "ResourceHealthStatus")
"""Names or name prefixes of the feature gates related to device allocation."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)")


def minor_of(version: str) -> tuple[int, int] | None:
    """Return the major and minor number of a version, or None."""
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2])) if found else None


class UnreachableError(CommandError):
    """The API server does not respond, or denies everything that the command needs."""

    exit_code = 3


class MissingError(CommandError):
    """The object that the user specified does not exist."""

    exit_code = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """A kind that could not be read, and the effect on the result."""

    kind: str
    """The plural name of the kind."""

    group: str = ""
    """The API group of the kind, if the cause is that the user is not allowed to list it."""

    where: str = ""
    """The unknown part of the kind, such as a namespace, "other namespaces" or the name of an
    object. An empty string means all objects."""

    what: str
    effect: str
    forbidden: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.effect}"


def gap_of(
    error: Exception,
    kind: str,
    *,
    denied: str,
    failed: str,
    effect: str,
    group: str = "",
    where: str = "",
) -> Gap:
    """
    Return the gap that an API server error causes.

    :param denied: the action that the user is not allowed to perform, for an error about
        permissions.
    :param failed: the beginning of the message for any other error.
    """
    forbidden = isinstance(error, ForbiddenError)
    what = f"no permission to {denied}" if forbidden else f"{failed}: {error}"
    return Gap(kind=kind, group=group, where=where, what=what, effect=effect, forbidden=forbidden)


def unread(what: str, path: str, error: Exception, effect: str) -> Gap:
    """Return a gap for data about the API server itself, such as its version."""
    what = f"{what} of the API server"
    denied, failed = f"read {what} ({path})", f"{what} cannot be read"
    return gap_of(error, path, denied=denied, failed=failed, effect=effect)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """The facts that the user can see, and the gaps."""

    world: World = field(default_factory=World)
    version: str = VERSIONS[0]
    served: tuple[str, ...] = ()
    kubernetes: str = ""
    """The version of the API server, such as ``v1.36.3``, or an empty string."""

    gaps: list[Gap] = field(default_factory=list[Gap])
    gates: FeatureGates = field(default_factory=FeatureGates)
    """The feature gates of the API server, if they matter and the user is allowed to read them."""

    enabled: Mapping[str, bool] | None = None
    """All feature gates of the API server, if they were read."""

    events: Events = NO_EVENTS
    """Events about pods and claims."""

    absent: set[str] = field(default_factory=set[str])
    """The plural names of drakit's kinds that the cluster does not serve."""

    @property
    def minor(self) -> tuple[int, int] | None:
        """The major and minor number of the API server's version, or None."""
        return minor_of(self.kubernetes)

    @property
    def gates_of_devices(self) -> dict[str, bool]:
        """The feature gates related to device allocation. Empty if the user is not allowed to read
        the gates."""
        enabled = self.enabled or {}
        return {name: enabled[name] for name in sorted(enabled) if name.startswith(PREFIXES)}

    def lacks(self, *kinds: Kind) -> bool:
        """Return whether any facts of these kinds are unknown."""
        return any(gap.kind == kind.plural for gap in self.gaps for kind in kinds)

    def lacks_all(self, kind: Kind) -> bool:
        """Return whether all objects of a kind are unknown."""
        return self.failed_list(kind) is not None

    def failed_list(self, kind: Kind) -> Gap | None:
        """Return the gap of a kind whose objects could not be listed, or None."""
        return next((gap for gap in self.gaps if gap.kind == kind.plural and not gap.where), None)

    def require(self, *kinds: Kind) -> None:
        """Raise :class:`UnreachableError` if the objects of a kind could not be listed."""
        for kind in kinds:
            if failed := self.failed_list(kind):
                raise UnreachableError(failed.what)


async def read_pages(
    session: Session,
    path: str,
    project: Callable[[dict[str, Any]], Item],
    params: Mapping[str, str] | None = None,
) -> Listing[Item]:
    """List objects in pages; raises ApiError."""
    return await session.read_list(
        path, project, params=params, page_size=PAGE_SIZE, max_page_bytes=MAX_PAGE_BYTES
    )


async def gather(
    session: Session,
    kinds: Iterable[Kind],
    *,
    namespace: str,
    names: Mapping[Kind, Iterable[str]] | None = None,
    local: Collection[Kind] = (),
) -> Gathered:
    """
    List kinds in all namespaces. If that is denied, list a kind in one namespace, or read objects
    by name.

    :param names: names of objects in the namespace to read one by one if listing is denied.
    :param local: kinds of which only the objects in the namespace matter.
    """
    try:
        served = await served_versions(session, GROUP)
    except ForbiddenError:
        served = VERSIONS[:1]
    except ApiError as error:
        raise UnreachableError(str(error)) from None
    version = next((each for each in VERSIONS if each in served), None)
    if version is None:
        has = f"only {', '.join(served)}" if served else "no version"
        raise UnreachableError(
            f"the API server serves {has} of the API group {GROUP}, and drakit needs one of "
            f"{', '.join(VERSIONS)}: enable one, or upgrade the cluster"
        )
    reader = _Reader(session, Gathered(version=version, served=served), namespace, local)
    chosen = list(kinds)
    named = names or {}
    await asyncio.gather(*(reader.read(kind, tuple(named.get(kind, ()))) for kind in chosen))
    # Use a fixed order, so that a watched result does not depend on the order of the responses.
    order = {kind.plural: number for number, kind in enumerate(chosen)}
    reader.found.gaps.sort(key=lambda gap: (order.get(gap.kind, 0), gap.where))
    needed = [kind for kind in chosen if kind is not RULES and not kind.is_ours]
    if chosen and all(reader.found.lacks_all(kind) for kind in needed):
        raise UnreachableError(str(reader.found.gaps[0].what))
    return reader.found


async def with_release(session: Session, found: Gathered, effect: str = "") -> Gathered:
    """
    Add the Kubernetes release. If it is unknown, the rules of the newest release apply.

    :param effect: the checks that are missing if the release is unknown. Empty if the result does
        not need to mention them.
    """
    try:
        version = str((await session.get("/version")).get("gitVersion") or "")
    except ApiError as error:
        if effect:
            found.gaps.append(unread("version", "/version", error, effect))
        return found
    found = replace(found, kubernetes=version)
    found.world.use_release(found.minor[1] if found.minor is not None else None)
    return found


class _Reader:
    def __init__(
        self, session: Session, found: Gathered, namespace: str, local: Collection[Kind]
    ) -> None:
        self.found = found
        self._session = session
        self._namespace = namespace
        self._local = local

    async def read(self, kind: Kind, names: tuple[str, ...]) -> None:
        if kind is RULES:
            await self._rules()
            return
        try:
            await self._list(kind, self._namespace if kind in self._local else None)
        except NotFoundError as error:
            if kind.is_ours:
                self.found.absent.add(kind.plural)
            else:
                self._fail(kind, error)
        except ForbiddenError as error:
            if not await self._is_unknown(kind):
                await self._narrower(kind, names, error)
        except ApiError as error:
            self._fail(kind, error)

    async def _is_unknown(self, kind: Kind) -> bool:
        """
        Return whether the cluster does not have one of drakit's kinds.

        The API server checks permissions before it looks up the kind, so it can deny access to a
        kind that does not exist. More permissions would not help then.
        """
        if not kind.is_ours:
            return False
        try:
            return kind.versions[0] not in await served_versions(self._session, kind.group)
        except ApiError:
            return False

    async def _narrower(self, kind: Kind, names: tuple[str, ...], error: ApiError) -> None:
        """Read as much as the user is allowed to read of a kind that cannot be listed in all
        namespaces."""
        if kind.namespaced and kind not in self._local:
            try:
                await self._list(kind, self._namespace)
            except ForbiddenError:
                pass
            except ApiError as other:
                self._fail(kind, other)
                return
            else:
                where = "other namespaces"
                gap = Gap(
                    kind=kind.plural,
                    group=kind.group,
                    where=where,
                    what=f"no permission to list {kind.word} of {where}",
                    effect=kind.effect,
                    forbidden=True,
                )
                self.found.gaps.append(gap)
                return
        if not names or not all([await self._get(kind, name) for name in names]):
            self._fail(kind, error)

    async def _get(self, kind: Kind, name: str) -> bool:
        """Read one object. Return False if an error prevents it, so that it is unknown whether the
        object exists."""
        namespace = self._namespace if kind.namespaced else None
        path = resource_path(self._api(kind), kind.plural, namespace=namespace, name=name)
        try:
            body = await self._session.get(path)
        except NotFoundError:
            return True
        except ApiError:
            return False
        self._keep([self._project(kind, self.found.version, body)])
        return True

    async def _list(self, kind: Kind, namespace: str | None, version: str = "") -> None:
        version = version or self._version(kind)
        path = resource_path(self._api(kind, version), kind.plural, namespace=namespace)
        project = partial(self._project, kind, version)
        listing = await read_pages(self._session, path, project)
        self._keep(listing.items)
        self._keep(self._unread(kind, skipped.metadata) for skipped in listing.skipped)

    async def _rules(self) -> None:
        """List DeviceTaintRules in the first served version that contains them."""
        known = [each for each in RULE_VERSIONS if each in self.found.served]
        try:
            version = await version_of(self._session, GROUP, RULES.plural, known)
            if version is None:
                self.found.absent.add(RULES.plural)
            else:
                await self._list(RULES, None, version)
        except ApiError as error:
            self._fail(RULES, error)

    def _keep(self, facts: Iterable[Fact | None]) -> None:
        for fact in facts:
            if fact is not None:
                self.found.world.apply(fact)

    def _project(self, kind: Kind, version: str, body: dict[str, Any]) -> Fact | None:
        metadata = child(body, "metadata")
        try:
            fact = kind.project(body, version)
        except UNREADABLE:
            return self._unread(kind, metadata)
        if isinstance(fact, TaintRuleFacts) and fact.unsupported:
            self.found.gaps.append(
                Gap(
                    kind=RULES.plural,
                    where=fact.name,
                    what=f"DeviceTaintRule {fact.name} selects devices by class or CEL",
                    effect="its taint is not checked",
                )
            )
        return fact

    def _unread(self, kind: Kind, metadata: Object) -> Fact | None:
        """Return a fact that contains only the existence of an object."""
        name = str(metadata.get("name"))
        self.found.gaps.append(
            Gap(
                kind=kind.plural,
                where=name,
                what=f"{kind.word[:-1]} {name} cannot be read",
                effect="it is not checked",
            )
        )
        try:
            return kind.project({**kind.unknown, "metadata": metadata}, VERSIONS[0])
        except UNREADABLE:
            return None

    def _fail(self, kind: Kind, error: ApiError) -> None:
        if isinstance(error, UnauthorizedError):
            raise UnreachableError(sentence_of(error))
        self.found.world.hidden |= {kind.type}
        if kind.effect:
            self.found.gaps.append(
                gap_of(
                    error,
                    kind.plural,
                    denied=f"list {kind.word}",
                    failed=kind.word,
                    effect=kind.effect,
                    group=kind.group,
                )
            )

    def _version(self, kind: Kind) -> str:
        return self.found.version if kind.group == GROUP else kind.versions[0]

    def _api(self, kind: Kind, version: str = "") -> str:
        version = version or self._version(kind)
        return f"{kind.group}/{version}" if kind.group else version


def sentence_of(error: ApiError) -> str:
    """Explain an API server error to a user."""
    if isinstance(error, ForbiddenError):
        return error.message
    return str(error)
