"""
Runs rules in parallel, each on its own kit, and reports the results.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from drakit.testing.conformance.facts import ConformanceError, RuleSkippedError
from drakit.testing.conformance.kit import Kit, open_kit
from drakit.testing.conformance.rules import Rule, rules
from drakit.testing.conformance.targets import Target

BLOCKED_POLL_SECONDS = 1.0
"""How often to check the logs for a driver that blocks its event loop."""

EXCERPT_LINES = 12
"""Number of log lines to show with a failure."""

EXCERPT_COLUMNS = 240
"""Maximum length of each log line in an excerpt."""


class Outcome(StrEnum):
    """The outcome of a rule."""

    PASSED = "passed"
    FAILED = "failed"
    """The driver violates the rule."""
    SKIPPED = "skipped"
    """The rule does not apply to this target."""
    BROKEN = "broken"
    """The rule could not be checked: the driver does not start, or the rule itself is faulty."""


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """The result of one rule."""

    rule: Rule
    outcome: Outcome

    text: str = ""
    """The observation, or the reason why the rule was not checked. Empty if the rule passes."""

    log: str = ""
    """The last log lines of the node plugin and of the target's own process."""

    seconds: float = 0.0

    unusable: bool = False
    """Whether the driver did not start, or blocked its event loop, so that every other rule would
    have the same result."""

    @property
    def good(self) -> bool:
        """Whether no problems were found."""
        return self.outcome in (Outcome.PASSED, Outcome.SKIPPED)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of all rules, in the order of the rules."""

    results: Sequence[RuleResult]

    @property
    def good(self) -> bool:
        """Whether at least one rule applies to the target, and the target passes all that apply."""
        passed = self.count(Outcome.PASSED)
        return passed > 0 and all(result.good for result in self.results)

    def count(self, outcome: Outcome) -> int:
        """Return the number of rules with an outcome."""
        return sum(result.outcome is outcome for result in self.results)


async def run(
    target: Target,
    *,
    only: Sequence[Rule] | None = None,
    turns: asyncio.Semaphore | None = None,
    on_result: Callable[[RuleResult], None] = lambda result: None,
) -> Report:
    """
    Check a target against the rules in `only`, or against all rules. `on_result` receives each
    result when it is available. `turns`, which several targets can share, limits the number of
    concurrent nodes, in addition to the target's own limit.

    A driver that does not start is tried only once, and all other rules are reported as broken for
    the same reason. If the driver blocks its event loop, the remaining rules are reported as broken
    too.
    """
    chosen = rules() if only is None else only
    ended: dict[str, RuleResult] = {}

    def end(result: RuleResult) -> None:
        ended[result.rule.id] = result
        on_result(result)

    waiting = list(chosen)
    shared = turns or asyncio.Semaphore(target.jobs)
    # Check the first rule by itself, to find out whether the target can be tested at all.
    if waiting:
        async with shared:
            end(await check_rule(target, waiting.pop(0)))
    own = asyncio.Semaphore(target.jobs)

    async def take_turn(rule: Rule) -> None:
        async with own, shared:
            stuck = next((each for each in ended.values() if each.unusable), None)
            if stuck is None:
                end(await check_rule(target, rule))
            else:
                text = f"the rule was not tested, because of the result of rule {stuck.rule.id}"
                end(RuleResult(rule=rule, outcome=Outcome.BROKEN, text=text))

    async with asyncio.TaskGroup() as group:
        for rule in waiting:
            group.create_task(take_turn(rule), name=rule.id)
    return Report(results=tuple(ended[rule.id] for rule in chosen))


async def check_rule(target: Target, rule: Rule) -> RuleResult:
    """Check a target against one rule."""
    since = time.monotonic()
    if target.kind not in rule.kinds:
        kinds = " and ".join(sorted(rule.kinds))
        return RuleResult(
            rule=rule, outcome=Outcome.SKIPPED, text=f"it is for targets of kind {kinds}"
        )
    log, unusable = "", False
    async with open_kit(target) as kit:
        try:
            await kit.start()
        except ConformanceError as error:
            outcome, text, unusable = Outcome.BROKEN, str(error), True
        else:
            outcome, text = await _checked(kit, rule)
            if (call := kit.blocked()) is not None:
                outcome, text, unusable = Outcome.FAILED, _BLOCKS.format(call), True
            elif outcome is Outcome.FAILED and (call := kit.blocked(least=1)) is not None:
                text = f"{text}; before, {_BLOCKS.format(call)}"
        if outcome in (Outcome.FAILED, Outcome.BROKEN):
            log = _excerpt(kit)
    return RuleResult(
        rule=rule,
        outcome=outcome,
        text=text,
        log=log,
        seconds=time.monotonic() - since,
        unusable=unusable,
    )


_BLOCKS = (
    "a method blocks the driver's event loop, which delays all other calls: {}; hand calls that "
    "block to asyncio.to_thread"
)


async def _watch(kit: Kit, check: asyncio.Future[None]) -> None:
    """Cancel a check when the driver has blocked its event loop. Otherwise, the check would wait
    for its timeouts."""
    while kit.blocked() is None:
        await asyncio.sleep(BLOCKED_POLL_SECONDS)
    check.cancel()


async def _checked(kit: Kit, rule: Rule) -> tuple[Outcome, str]:
    limit = asyncio.timeout(rule.seconds)
    check = asyncio.ensure_future(rule.check(kit))
    watch = asyncio.create_task(_watch(kit, check))
    try:
        async with limit:
            await asyncio.wait({check})
        if not check.cancelled():
            check.result()
    except RuleSkippedError as error:
        return Outcome.SKIPPED, str(error)
    except ConformanceError as error:
        return Outcome.FAILED, str(error)
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return Outcome.FAILED, f"it had not ended after {rule.seconds:g} s"
        where = "".join(traceback.format_exception(error, limit=-3)).strip()
        return Outcome.BROKEN, f"the rule itself failed:\n{where}"
    finally:
        watch.cancel()
        check.cancel()
        await asyncio.wait({watch, check})
    return Outcome.PASSED, ""


def _excerpt(kit: Kit) -> str:
    parts = [_last_lines(kit.log())]
    if output := kit.target_log():
        parts.append(f"the target's own process:\n{_last_lines(output)}")
    return "\n".join(part for part in parts if part)


def _last_lines(text: str) -> str:
    return "\n".join(line[:EXCERPT_COLUMNS] for line in text.splitlines()[-EXCERPT_LINES:])
