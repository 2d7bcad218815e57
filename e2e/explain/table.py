"""
The table of situations: pods that wait, or fit, the verdict on each, and the remedy.

Each is a generator: the part before `yield` makes the situation, the part after it applies the
remedy that the explanation names. `DRIVER` in a selector means the scene's driver. They are in
:mod:`.claims`, :mod:`.devices` and :mod:`.places`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drakit_explain.codes import Code
from drakit_explain.pending import Verdict
from e2e.explain.scene import Scene


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One situation and what must be said of it."""

    name: str
    steps: Callable[[Scene], Iterator[None]]
    verdict: Verdict
    codes: frozenset[Code]
    words: tuple[str, ...]
    """Words that the explanation must contain, in any of its sentences."""

    alone: bool
    """Whether it changes what other situations see."""

    tried: bool
    """Whether the scheduler tries the pod, and reports that it fits nowhere. It does not try a pod
    whose claim does not exist, and reports nothing."""


SITUATIONS: list[Situation] = []
"""All situations, in the order of their definition."""


def situation(
    *codes: Code,
    words: tuple[str, ...] = (),
    verdict: Verdict = Verdict.BLOCKED,
    alone: bool = False,
    tried: bool = True,
) -> Callable[[Callable[[Scene], Iterator[None]]], None]:
    def added(steps: Callable[[Scene], Iterator[None]]) -> None:
        SITUATIONS.append(
            Situation(
                name=steps.__name__.replace("_", "-"),
                steps=steps,
                verdict=verdict,
                codes=frozenset(codes),
                words=words,
                alone=alone,
                tried=tried and verdict is not Verdict.NOT_PENDING,
            )
        )

    return added


def fits() -> Callable[[Callable[[Scene], Iterator[None]]], None]:
    """One of which we say that it fits; the scheduler agrees without a remedy."""
    return situation(verdict=Verdict.FITS, tried=False)


MODEL_X = 'device.attributes["DRIVER"].model == "x"'
MODEL_Z = 'device.attributes["DRIVER"].model == "z"'
