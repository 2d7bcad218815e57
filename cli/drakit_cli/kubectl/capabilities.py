"""
Gathers the API server's version and feature gates, and evaluates CEL selectors with the evaluator
that is installed on this machine.

The gates are in the server's metrics, which only administrators can read. :mod:`.components` reads
the gates of other components. Does not depend on which command needs a gate or a selector.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from drakit_cli.kubectl.gather import Gap, Gathered, unread, with_release
from drakit_daemon.kube import ApiError, Session
from drakit_explain import cel
from drakit_explain.cel.allocator import Allocator
from drakit_explain.cel.gates import (
    PATH,
    GatesUnknownError,
    allocator_gates,
    depend_on_gates,
    gates_of,
    read_all_gates,
)
from drakit_explain.cel.helper import HelperError, QueryError, find_release
from drakit_explain.queries import Query
from drakit_explain.selectors import bring_up_to_date
from drakit_explain.verdicts import Verdict


async def with_capabilities(session: Session, found: Gathered) -> Gathered:
    """Add the version and the feature gates of the API server. If a request fails, add a gap
    instead."""
    effect = "the command cannot check whether drakit's releases support it"
    found = await with_release(session, found, effect)
    effect = "those that its Kubernetes version enables by default are assumed"
    return await _with_gates(session, found, effect)


async def _with_gates(session: Session, found: Gathered, effect: str) -> Gathered:
    """Add the feature gates of the API server. `effect` describes the consequence if they are
    unknown."""
    try:
        enabled = await read_all_gates(session)
        return replace(found, gates=gates_of(enabled), enabled=enabled)
    except (ApiError, GatesUnknownError) as error:
        found.gaps.append(unread("feature gates", PATH, error, effect))
        return found


# ---------------------------------------------------------------- selectors


def lacks_helper() -> bool:
    """Return whether Kubernetes' own CEL compiler is missing, so that a Python library is used
    instead."""
    return cel.find_helper() is None


async def with_gates(session: Session, found: Gathered, expressions: Collection[str]) -> Gathered:
    """
    Add the feature gates of the API server, if selectors depend on them.

    Few selectors depend on them, and the metrics that contain the gates can have many MiB. If the
    user is not allowed to read the gates, add a gap.
    """
    groups = (group for each in found.world.slices() for group in each.devices.groups)
    has_lists = (group.kind.unusual for group in groups)
    if not expressions or not (depend_on_gates(expressions) or any(has_lists)):
        return found
    effect = "selectors are evaluated as if DRAConsumableCapacity and DRAListTypeAttributes were "
    return await _with_gates(session, found, f"{effect}enabled")


def evaluate_selectors(found: Gathered, expressions: Iterable[str]) -> None:
    """Evaluate selectors for all devices. If there is no evaluator, add a gap."""
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
    # Include the slices that the scheduler ignores, because a result can name their devices.
    slices = list(found.world.slices())
    try:
        for expression in wanted:
            try:
                bring_up_to_date(index, selectors, [expression], slices)
            except QueryError as error:  # other selectors may still be evaluated
                _not_evaluated(found, str(error))
    except HelperError as error:
        _not_evaluated(found, str(error))
    finally:
        selectors.close()


@asynccontextmanager
async def open_allocator(
    session: Session, found: Gathered, *, needed: bool = True
) -> AsyncGenerator[Callable[[Query], Verdict]]:
    """
    Yield a function that sends queries to Kubernetes' allocator, in the cluster's release.

    :param needed: whether a claim is waiting, so that the allocator needs the feature gates.
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
