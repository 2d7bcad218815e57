"""
The policies that configure a running driver. They are watched, validated one by one, and stored on
the node.

If a policy is invalid, its last valid version remains in effect, unless that version belongs to an
earlier object with the same name. Without the resource (404) or the permission to read it (403),
there are no policies unless the node has stored some;
:class:`~drakit_daemon.kube.reflector.Reflector` logs the error and retries.

The node stores a copy of the policies that the driver applied last. The copy applies until the API
server has listed the policies. Without the copy, a plugin that starts without the API server would
withdraw devices. The file contains the policies as received from the API server, so that each
version of a driver validates them itself. A damaged file is quarantined, and the API server's list
replaces it.

Policy types are vendor code, so they are called in a thread instead of the daemon's loop.
:mod:`drakit_driver.runtime.policies` passes the policies to the driver. The module does not depend
on devices or reports.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import orjson

from drakit.driver import DevicePolicy, Policy
from drakit.layout import write_private
from drakit_daemon.kube import ApiError, ForbiddenError, NotFoundError, Session, resource_path
from drakit_daemon.kube.reflector import Applied, Deleted, Reflector, Replaced
from drakit_daemon.logs import ProblemLog
from drakit_driver.runtime.contract import PolicyTraits
from drakit_driver.runtime.policies import AnyPolicies, InvalidPolicyError, PolicyFeed, read_policy
from drakit_nodeplugin.changes import Revision
from drakit_nodeplugin.host.absence import Absence

logger = logging.getLogger(__name__)

FILE = "policies.json"
"""The name of the copy in the driver's data directory."""

MAX_POLICIES = 256
"""Maximum number of policies in effect per driver. If there are more, the oldest ones apply."""

RETRY_SECONDS = (1.0, 60.0)
"""Initial and maximum delay before the policies are listed again."""

SAVE_RETRY_SECONDS = 30.0
"""Delay before a failed write of the copy is retried."""

_NEVER = datetime.fromtimestamp(0, UTC)


# ---------------------------------------------------------------- the copy on the node

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPolicy:
    """A policy as received from the API server."""

    name: str
    uid: str
    created: str
    """The policy's ``metadata.creationTimestamp``."""

    generation: int
    spec: Mapping[str, Any] | None
    """The spec. None if it is missing or unreadable."""


def read_policies(path: Path, *, quarantine: bool = True) -> list[StoredPolicy] | None:
    """
    Return the stored policies, or None if there is no usable file.

    :param quarantine: whether to rename a damaged file. If False, the damage is only logged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.error("policies cannot be read", extra={"file": str(path), "error": str(error)})
        return None
    try:
        body = cast("dict[str, Any]", orjson.loads(content))
        if body["version"] != VERSION:  # another release may still need the file
            facts = {"file": str(path), "version": body["version"]}
            logger.warning("policies of another version are not used", extra=facts)
            return None
        if body["checksum"] != zlib.crc32(orjson.dumps(body["policies"])):
            raise ValueError("its checksum is wrong")
        return [StoredPolicy(**each) for each in body["policies"]]
    except (ValueError, TypeError, KeyError) as error:
        if not quarantine:
            facts = {"file": str(path), "error": str(error)}
            logger.error("policies are damaged", extra=facts)
            return None
        aside = path.with_name(f"{path.name}.damaged")
        facts = {"file": str(path), "moved_to": str(aside), "error": str(error)}
        logger.error("damaged policies quarantined", extra=facts)
        try:
            path.replace(aside)
        except OSError as failure:
            facts = {"file": str(path), "error": str(failure)}
            logger.error("damaged policies cannot be quarantined", extra=facts)
        return None


def write_policies(path: Path, policies: Collection[StoredPolicy]) -> None:
    """Replace the file. Raises OSError."""
    listed = orjson.loads(orjson.dumps(sorted(policies, key=lambda each: each.name)))
    body = {
        "version": VERSION,
        "checksum": zlib.crc32(orjson.dumps(listed)),
        "policies": listed,
    }
    write_private(path, orjson.dumps(body))


# ---------------------------------------------------------------- policies in effect


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedPolicy:
    """A policy from the API server, with the result of its validation."""

    stored: StoredPolicy
    policy: Policy[Any] | None
    """The policy. None if it is invalid."""

    problem: str = ""
    """The reason why the policy is invalid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyState:
    """The state of a policy, for reports."""

    name: str
    uid: str
    observed_generation: int
    """The latest generation that the node plugin has seen."""

    generation: int | None
    """The last valid generation, if the driver has applied it, otherwise None."""

    problem: str = ""


