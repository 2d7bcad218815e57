"""Runs of the conformance kit: how rules end, the command line, and tests of a vendor's suite."""

from __future__ import annotations

import asyncio
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from drakit.testing import conformance_tests
from drakit.testing.conformance import node
from drakit.testing.conformance.rules import rule, rules
from drakit.testing.conformance.runner import Outcome, RuleResult, run
from drakit.testing.conformance.targets import (
    BackendSocketTarget,
    BackendTarget,
    PythonTarget,
)
from drakit_cli.main import main
from tests.fakes.backend import FakeBackend

SHELF = "tests.fakes.shelf:Shelf"
ROOT = Path(__file__).parents[2]
WHY = "Something needs it."
GPU = {"driver": "gpu.example.com", "env": ["GPU"]}
"""The entry of the backend."""


def fill(root) -> None:
    (root / "shelf").mkdir(exist_ok=True)
    (root / "shelf" / "atlas").touch()


def shelf(**values) -> PythonTarget:
    return PythonTarget(reference=SHELF, values={"directory": "{root}/shelf"} | values, setup=fill)


@rule("kept", "it is kept", why=WHY)
async def kept(kit) -> None:
    (device,) = await kit.devices()
    claim = kit.claim(device)
    assert (await kit.prepare(claim))[claim.uid].error == ""
    assert kit.edits(claim, device) == {"env": ["BOOK=atlas"]}
    written = kit.slice_writes()
    await kit.stop()
    await kit.start()
    assert kit.slice_writes() == written
    await kit.reboot()
    assert kit.spec(claim) is None
    (result,) = (await kit.prepare(claim)).values()
    assert [device.name for device in result.devices] == ["atlas"]
    assert kit.spec(claim) is not None
    assert await kit.unprepare(claim) == {claim.uid: ""}


@rule("not-kept", "it is not kept", why=WHY)
async def not_kept(kit) -> None:
    kit.fail(f"the driver {kit.driver} does not keep it")


@rule("not-shown", "it cannot be shown", why=WHY)
async def not_shown(kit) -> None:
    await kit.kill_target()


@rule("with-a-fault", "it has a fault", why=WHY)
async def with_a_fault(kit) -> None:
    raise KeyError("no such thing")


@rule("without-end", "it does not end", why=WHY, seconds=0.1)
async def without_end(kit) -> None:
    await asyncio.Event().wait()


@rule("started", "it is started", why=WHY)
async def started(kit) -> None:
    assert await kit.devices()


@rule("elsewhere", "it is for others", why=WHY, kinds=["backend"])
async def elsewhere(kit) -> None:
    kit.fail("it is not for this one")


ALL = [kept, not_kept, not_shown, with_a_fault, without_end, elsewhere]


@pytest.fixture
def few_rules(monkeypatch):
    """The command line and suites find the rules of this file."""
    kit = "drakit.testing.conformance.runner"
    for module in ("drakit_cli.conformance", "drakit.testing.suite", kit):
        monkeypatch.setattr(f"{module}.rules", lambda: ALL)


