"""
The table of situations: pods that wait, or fit, the verdict on each, and the remedy.

Each is a generator: the part before `yield` makes the situation, the part after it applies the
remedy that the explanation names. `DRIVER` in a selector means the scene's driver. They are in
:mod:`.claims`, :mod:`.devices`, :mod:`.errors`, :mod:`.advice`, :mod:`.broken`, :mod:`.places`
and :mod:`.starting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from drakit_explain.codes import Code
from drakit_explain.pending import Verdict
from tests.situations.scene import WAITS, Scene

WAITING_POD = f"pod/{WAITS}"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One situation and what must be said of it."""

    name: str
    steps: Callable[[Scene], Iterator[None]]
    codes: frozenset[Code]
    verdict: Verdict = Verdict.BLOCKED
    words: tuple[str, ...] = ()
    """Words that the explanation must contain, in any of its sentences."""

    never: tuple[str, ...] = ()
    """Words of wrong advice, which it must not contain."""

    scheduler: tuple[str, ...] = ()
    """Words of the scheduler's own message."""

    classless: bool = False
    """Whether the class of the scene's devices does not exist at first."""

    alone: bool = False
    """Whether it changes what other situations see."""

    unseen: bool = False
    """Whether the scheduler reports nothing of a pod that waits, as of one whose claim does not
    exist."""

    target: str = WAITING_POD
    """The object that is explained, as ``kubectl drakit explain`` takes it."""

    settled: bool = False
    """Whether it is a problem only if it lasts."""

    slow: bool = False
    """Whether it runs in ``make test-all`` only."""

    oldest: str | None = None
    """The oldest Kubernetes release that has the situation, such as 1.35; `None` for all."""

    unreal: str = ""
    """The reason why a real cluster does not have the situation. Empty if it can have it."""

    silent: str = ""
    """The reason why the operator does not report it in an Event. Empty if it does."""

    @property
    def tried(self) -> bool:
        """Whether the scheduler tries the pod, and reports that it fits nowhere."""
        waits = self.verdict in (Verdict.BLOCKED, Verdict.FITS, Verdict.UNDECIDED)
        return waits and not self.unseen

    @property
    def event(self) -> bool:
        """Whether the operator writes an Event about the pod."""
        problem = self.verdict in (Verdict.BLOCKED, Verdict.BROKEN)
        return problem and self.target == WAITING_POD and not self.silent

    @property
    def exit_code(self) -> int:
        """The exit code of ``kubectl drakit explain``."""
        if self.verdict is Verdict.UNDECIDED:
            return 4
        return 0 if self.verdict in (Verdict.FITS, Verdict.NOT_PENDING) else 1


SITUATIONS: list[Situation] = []
"""All situations, in the order of their definition."""


def situation(*codes: Code, **fields: Any) -> Callable[[Callable[[Scene], Iterator[None]]], None]:
    """Add a situation with these codes and fields to the table, by its steps."""

    def added(steps: Callable[[Scene], Iterator[None]]) -> None:
        name = steps.__name__.replace("_", "-")
        found = Situation(name=name, steps=steps, codes=frozenset(codes), **fields)
        SITUATIONS.append(found)

    return added


def fits(**fields: Any) -> Callable[[Callable[[Scene], Iterator[None]]], None]:
    """Add a situation in which the pod fits: the scheduler agrees without a remedy."""
    return situation(verdict=Verdict.FITS, unseen=True, **fields)


MODEL_X = 'device.attributes["DRIVER"].model == "x"'
MODEL_Z = 'device.attributes["DRIVER"].model == "z"'
