"""
`python -m tests.oracle.fold`: compares explanations of random pods on several nodes with
Kubernetes' scheduler and its default plugins (:file:`scheduler/main.go`).

The exit code is 1 if a certain result differs, for the pod or for a node. Undecided results are
always allowed, and counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from drakit_explain.availability import analyze
from drakit_explain.budget import Budget
from drakit_explain.cel.allocator import Allocator
from drakit_explain.cel.helper import Helper
from drakit_explain.loads import Loads
from drakit_explain.model import ClaimFacts, PodFacts
from drakit_explain.nodes import UsableNodes
from drakit_explain.pending import Explainer, Explanation, Verdict
from drakit_explain.pending_claims import Wanted, resolve
from drakit_explain.projection import (
    project_claim,
    project_class,
    project_node,
    project_pod,
    project_slice,
    project_taint_rule,
)
from drakit_explain.queries import Verdicts, answered
from drakit_explain.trial import Judged, Trial, judge
from drakit_explain.verdicts import Verdict as AllocatorVerdict
from drakit_explain.world import World
from e2e.images.go import CEL_DEFAULT, SCHEDULER_MINORS, cel_program, scheduler_program
from tests.fakes.world import evaluate_for
from tests.oracle.pods import Situation, make_situation

BATCH = 64
"""Situations in one question to the scheduler."""

MINORS = ("1.36", "1.37")
"""The releases that are compared by default: in 1.35, the order of pools is chance."""

MAX_UNDECIDED = 0.05
"""The share of pods for which our answer may be undecided."""

MAX_TEXT = 500
"""Characters of an explanation in the report of a difference."""

_PLUGIN = "DynamicResources"
_TIMEOUT = "timed out trying to allocate devices"
_ELSEWHERE = "resourceclaim not available on the node"
"""The words of the plugin where the search has found devices, or none."""


class Kind(Enum):
    """The possible answers for a pod."""

    FITS = "fits"
    NO_FIT = "unschedulable"
    FATAL = "error"
    """An error of the search on one node stops the pod on all nodes."""

    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Ours for a pod, and what it rests on."""

    kind: Kind
    fits_on: str
    alone: Mapping[str, AllocatorVerdict]
    """The verdict of each node that the pod can use."""

    folded: Mapping[str, AllocatorVerdict]
    """Of the nodes that the fold asked about, or that are like one of them."""

    text: str


# ---------------------------------------------------------------- the scheduler


class Scheduler:
    """The scheduler's program, which is asked over a pipe."""

    def __init__(self, program: Path, *, minor: int) -> None:
        self._minor = minor
        self._process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, situations: Sequence[Situation]) -> list[dict[str, Any]]:
        """Return the scheduler's answers, as `main.go` describes them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        worlds = [each.question(minor=self._minor) for each in situations]
        question = {"gates": situations[0].gates(minor=self._minor), "worlds": worlds}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["answers"]


# ---------------------------------------------------------------- our answer


def explain(situation: Situation, helper: Helper, allocator: Allocator, *, minor: int) -> Answers:
    """Explain the pod of a situation as for Kubernetes 1.`minor`."""
    world, raw = World(), situation.world
    world.use_release(minor)
    for project, bodies in (
        (project_node, raw.nodes),
        (project_class, raw.classes),
        (project_slice, raw.slices),
        (project_claim, [*raw.allocated, *raw.claims]),
        (project_taint_rule, situation.rules),
    ):
        for body in bodies:
            world.apply(project(body))
    world.loads = Loads()
    pod = project_pod(situation.pod)
    explainer = Explainer(world, name_all_holders=True)
    evaluate_for(explainer, world, pod, helper)
    explanation = explainer.explain_now(pod, allocator.answer, settled=True)
    trial, judged = (
        _judged(pod, explainer.verdicts, world, allocator) if explanation.nodes else (None, None)
    )
    return Answers(
        kind=_kind(explanation, judged),
        fits_on=explanation.fits_on,
        alone=_alone(trial, allocator) if trial else {},
        folded=judged.answers if judged else {},
        text="; ".join((*explanation.unknown, *(each.text for each in explanation.reasons))),
    )


def _kind(explanation: Explanation, judged: Judged | None) -> Kind:
    match explanation.verdict:
        case Verdict.FITS:
            return Kind.FITS
        case Verdict.BLOCKED if judged is not None and judged.chance:
            return Kind.UNDECIDED  # "the pod might still start"
        case Verdict.BLOCKED:
            return Kind.FATAL if judged is not None and judged.fatal else Kind.NO_FIT
        case _:
            return Kind.UNDECIDED


def _alone(trial: Trial, allocator: Allocator) -> dict[str, AllocatorVerdict]:
    """Ask about each node with a budget of its own."""

    def ask(name: str) -> AllocatorVerdict:
        found = replace(trial, budget=Budget()).ask(name)
        trial.verdicts.check()
        assert found is not None
        return found

    return {
        name: answered(trial.verdicts, partial(ask, name), allocator.answer)
        for name in trial.usable()
    }


def _judged(
    pod: PodFacts, verdicts: Verdicts, world: World, allocator: Allocator
) -> tuple[Trial, Judged] | tuple[None, None]:
    """Judge the nodes once more, because an explanation says nothing about each of them."""
    found = [resolve(pod, each, world, settled=True) for each in pod.claims]
    usable = UsableNodes(world)
    trial = Trial(
        world=world,
        verdicts=verdicts,
        wanted=[each for each in found if isinstance(each, Wanted)],
        nodes=usable.of(pod, [each for each in found if isinstance(each, ClaimFacts)], Budget()),
        budget=Budget(),
        analyze=lambda request, budget: analyze(request, world, budget),
    )
    if not trial.wanted:
        return None, None
    reached = partial(usable.passes, pod)
    return trial, answered(verdicts, partial(judge, trial, reached=reached), allocator.answer)


# ---------------------------------------------------------------- both


def kind_of(theirs: Mapping[str, Any]) -> Kind:
    """Return the scheduler's answer; a timeout says nothing about the objects."""
    return Kind.UNDECIDED if _TIMEOUT in theirs.get("text", "") else Kind(theirs["verdict"])


