"""
Selectors evaluated for one answer, by the evaluator that is installed here.

It must not know what asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from drakit.cel import choice
from drakit.cel.helper import HelperError, QuestionError
from drakit.cli.kubectl.gather import Gap, Gathered
from drakit.explain.selectors import bring_up_to_date

__all__ = ("evaluate_selectors", "lacks_helper")


def lacks_helper() -> bool:
    """Return whether Kubernetes' own compiler is missing, so that a Python library is used."""
    return choice.find_helper(os.environ) is None


def evaluate_selectors(found: Gathered, expressions: Iterable[str]) -> None:
    """Evaluate selectors for all devices; without an evaluator, the answer has a gap."""
    wanted = list(dict.fromkeys(expressions))
    if not wanted:
        return
    try:
        selectors, _ = choice.installed_selectors()
    except choice.NoEvaluatorError as error:
        _not_evaluated(found, str(error))
        return
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
