"""
What the API server and this machine can do: the version and the feature gates of the API server, as
it reports them, and selectors, evaluated by the evaluator that is installed here.

The gates are in its metrics, which only administrators may read. Those of other components are read
in :mod:`.components`.

It must not know what needs a gate or a selector.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from drakit_cli.kubectl.gather import Gap, Gathered, unread
from drakit_daemon.kube import ApiError, Session
from drakit_explain import cel
from drakit_explain.asking import Question
from drakit_explain.cel.allocator import Allocator
from drakit_explain.cel.gates import (
    PATH,
    GatesUnknownError,
    allocator_gates,
    depend_on_gates,
    gates_of,
    read_all_gates,
)
from drakit_explain.cel.helper import HelperError, QuestionError, find_release
from drakit_explain.selectors import FeatureGates, bring_up_to_date
from drakit_explain.verdicts import Verdict
from drakit_explain.world import World

PREFIXES = ("DRA", "DynamicResourceAllocation", "ResourceHealthStatus")
"""Names, or their beginnings, of the feature gates that concern devices."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Facts about an API server."""

    version: str = ""
    """Such as ``v1.36.3``; empty if unknown."""

    gates: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Feature gates that concern devices; empty if they may not be read."""

    of_selectors: FeatureGates = field(default_factory=FeatureGates)
    """Those of `gates` that change what a selector means; unknown ones count as enabled."""

    gaps: tuple[Gap, ...] = ()

    @property
    def minor(self) -> tuple[int, int] | None:
        """Major and minor version; None if unknown."""
        return minor_of(self.version)


def minor_of(version: str) -> tuple[int, int] | None:
    """Return the major and minor number of a version; None if it is unknown."""
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2])) if found else None


async def find_capabilities(session: Session) -> Capabilities:
    """Ask the API server; what it does not answer is a gap."""
    gaps: list[Gap] = []
    version = ""
    gates: dict[str, bool] = {}
    try:
        version = str((await session.get("/version")).get("gitVersion") or "")
    except ApiError as error:
        effect = "the command cannot check whether drakit's releases support it"
        gaps.append(unread("version", "/version", error, effect))
    of_selectors = FeatureGates()
    try:
        read = await read_all_gates(session)
        gates = {name: read[name] for name in sorted(read) if name.startswith(PREFIXES)}
        of_selectors = gates_of(read)
    except (ApiError, GatesUnknownError) as error:
        effect = "those that its Kubernetes version enables by default are assumed"
        gaps.append(unread("feature gates", PATH, error, effect))
    return Capabilities(version=version, gates=gates, of_selectors=of_selectors, gaps=tuple(gaps))


# ---------------------------------------------------------------- selectors


def lacks_helper() -> bool:
    """Return whether Kubernetes' own compiler is missing, so that a Python library is used."""
    return cel.find_helper() is None


async def with_gates(session: Session, found: Gathered, expressions: Collection[str]) -> Gathered:
    """
    Add the feature gates of the API server, if selectors depend on them.

    Few do, and the metrics with the gates can be many MiB. Gates that may not be read are a gap.
    """
    if not expressions or not (depend_on_gates(expressions) or _has_lists(found.world)):
        return found
    try:
        enabled = await read_all_gates(session)
        return replace(found, gates=gates_of(enabled), enabled=enabled)
    except (ApiError, GatesUnknownError) as error:
        effect = "selectors are evaluated as if DRAConsumableCapacity and DRAListTypeAttributes "
        found.gaps.append(unread("feature gates", PATH, error, f"{effect}were enabled"))
        return found


def _has_lists(world: World) -> bool:
    return any(group.kind.unusual for each in world.slices() for group in each.devices.groups)


def evaluate_selectors(found: Gathered, expressions: Iterable[str]) -> None:
    """Evaluate selectors for all devices; without an evaluator, the answer has a gap."""
    wanted = list(dict.fromkeys(expressions))
    if not wanted:
        return
    try:
        minor = found.world.minor
        selectors, _ = cel.installed_selectors(f"1.{minor}" if minor is not None else "")
    except cel.NoEvaluatorError as error:
        _not_evaluated(found, str(error))
        return
    selectors.use(found.gates)
    index = found.world.selectors
    slices = list(found.world.slices())  # also those that do not count: an answer names them
    try:
        for expression in wanted:
            try:
                bring_up_to_date(index, selectors, [expression], slices)
            except QuestionError as error:  # others may be evaluated
                _not_evaluated(found, str(error))
    except HelperError as error:
        _not_evaluated(found, str(error))
    finally:
        selectors.close()


@asynccontextmanager
async def open_allocator(
    session: Session, found: Gathered, *, needed: bool = True
) -> AsyncGenerator[Callable[[Question], Verdict]]:
    """
    Yield a function that asks Kubernetes' allocator of the cluster's release.

    :param needed: a claim waits, so that its feature gates are read.
    """
    allocator = Allocator()
    if needed and await asyncio.to_thread(find_release, f"1.{found.world.minor}"):
        with suppress(ApiError, GatesUnknownError):
            enabled = found.enabled or await read_all_gates(session)
            allocator.use(allocator_gates(enabled))
    try:
        yield allocator.answer
    finally:
        allocator.close()


def _not_evaluated(found: Gathered, why: str) -> None:
    found.gaps.append(Gap(kind="selectors", what="selectors are not evaluated", effect=why))