def differences(ours: Answers, theirs: Mapping[str, Any]) -> Iterator[str]:
    """Return a sentence for each certain answer that differs."""
    kind, nodes = kind_of(theirs), theirs.get("nodes", {})
    if Kind.UNDECIDED not in (ours.kind, kind) and ours.kind is not kind:
        both = f"ours is {ours.kind.value}, theirs {kind.value}"
        yield f"{both} ({theirs.get('text', '')}): {ours.text[:MAX_TEXT]}"
    if ours.fits_on and nodes[ours.fits_on]["code"] != "Success":
        yield f"ours fits on {ours.fits_on}, theirs says {nodes[ours.fits_on]}"
    for name, answer in (*ours.alone.items(), *ours.folded.items()):
        found = nodes.get(name)
        if found is None or found.get("plugin", _PLUGIN) != _PLUGIN:
            continue  # another filter excludes the node before
        if answer.undecided or answer.varies:
            continue
        if _TIMEOUT in found.get("text", ""):
            continue
        if found.get("text") == _ELSEWHERE and not answer.fatal:
            continue
        if found["code"].removesuffix("AndUnresolvable") != _code(answer):
            yield f"{name}: ours is {answer.outcome.value} {answer.text}, theirs {found}"


def _code(answer: AllocatorVerdict) -> str:
    if answer.fatal:
        return "Error"
    return "Success" if answer.fits else "Unschedulable"


@dataclass(slots=True)
class Tally:
    """The results of both for some pods."""

    answers: Counter[tuple[Kind, Kind]] = field(default_factory=Counter[tuple[Kind, Kind]])
    """By our answer and theirs."""

    nodes: int = 0
    """Nodes whose results were also compared."""

    fatal_beside_a_fit: int = 0
    """Pods that an error stops, although another node fits."""

    different: list[str] = field(default_factory=list[str])

    @property
    def undecided(self) -> int:
        return sum(n for (ours, _), n in self.answers.items() if ours is Kind.UNDECIDED)

    @property
    def good(self) -> bool:
        return not self.different and self.undecided <= MAX_UNDECIDED * self.answers.total()

    def add(self, seed: int, ours: Answers, theirs: Mapping[str, Any]) -> None:
        kind = kind_of(theirs)
        self.answers[ours.kind, kind] += 1
        self.nodes += len(ours.alone)
        codes = {each["code"] for each in theirs.get("nodes", {}).values()}
        self.fatal_beside_a_fit += kind is Kind.FATAL and "Success" in codes
        self.different += [f"seed {seed}: {each}" for each in differences(ours, theirs)]

    def lines(self) -> Iterator[str]:
        """Return the report: counts by answer, each difference."""
        yield (
            f"{self.answers.total()} pods, {self.nodes} nodes, "
            f"{self.fatal_beside_a_fit} pods stopped by an error although a node fits"
        )
        for (ours, theirs), number in sorted(self.answers.items(), key=lambda each: -each[1]):
            yield f"  ours {ours.value:13} theirs {theirs.value:13} {number:7}"
        yield f"different: {len(self.different)}"
        yield from self.different


def compare(seeds: range, *, minor: str) -> Tally:
    """Compare the pods of some seeds with the scheduler of a minor release."""
    tally = Tally()
    number = int(minor.removeprefix("1."))
    program = scheduler_program(minor)
    with (
        Helper(cel_program(CEL_DEFAULT)) as helper,
        closing(Allocator(cel_program)) as allocator,
        Scheduler(program, minor=number) as scheduler,
    ):
        for start in range(0, len(seeds), BATCH):
            part = seeds[start : start + BATCH]
            situations = [make_situation(seed, minor=number) for seed in part]
            for seed, each, theirs in zip(part, situations, scheduler.ask(situations), strict=True):
                if "error" in theirs:
                    raise ValueError(f"seed {seed}: {theirs['error']}")
                tally.add(seed, explain(each, helper, allocator, minor=number), theirs)
    return tally


def main() -> int:
    arguments = _parser().parse_args()
    seeds = range(arguments.first, arguments.first + arguments.worlds)
    good = True
    for minor in arguments.minor or MINORS:
        started = time.monotonic()
        tally = compare(seeds, minor=minor)
        good = good and tally.good
        print(f"Kubernetes {minor}:")
        for line in tally.lines():
            print(line)
        print(f"{time.monotonic() - started:.1f} s", flush=True)
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.fold", description=__doc__)
    parser.add_argument("--worlds", type=int, default=1_000, help="number of pods")
    parser.add_argument("--first", type=int, default=0, help="the first pod's seed")
    parser.add_argument("--minor", action="append", choices=SCHEDULER_MINORS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