def test_each_rule_ends_in_its_own_way():
    told = []
    report = asyncio.run(run(shelf(), only=ALL, on_result=told.append))
    assert {result.rule.id: (result.outcome, result.text.splitlines()[:1]) for result in told} == {
        "kept": (Outcome.PASSED, []),
        "not-kept": (Outcome.FAILED, ["the driver shelf.example.com does not keep it"]),
        "not-shown": (
            Outcome.SKIPPED,
            ["the target has no process of its own to kill"],
        ),
        "with-a-fault": (Outcome.BROKEN, ["the rule itself failed:"]),
        "without-end": (Outcome.FAILED, ["it had not ended after 0.1 s"]),
        "elsewhere": (Outcome.SKIPPED, ["it is for targets of kind backend"]),
    }
    assert [result.rule for result in report.results] == ALL
    assert not report.good
    assert "node plugin is serving" in report.results[1].log


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        pytest.param("tests.fakes.shelf:Shelve", "has no attribute 'Shelve'", id="no-such-class"),
        pytest.param("no-such-driver", "driver 'no-such-driver'", id="no-entry-point"),
    ],
)
def test_a_driver_that_cannot_be_loaded_is_wrong_usage(reference, told, capfd, few_rules):
    assert main(["conformance", reference]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert told in printed.err


def test_a_driver_that_does_not_start_is_tried_once(tmp_path, capfd, few_rules):
    config = tmp_path / "config.yaml"
    config.write_text("directory: []")
    assert main(["conformance", SHELF, "--config", str(config)]) == 1
    lines = capfd.readouterr().out
    assert lines.count("exit code 2") >= 1
    assert lines.count("BROKEN ") == len(ALL)
    assert lines.count("(0.0 s)") == len(ALL) - 1
    assert lines.count("because of the result of rule kept") == len(ALL) - 1
    assert f"{len(ALL)} broken" in lines


def test_the_command_line_prints_what_is_not_kept_and_why(tmp_path, capfd, few_rules):
    config, junit = tmp_path / "config.yaml", tmp_path / "junit.xml"
    config.write_text('directory: "{root}/shelf"')
    arguments = ["--config", str(config), "--junit", str(junit), "--rule", "kept"]
    setup = "mkdir -p $DRAKIT_ROOT/shelf && touch $DRAKIT_ROOT/shelf/atlas"
    arguments += ["--rule", "not-kept", "--setup", setup]
    assert main(["conformance", SHELF, *arguments]) == 1
    printed = capfd.readouterr().out
    assert "PASSED   kept" in printed
    assert "observed: the driver shelf.example.com does not keep it" in printed
    assert "reason: Something needs it." in printed
    assert printed.endswith("1 passed, 1 failed\nviolated: not-kept\n")
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [case.find("failure") is not None for case in suite] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        pytest.param([], "no driver is given", id="no-target"),
        pytest.param(["no-such"], "driver 'no-such' is not installed", id="no-driver"),
        pytest.param(["no_such:X"], "No module named 'no_such'", id="no-module"),
        pytest.param(["json:JSONDecoder"], "is not a class derived from drakit.Driver", id="class"),
        pytest.param(["a b"], "a b is not a target", id="no-form"),
        pytest.param([SHELF, "--rule", "x"], "rule x does not exist", id="no-rule"),
        pytest.param([SHELF, "--config", "/no/file"], "/no/file: cannot be read", id="no-file"),
    ],
)
def test_wrong_use_is_reported(arguments, told, capfd):
    assert main(["conformance", *arguments]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert told in printed.err
    assert len(printed.err.splitlines()) == 1


def test_the_list_has_all_rules_with_their_reasons(capfd):
    assert main(["conformance", "--list"]) == 0
    printed = capfd.readouterr().out
    ids = [line.split()[0] for line in printed.splitlines() if not line.startswith(" ")]
    assert ids == [each.id for each in rules()]
    words = " ".join(printed.split())
    assert [each.id for each in rules() if f"reason: {each.why}" not in words] == []


def test_a_suite_has_a_test_per_rule(few_rules):
    tests = conformance_tests(shelf(), without=["elsewhere"])
    (mark,) = tests.pytestmark
    assert [case.id for case in mark.args[1]] == [each.id for each in ALL[:-1]]
    with pytest.raises(pytest.fail.Exception, match=r"not-kept: the driver .* does not keep it"):
        tests(not_kept)
    with pytest.raises(pytest.skip.Exception, match="no process of its own"):
        tests(not_shown)
    with pytest.raises(ValueError, match="without: there is no rule nothing"):
        conformance_tests(shelf(), without=["nothing"])


def test_a_suite_waits_once_for_a_driver_that_does_not_start(few_rules, tmp_path):
    """The setup of the target records each boot."""
    notes = tmp_path / "notes"
    tests = conformance_tests("no-such-driver", setup=f"echo boot >> {notes}")
    for each in (kept, not_kept):
        with pytest.raises(pytest.fail.Exception, match=f"{each.id}: the node plugin ended"):
            tests(each)
    assert notes.read_text() == "boot\n"


def test_programs_of_the_target_find_the_modules_beside_them(tmp_path, monkeypatch):
    """The kit's own Python programs do not search the working directory."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # as make has it for us
    (tmp_path / "stubs.py").write_text("from tests.fakes.broken.backend import main")
    (tmp_path / "serve.py").write_text(
        "import asyncio, sys, stubs; asyncio.run(stubs.main(sys.argv[1]))"
    )
    run_it = f"PYTHONPATH={ROOT} exec {sys.executable} {tmp_path / 'serve.py'}"
    (tmp_path / "prepare.py").write_text("import stubs")
    target = BackendTarget(
        line=f"{run_it} {{directory}}/gpu.sock",
        entry=GPU,
        setup=f"{sys.executable} {tmp_path / 'prepare.py'}",
    )
    report = asyncio.run(run(target, only=[started]))
    assert report.good, report.results[0].text


@pytest.mark.parametrize(
    ("target", "told"),
    [
        pytest.param(
            PythonTarget(
                reference="tests.fakes.broken.publishing:WrongCapacity", values={"root": "{root}"}
            ),
            r"device lamp-0 is rejected: .*'2 GB' is not a quantity.*; the driver has no devices",
            id="all-devices-rejected",
        ),
        pytest.param(
            BackendTarget(line="echo the lamp is dark >&2; exit 3", entry=GPU),
            "the target's program ended with exit code 3: the lamp is dark; the driver is "
            "not registered",
            id="the-program-ends",
        ),
        pytest.param(
            BackendTarget(line="touch {directory}/lamp.sock; sleep 60", entry=GPU),
            "the backend is refused: .*the file is not a socket",
            id="the-backend-is-refused",
        ),
    ],
)
def test_a_driver_that_cannot_be_used_is_reported_with_the_reason_and_soon(
    target, told, monkeypatch
):
    monkeypatch.setattr(node, "HOPELESS_SECONDS", 0.5)
    (result,) = asyncio.run(run(target, only=[started])).results
    assert result.outcome == Outcome.BROKEN
    assert re.match(told, result.text), result.text
    assert result.seconds < node.START_SECONDS / 2


def test_a_backend_that_already_runs_is_not_reported_to_outlive_its_process(tmp_path):
    (process_killed,) = [each for each in rules() if each.id == "process-killed"]
    socket = tmp_path / "gpu.sock"

    async def hold() -> RuleResult:
        async with FakeBackend(socket):
            target = BackendSocketTarget(socket=socket, entry=GPU)
            return (await run(target, only=[process_killed])).results[0]

    result = asyncio.run(hold())
    assert result.outcome == Outcome.SKIPPED, result.text
    assert "use the target backend:COMMAND" in result.text