def check(policy: StoredPolicy, kind: type[DevicePolicy] | None) -> CheckedPolicy:
    """Validate a policy. Runs vendor code, and may block. `kind` is None for a backend, which
    validates its policies itself."""
    try:
        created = datetime.fromisoformat(policy.created) if policy.created else _NEVER
        valid = read_policy(
            kind,
            name=policy.name,
            created=created,
            generation=policy.generation,
            spec=policy.spec,
        )
    except (InvalidPolicyError, ValueError) as error:
        return CheckedPolicy(stored=policy, policy=None, problem=str(error))
    return CheckedPolicy(stored=policy, policy=valid)


class PolicyTable:
    """The latest version and the last valid version of each policy."""

    def __init__(self) -> None:
        self._newest: dict[str, CheckedPolicy] = {}
        self._valid: dict[str, CheckedPolicy] = {}
        self._refused: dict[str, CheckedPolicy] = {}
        """The latest versions that the driver's backend has found invalid."""

    def replace(self, policies: Collection[CheckedPolicy]) -> None:
        """Replace all policies."""
        for name in self._newest.keys() - {each.stored.name for each in policies}:
            self.remove(name)
        for each in policies:
            self.apply(each)

    def apply(self, policy: CheckedPolicy) -> None:
        """Add or change a policy."""
        name = policy.stored.name
        known = self._valid.get(name)
        refused = self._refused.pop(name, None)
        if refused is not None and refused.stored == policy.stored:
            self._refused[name] = refused  # the policy is listed again
            return
        if known is not None and known.stored == policy.stored:
            policy = known  # keep the same object, because the policy in effect does not change
        self._newest[name] = policy
        if policy.policy is not None:
            self._valid[name] = policy
        elif known is not None and known.stored.uid != policy.stored.uid:
            del self._valid[name]

    def refuse(self, policy: CheckedPolicy, problem: str, *, applied: CheckedPolicy | None) -> None:
        """Handle a policy that the driver's backend has found invalid. The last applied version
        remains valid, unless it is this one."""
        name = policy.stored.name
        if self._valid.get(name) is not policy:
            return  # the policy has changed, or was deleted
        if self._newest[name] is policy:
            self._refused[name] = policy
            self._newest[name] = replace(policy, policy=None, problem=problem)
        del self._valid[name]
        if applied is None or applied is policy:
            return
        if applied.stored.uid == policy.stored.uid:
            self._valid[name] = applied

    def reconsider(self) -> None:
        """Treat policies that a backend has refused as valid again, because another backend may
        accept them."""
        for name, policy in self._refused.items():
            self._newest[name] = self._valid[name] = policy
        self._refused.clear()

    def has(self, policy: StoredPolicy) -> bool:
        """Return whether this is the latest version of a policy, unchanged."""
        known = self._newest.get(policy.name)
        return known is not None and known.stored == policy

    def remove(self, name: str) -> None:
        """Remove a deleted policy."""
        for known in (self._newest, self._valid, self._refused):
            known.pop(name, None)

    @property
    def valid(self) -> Sequence[CheckedPolicy]:
        """Return the last valid version of each policy, oldest first, up to
        :data:`MAX_POLICIES`."""
        return self._by_age()[:MAX_POLICIES]

    def states(self, applied: AnyPolicies) -> Sequence[PolicyState]:
        """Return the state of each policy, sorted by name. `applied` are the policies that the
        driver applied last."""
        too_many = {each.stored.name for each in self._by_age()[MAX_POLICIES:]}
        return [self._state(name, too_many, applied.get(name)) for name in sorted(self._newest)]

    def _state(
        self, name: str, too_many: Collection[str], applied: Policy[Any] | None
    ) -> PolicyState:
        newest, valid = self._newest[name], self._valid.get(name)
        problem = newest.problem
        if problem and valid is not None:
            problem = f"{problem} (generation {valid.stored.generation} stays in effect)"
        elif not problem and name in too_many:
            problem = (
                f"{MAX_POLICIES} older policies are in effect, the maximum; delete unused policies"
            )
            valid = None
        if valid is not None and valid.policy is not applied:
            # The driver still uses an earlier version, or a deleted policy with this name.
            valid = None
        return PolicyState(
            name=name,
            uid=newest.stored.uid,
            observed_generation=newest.stored.generation,
            generation=None if valid is None else valid.stored.generation,
            problem=problem,
        )

    def _by_age(self) -> list[CheckedPolicy]:
        def age(each: CheckedPolicy) -> tuple[datetime, str]:
            created = _NEVER if each.policy is None else each.policy.created
            return created, each.stored.name

        return sorted(self._valid.values(), key=age)


