"""Queries of Kubernetes' allocator for the cluster's release: a verdict, or no result."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import replace

import pytest

from drakit_explain.cel.allocator import Allocator
from drakit_explain.queries import Query
from drakit_explain.verdicts import VerdictOutcome

PROGRAM = """#!{python} -ISu
import json, sys
for line in sys.stdin:
    question = json.loads(line)
    if "reads" in question:
        answer = dict(reads=[])
    else:
        with open({log!r}, "a") as log:
            log.write(json.dumps(question["verdict"]) + chr(10))
        answer = {answer}
    sys.stdout.write(json.dumps(answer) + chr(10))
    sys.stdout.flush()
"""
FITS = '{"verdicts": [{"outcome": "allocated", "results": [[{"driver": "d"}]]}]}'
QUESTION = Query(key=1, claims=1, body=b'{"nodes":[{}]}', minor=36)


class Installed:
    """Programs of some minor releases."""

    def __init__(self, folder):
        self.folder = folder

    def install(self, release, answer=FITS):
        program = self.folder / release
        program.write_text(
            PROGRAM.format(python=sys.executable, log=str(self.folder / "log"), answer=answer)
        )
        program.chmod(0o755)

    def find(self, release):
        program = self.folder / release
        return program if program.exists() else None

    def ask(self, *, minor=36, gates=None):
        with closing(Allocator(self.find)) as allocator:
            allocator.use(gates)
            verdict = allocator.answer(replace(QUESTION, minor=minor))
            assert bool(allocator.problem) is (verdict.text == allocator.problem != "")
            return verdict

    @property
    def questions(self):
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]


@pytest.fixture
def installed(tmp_path):
    installed = Installed(tmp_path)
    installed.install("1.36")
    return installed


def test_a_verdict_has_the_devices_of_each_claim(installed):
    verdict = installed.ask()
    assert verdict.outcome is VerdictOutcome.ALLOCATED
    assert verdict.results == (({"driver": "d"},),)


@pytest.mark.parametrize(
    ("minor", "why"),
    [
        pytest.param(
            38,
            "the allocator of Kubernetes 1.38, which decides whether the claims fit, is not "
            "installed",
            id="no-program",
        ),
        pytest.param(37, "/1.37: ", id="the-program-fails"),
        pytest.param(35, "the allocator has no field spec.x", id="a-field-is-unknown"),
    ],
)
def test_without_an_answer_nothing_is_decided(installed, minor, why):
    installed.install("1.37", "1 / 0")
    installed.install("1.35", '{"verdicts": [{"outcome": "fatal"}], "unknown": ["field spec.x"]}')
    verdict = installed.ask(minor=minor)
    assert verdict.outcome is VerdictOutcome.UNDECIDED
    assert why in verdict.text


def test_the_newest_allocator_decides_if_the_release_is_unknown(installed):
    installed.install("1.35", '{"verdicts": [{"outcome": "fatal"}]}')
    assert installed.ask(minor=None).outcome is VerdictOutcome.ALLOCATED


def test_the_gates_are_those_of_the_cluster_or_the_defaults_of_its_release(installed):
    installed.install("1.34")
    installed.ask(gates={"DRADeviceTaints": True, "DRAAdminAccess": False})
    installed.ask(minor=34)
    of_cluster, of_release = (each["gates"] for each in installed.questions)
    assert of_cluster == {"DRADeviceTaints": True, "DRAAdminAccess": False}
    assert of_release["DRAPrioritizedList"]
    assert "DRADeviceTaints" not in of_release


def test_a_cluster_that_is_upgraded_gets_the_program_of_its_new_release(installed):
    installed.install("1.37", '{"verdicts": [{"outcome": "fatal"}]}')
    with closing(Allocator(installed.find)) as allocator:
        found = [allocator.answer(replace(QUESTION, minor=minor)) for minor in (36, 37, 36)]
    assert [each.outcome.value for each in found] == ["allocated", "fatal", "allocated"]
