"""
The rules of the conformance kit. A driver with one fault fails the rule for it; a driver without
faults passes all.

All nodes that the selected tests need are run at the beginning, several at a time: each is a few
processes that mostly wait.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from drakit.testing.conformance.rules import rules
from drakit.testing.conformance.runner import Outcome, RuleResult, check_rule
from drakit.testing.conformance.targets import BackendTarget, PythonTarget, Target

# One process runs all nodes, because `make unit` gives it the whole file.
pytestmark = pytest.mark.timeout(400)

SIDE_BY_SIDE = 4
ROOT = Path(__file__).parents[2]
RULES = {rule.id: rule for rule in rules()}
PARAMETERS = {"mode": "dim"}

FAULTS = [
    ("publishing:CapitalName", "devices-published", "Lamp-X"),
    ("publishing:TooLongAttribute", "devices-published", "device long is not published"),
    ("publishing:OtherNames", "stable-names", r"lamp-0-\d+ is no longer published"),
    ("publishing:Clock", "restart-without-writes", r"attribute started of device lamp-0 was \d+"),
    ("publishing:Shuffled", "stable-order", r"lamp-\d is tried first after a restart"),
    ("publishing:NoFallback", "dropped-fields", "5 devices are not published, and there is no fal"),
    ("publishing:OneList", "stream-stays-open", "its stream ended"),
    ("publishing:SilentHealth", "health", "no health of any device"),
    ("publishing:HalfHealth", "health", "no health for 4 of 5 devices, such as lamp-1"),
    (
        "publishing:BlockingHealth",
        "claim-metadata",
        r"a method blocks the driver's event loop, .*BlockingHealth\.health .*asyncio\.to_thread",
    ),
    ("preparing:Refuses", "prepare", "the lamp is not plugged in"),
    ("preparing:Misnamed", "prepare", "containers get nothing: .*defines none of prepare"),
    ("preparing:RelativePath", "cdi-valid", "cannot write a CDI file for device lamp-0"),
    (
        "preparing:MissingPath",
        "host-paths",
        r"/elsewhere \(mount to /lamps\), which does not exist",
    ),
    ("preparing:OnlyOnce", "prepare-again", "after a reboot .* the claim has the lamp already"),
    ("preparing:OtherEdits", "prepare-again", "a different env for the same claim: .*LAMP_TOKEN"),
    ("preparing:OtherAttributes", "metadata", "attribute token was .* after a reboot"),
    ("preparing:BelievesItsNotes", "reboot", "did not create .* again"),
    ("preparing:AllOrNothing", "partial-success", "in a call with a claim with unknown parameters"),
    ("preparing:OneAnswer", "batch", "in a call with 4 claims"),
    ("preparing:FormerClaim", "device-reuse", "refer to the first claim: LAMP_OWNER="),
    ("preparing:FormerName", "device-reuse", "refer to the first claim: LAMP_OF_"),
    ("preparing:ByClaim", "claim-reallocated", "still get the edits of lamp-0"),
    ("preparing:MixesUp", "concurrent-prepare", "got data of another claim"),
    (
        "preparing:OneAfterTheOther",
        "prepare-not-serialized",
        "4 concurrent prepares of different devices",
    ),
    ("preparing:HoldsInterpreter", "get-info", "GetInfo got no response"),
    ("preparing:LeaksCancelled", "pod-deleted-during-prepare", "the lamp is being prepared"),
    ("preparing:HalfDone", "crash-during-prepare", "an earlier prepare has not ended"),
    ("preparing:DiesOfParameters", "hostile-parameters", "of the wrong types got no response"),
    (
        "preparing:StopsOverParameters",
        "hostile-parameters",
        "of the wrong types stopped the driver",
    ),
    (
        "preparing:ForgetsConditions",
        "claim-status",
        "device lamp-[01] lacks the condition Ready after a reboot",
    ),
    (
        "preparing:NeedsLabels",
        "claim-metadata",
        "without metadata and consumers contains an internal exception",
    ),
    (
        "preparing:ForgetsItsVersion",
        "parameter-versions",
        "parameters of tidy.example.com/v1 that have no other key .* the conversion fails",
    ),
    ("preparing:CountsTries", "error-messages", r"two different errors: .*try 1.*try 2"),
    ("preparing:RawErrors", "error-messages", "an internal exception"),
    ("unpreparing:NothingToUndo", "unprepare-again", "unprepare must succeed"),
    ("unpreparing:NothingToUndo", "unprepare-after-failure", "unprepare must succeed"),
    ("unpreparing:NothingAfterReboot", "unprepare-after-reboot", "unprepare must succeed"),
    ("unpreparing:OwnMemory", "unprepare-after-restart", "nobody knows of the claim"),
    ("unpreparing:OwnMemory", "force-delete", "nobody knows of the claim"),
    ("unpreparing:KeepsDevice", "unprepare", "the lamp is another claim's"),
    ("unpreparing:FailureStays", "unprepare-after-failure", "the lamp is locked"),
    ("unpreparing:NeedsParameters", "unprepare-without-parameters", "IndexError"),
    ("unpreparing:Unnamed", "unprepare-defined", "defines none of unprepare"),
    ("unpreparing:UndoesAtStop", "graceful-stop", "removed .*, which a prepared claim needs"),
    ("vanishing:ListsOnce", "vanish", "the driver still lists all devices that claims hold"),
    ("vanishing:NeedsDevice", "vanish", "lamp-1 is not plugged in"),
    ("vanishing:Stumbles", "vanish", "has stopped the driver: .*lamp-1"),
    ("backend:forgets", "process-killed", "nobody knows of the claim"),
    ("sharing:AllShares", "shares", "unpreparing one share of rail removed"),
    ("sharing:AdminResets", "admin-access", "which the device's holder needs"),
    ("sharing:AllParts", "partitions", "unpreparing panel-left removed"),
    (
        "sharing:ManyControllers",
        "device-numbers",
        "the claim of lamp-1 was refused because of the identity of a device node: .*c 1:3, which",
    ),
    ("sharing:NeverWhole", "partitions", "the panel is in halves"),
    (
        "sharing:RefusesAdmin",
        "admin-access",
        "with admin access, while another claim holds the device,",
    ),
]
"""A driver, the rule that it must fail, and the message."""

SLOW = (
    "prepare-not-serialized",
    "prepare-canceled",
    "pod-deleted-during-prepare",
    "crash-during-prepare",
    "get-info",
)
"""Rules that need a slow driver."""

GOOD = [
    ("tidy:Tidy", rule.id)
    for rule in RULES.values()
    if "python" in rule.kinds
    and rule.id
    not in ("prepare-not-serialized", "partitions", "dropped-fields", "parameter-versions")
]
GOOD.append(("publishing:WithFallback", "dropped-fields"))
GOOD += [("tidy:Slow", rule) for rule in SLOW]
GOOD += [("tidy:Bare", rule) for rule in ("prepare", "device-reuse", "claim-reallocated")]
GOOD.append(("preparing:Nodes", "prepare"))
GOOD.append(("preparing:Versioned", "parameter-versions"))
GOOD.append(("sharing:Panels", "partitions"))
GOOD.append(("sharing:OneController", "device-numbers"))
GOOD += [("backend:remembers", rule) for rule in ("process-killed", "metadata")]


async def held_to(driver: str, rule: str) -> RuleResult:
    """Hold a driver to a rule."""
    return await check_rule(target_of(driver), RULES[rule])


def target_of(driver: str) -> Target:
    module, _, kind = driver.partition(":")
    if module == "backend":
        path = f"PYTHONPATH={ROOT}${{PYTHONPATH:+:$PYTHONPATH}}"
        program = f"{path} exec {sys.executable} -m tests.fakes.broken.backend"
        notes = "{root}/notes" if kind == "remembers" else ""
        return BackendTarget(
            line=f"{program} {{directory}}/gpu.sock {notes}",
            entry={"driver": "gpu.example.com", "env": ["GPU"]},
        )
    return PythonTarget(
        reference=f"tests.fakes.broken.{driver}",
        values={"root": "{root}"},
        parameters=PARAMETERS,
        unplug="touch $DRAKIT_ROOT/unplugged",
    )


@pytest.fixture(scope="module")
def results(request) -> dict[tuple[str, str], RuleResult]:
    """The results of each driver and rule of the selected tests."""
    cases = {
        (item.callspec.params["driver"], item.callspec.params["rule"])
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }

    async def run() -> dict[tuple[str, str], RuleResult]:
        turn = asyncio.Semaphore(SIDE_BY_SIDE)

        async def one(case: tuple[str, str]) -> RuleResult:
            async with turn:
                return await held_to(*case)

        return dict(zip(cases, await asyncio.gather(*map(one, cases)), strict=True))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("driver", "rule", "said"), [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in FAULTS]
)
def test_a_driver_with_a_fault_fails_the_rule_that_is_about_it(results, driver, rule, said):
    ended = results[driver, rule]
    assert ended.outcome == Outcome.FAILED, ended.text
    assert re.search(said, ended.text), ended.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "rule"), [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in GOOD]
)
def test_a_driver_without_a_fault_keeps_the_rule(results, driver, rule):
    ended = results[driver, rule]
    assert ended.outcome == Outcome.PASSED, ended.text


@pytest.mark.parametrize(
    ("driver", "rule"),
    [
        pytest.param("preparing:MissingPath", rule, id=rule)
        for rule in ("graceful-stop", "admin-access", "shares", "crash-during-prepare")
    ]
    + [pytest.param("preparing:MissingShare", "shares", id="shares-second-one")],
)
def test_a_path_that_never_was_is_blamed_on_nothing_else(results, driver, rule):
    ended = results[driver, rule]
    assert ended.outcome == Outcome.SKIPPED, ended.text
    assert "see the rule host-paths" in ended.text


def test_each_rule_has_a_title_a_reason_and_an_id_of_words():
    for rule in RULES.values():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", rule.id)
        assert rule.title[-1] != "."
        assert rule.why.endswith(".")