# ---------------------------------------------------------------- watching


class PolicyWatch:
    """Follows the policies of one driver."""

    def __init__(
        self,
        driver: str,
        traits: PolicyTraits,
        *,
        directory: Path,
        session: asyncio.Future[Session],
        feed: PolicyFeed,
    ) -> None:
        """Create the watch. `directory` is the driver's data directory."""
        self.revision = Revision()
        """Advances when `states` or `refusal` may have changed."""
        self._driver = driver
        self._kind = traits.type
        resource = traits.resource
        self._path = resource_path(f"{resource.group}/{resource.version}", resource.plural)
        self._file = directory / FILE
        self._session = session
        self._feed = feed
        self._table = PolicyTable()
        self._offered: tuple[CheckedPolicy, ...] | None = None
        self._offers: deque[tuple[AnyPolicies, tuple[CheckedPolicy, ...]]] = deque(maxlen=4)
        """The latest offers. The driver may still be applying an older one."""
        self._in_force: Mapping[str, CheckedPolicy] | None = None
        """The policies that the driver applied last. None if it has not applied any."""
        self._listed = False
        self._absence = Absence()
        self._problems: dict[str, str] = {}
        self._saved: list[StoredPolicy] | None = None
        self._applied = asyncio.Event()
        feed.on_applied = self._was_applied
        feed.on_invalid = self._are_invalid
        feed.on_connected = self._reconsider

    @property
    def refusal(self) -> str | None:
        """The reason why the driver refused the latest policies, or None."""
        return self._feed.refusal

    def states(self) -> Sequence[PolicyState]:
        """Return the state of each policy, sorted by name."""
        return self._table.states(self._feed.in_force or {})

    async def restore(self) -> None:
        """Initialize from the copy on the node. Called before the driver starts."""
        stored = self._saved = await asyncio.to_thread(read_policies, self._file)
        if stored is not None:
            self._table.replace(await self._check(stored))
            self._offer()

    async def run(self) -> None:
        """Follow the policies until canceled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._save())

    async def _follow(self) -> None:
        first, limit = RETRY_SECONDS
        reflector = Reflector(
            await asyncio.shield(self._session),
            self._path,
            retry_seconds=first,
            retry_limit_seconds=limit,
            keep=_stored,
            # An unreadable policy still exists, so its last valid version remains.
            keep_unreadable=lambda metadata, _: _stored({"metadata": metadata}),
            on_error=self._cannot_be_read,
        )
        async for change in reflector.changes():
            match change:
                case Replaced(items=items):
                    self._table.replace(await self._check(items))
                    self._listed = True
                case Applied(object=item):
                    if self._table.has(item):
                        continue  # the operator has only written the status
                    for each in await self._check([item]):
                        self._table.apply(each)
                case Deleted(object=item):
                    self._table.remove(item.name)
            self._absence.end()
            self._offer()

    def _cannot_be_read(self, error: ApiError) -> None:
        """Handle an error when reading policies. The driver must not wait for the policies. Its
        current policies remain until the resource is known to be missing."""
        if isinstance(error, NotFoundError | ForbiddenError) and not self._feed.known:
            self._offer()
        if self._absence.has_lasted(error):
            self._table.replace(())
            self._listed = True
            self._offer()

    async def _check(self, policies: Collection[StoredPolicy]) -> list[CheckedPolicy]:
        return await asyncio.to_thread(lambda: [check(each, self._kind) for each in policies])

    def _offer(self) -> None:
        """Offer the valid policies to the driver, if they have changed."""
        self._log_problems()
        valid = tuple(self._table.valid)
        if self._offered is None or _differ(valid, self._offered):
            self._offered = valid
            policies = {each.stored.name: each.policy for each in valid if each.policy is not None}
            self._offers.append((policies, valid))
            self._feed.offer(policies)
        self.revision.advance()

    def _log_problems(self) -> None:
        problems = {each.name: each.problem for each in self.states() if each.problem}
        for name, problem in problems.items():
            if self._problems.get(name) != problem:
                facts = {"driver": self._driver, "policy": name, "error": problem}
                logger.warning("newest version of a policy is not in effect", extra=facts)
        self._problems = problems

    def _reconsider(self) -> None:
        """Offer a new backend the policies that an earlier backend has refused."""
        self._table.reconsider()
        if self._feed.known:
            self._offer()

    def _are_invalid(self, policies: AnyPolicies, problems: Mapping[str, str]) -> None:
        """Withdraw policies that a backend has found invalid."""
        in_force = self._in_force or {}
        for each in self._offered_as(policies) or ():
            if (problem := problems.get(each.stored.name)) is not None:
                applied = in_force.get(each.stored.name)
                self._table.refuse(each, problem, applied=applied)
        self._offer()

    def _offered_as(self, policies: AnyPolicies | None) -> Sequence[CheckedPolicy] | None:
        """Return the offer that contains these policies, or None if it was too long ago."""
        return next((each for offered, each in self._offers if offered is policies), None)

    # ------------------------------------------------------------ the copy

    def _was_applied(self) -> None:
        applied = self._offered_as(self._feed.in_force)
        if applied is not None:
            self._in_force = {each.stored.name: each for each in applied}
        self._applied.set()
        self.revision.advance()

    async def _save(self) -> None:
        """Store the policies that the driver has applied. Refused policies are not stored, because
        the driver would then have no policies after a restart."""
        log = ProblemLog(
            logger,
            "policies cannot be stored on the node",
            recovered="policies can be stored on the node again",
            level=logging.ERROR,
            facts={"driver": self._driver, "file": str(self._file)},
        )
        while True:
            await self._applied.wait()
            self._applied.clear()
            if self._in_force is None:
                continue
            stored = [each.stored for each in self._in_force.values()]
            # Don't store an empty set before the API server has listed the policies, because it is
            # only an assumption.
            if stored == self._saved or not (stored or self._listed):
                continue
            try:
                await asyncio.to_thread(write_policies, self._file, stored)
            except OSError as error:
                log.report(str(error))
                self._applied.set()
                await asyncio.sleep(SAVE_RETRY_SECONDS)
            else:
                self._saved = stored
                log.report(None)


def _stored(body: Mapping[str, Any]) -> StoredPolicy:
    metadata: Mapping[str, Any] = body["metadata"]
    return StoredPolicy(
        name=str(metadata.get("name") or ""),
        uid=str(metadata.get("uid") or ""),
        created=str(metadata.get("creationTimestamp") or ""),
        generation=int(metadata.get("generation") or 0),
        spec=body.get("spec"),
    )


def _differ(one: Sequence[CheckedPolicy], other: Sequence[CheckedPolicy]) -> bool:
    return len(one) != len(other) or any(a is not b for a, b in zip(one, other, strict=True))
