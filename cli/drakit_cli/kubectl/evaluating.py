"""
Selectors evaluated for one answer, by the evaluator that is installed here.

It must not know what asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import replace

from drakit_cli.kubectl.gather import Gap, Gathered, unread
from drakit_daemon.kube import ApiError, Session
from drakit_explain import cel
from drakit_explain.cel.gates import PATH, GatesUnknownError, depend_on_gates, read_gates
from drakit_explain.cel.helper import HelperError, QuestionError
from drakit_explain.selectors import bring_up_to_date
from drakit_explain.world import World


def lacks_helper() -> bool:
    """Return whether Kubernetes' own compiler is missing, so that a Python library is used."""
    return cel.find_helper(os.environ) is None


async def with_gates(session: Session, found: Gathered, expressions: Collection[str]) -> Gathered:
    """
    Add the feature gates of the API server, if selectors depend on them.

    Few do, and the metrics with the gates can be many MiB. Gates that may not be read are a gap.
    """
    if not expressions or not (depend_on_gates(expressions) or _has_lists(found.world)):
        return found
    try:
        return replace(found, gates=await read_gates(session))
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
        selectors, _ = cel.installed_selectors()
    except cel.NoEvaluatorError as error:
        _not_evaluated(found, str(error))
        return
    selectors.use(found.gates)
    index = found.world.selectors
    slices = [each.slice for each in found.world.reachable()]
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


def _not_evaluated(found: Gathered, why: str) -> None:
    found.gaps.append(
        Gap(
            kind="selectors",
            what="selectors are not evaluated",
            effect=f"{why}",
        )
    )
