"""Asking Kubernetes' allocator of the cluster's release: agreement, difference, and no answer."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import weakref
from contextlib import closing

import pytest

from drakit_explain.cel.allocator import Allocator, Confirmed, DeletedError, Result
from drakit_explain.confirmation import Confirmation
from drakit_explain.verdicts import VerdictOutcome

PROGRAM = """#!{python} -ISu
import json, sys, time
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
AGREES = '{"verdicts": [{"outcome": "allocated"}, {"outcome": "unavailable"}]}'
SLICE = {"metadata": {"name": "s"}, "spec": {"driver": "d", "pool": {"name": "p"}}}


def confirmation(*, minor=36):
    return Confirmation(
        nodes=({"metadata": {"name": "n1"}}, {"metadata": {"name": "n2"}}),
        expected=(VerdictOutcome.ALLOCATED, VerdictOutcome.UNAVAILABLE),
        claims=("/claims/a", {"metadata": {}, "spec": {}}),
        classes=("/classes/c", "/classes/d"),
        slices=("/slices/s", "/slices/t"),
        in_use=(),
        taints={},
        minor=minor,
    )


class Installed:
    """Programs of some minor releases, and the objects of a cluster."""

    def __init__(self, folder):
        self.folder = folder
        self.objects = dict.fromkeys(confirmation().paths(), SLICE)
        self.read_paths = []
        self.gone = ""

    def install(self, release, answer=AGREES):
        program = self.folder / release
        program.write_text(
            PROGRAM.format(python=sys.executable, log=str(self.folder / "log"), answer=answer)
        )
        program.chmod(0o755)

    def find(self, release):
        program = self.folder / release
        return program if program.exists() else None

    async def read(self, path):
        self.read_paths.append(path)
        if path == self.gone:
            raise DeletedError
        return self.objects.get(path)

    def ask(self, *, minor=36, gates=None):
        async def ask():
            allocator = Allocator(self.find)
            if gates is not None:
                allocator.use(gates)
            with closing(allocator):
                return await allocator.confirm(confirmation(minor=minor), self.read)

        return asyncio.run(ask())

    @property
    def questions(self):
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]


@pytest.fixture
def installed(tmp_path):
    installed = Installed(tmp_path)
    installed.install("1.36")
    return installed


def test_an_answer_is_confirmed_with_the_objects_of_the_api_server(installed):
    assert installed.ask() == Confirmed(result=Result.AGREES)
    (question,) = installed.questions
    assert [len(question[each]) for each in ("nodes", "claims", "classes", "slices")] == [2] * 4
    assert sorted(installed.read_paths) == sorted(confirmation().paths())


class Body(dict[str, object]):
    """A dict that weak references can refer to."""


async def test_of_each_object_only_what_is_needed_is_kept(installed):
    devices = {"requests": [{"name": "r"}], "constraints": []}
    claim = {"devices": {**devices, "config": [{"opaque": {}}]}}
    specs = {
        "/claims/a": {"metadata": {}, "spec": claim},  # of a template
        "/classes/c": {"selectors": [{"cel": {}}], "config": [{"opaque": {}}]},
    }
    read = []

    async def reader(path):
        assert not [each for each in read if each() is not None], (
            "an object is kept while another one is read"
        )
        metadata = {"name": "n", "managedFields": Body(), "annotations": {"a": "b"}}
        body = {"metadata": metadata, "spec": specs.get(path, SLICE["spec"]), "status": {}}
        read.append(weakref.ref(metadata["managedFields"]))
        return body

    allocator = Allocator(installed.find)
    found = await allocator.confirm(confirmation(), reader)
    assert (found.result, len(read)) == (Result.AGREES, 5)
    (question,) = installed.questions
    assert question["claims"][0]["spec"] == {"devices": devices}
    assert [each["metadata"] for each in question["slices"]] == [{"name": "n"}] * 2
    assert question["classes"][0]["spec"] == {"selectors": [{"cel": {}}]}
    await asyncio.to_thread(allocator.close)


@pytest.mark.parametrize(
    ("answer", "result", "why"),
    [
        pytest.param(
            '{"verdicts": [{"outcome": "allocated"}, {"outcome": "fatal", "text": "no such key"}]}',
            Result.DIFFERS,
            "drakit finds that the claims cannot be allocated on node n2, and Kubernetes' "
            "allocator fails: no such key",
            id="differs",
        ),
        pytest.param(
            '{"verdicts": [{"outcome": "undecided", "text": "no end"}, {"outcome": "fatal"}]}',
            Result.UNDECIDED,
            "no end",
            id="has-no-answer",
        ),
        pytest.param(
            '{"verdicts": [{"outcome": "allocated"}] * 2, "unknown": ["field spec.x"]}',
            Result.UNDECIDED,
            "the allocator has no field spec.x",
            id="does-not-know-a-field",
        ),
    ],
)
def test_what_the_allocator_does_not_confirm_is_not_certain(installed, answer, result, why):
    installed.install("1.36", answer)
    found = installed.ask()
    assert (found.result, found.why, found.refuted) == (result, why, True)


def test_a_field_that_drakit_does_not_know_is_not_certain_even_if_both_agree(installed):
    installed.objects["/slices/t"] = {**SLICE, "spec": {**SLICE["spec"], "new": 1}}
    found = installed.ask()
    assert found == Confirmed(
        result=Result.UNDECIDED, why="drakit does not know field new of ResourceSlice s"
    )
    assert found.refuted


def test_what_cannot_be_asked_is_neither_confirmed_nor_refuted(installed):
    for minor, why in (
        (None, "the release of Kubernetes is unknown"),
        (38, "the allocator of Kubernetes 1.38 is not installed"),
    ):
        found = installed.ask(minor=minor)
        assert (found.result, found.why, found.refuted) == (Result.UNAVAILABLE, why, False)
    del installed.objects["/classes/d"]
    found = installed.ask()
    assert (found.result, found.why) == (Result.UNAVAILABLE, "/classes/d cannot be read")
    installed.objects["/classes/d"] = SLICE
    installed.install("1.36", "1 / 0")
    found = installed.ask()
    assert (found.result, found.refuted) == (Result.UNAVAILABLE, False)
    assert "1.36" in found.why


def test_many_devices_with_many_attributes_refute_nothing(installed, monkeypatch):
    monkeypatch.setattr("drakit_explain.cel.helper.MAX_BYTES", 1000)
    installed.objects["/slices/t"] = {**SLICE, "spec": {"driver": "d" * 1000}}
    found = installed.ask()
    assert (found.result, found.refuted) == (Result.UNAVAILABLE, False)
    assert "more than 1000 bytes" in found.why


def test_an_object_that_is_gone_makes_the_answer_uncertain(installed):
    installed.gone = "/slices/t"
    assert installed.ask() == Confirmed(
        result=Result.UNDECIDED, why="/slices/t has just been deleted", outdated=True
    )


def test_the_gates_are_those_of_the_cluster_or_the_defaults_of_its_release(installed):
    installed.install("1.34")
    installed.ask(gates={"DRADeviceTaints": True, "DRAAdminAccess": False})
    installed.ask()
    installed.ask(minor=34)
    of_cluster, of_136, of_134 = (each["gates"] for each in installed.questions)
    assert of_cluster == {"DRADeviceTaints": True, "DRAAdminAccess": False}
    assert of_136["DRADeviceTaints"]
    assert "DRADeviceTaints" not in of_134
    assert of_134["DRAAdminAccess"]


async def test_the_loop_goes_on_while_the_allocator_thinks(installed):
    installed.install("1.36", "time.sleep(0.5) or " + AGREES)
    allocator = Allocator(installed.find)
    asking = asyncio.create_task(allocator.confirm(confirmation(), installed.read))
    turns, began = 0, time.monotonic()
    while not asking.done():
        turns += 1
        await asyncio.sleep(0.01)
    assert (await asking).result is Result.AGREES
    assert turns > 5, time.monotonic() - began
    await asyncio.to_thread(allocator.close)


async def test_a_cluster_that_is_upgraded_gets_the_program_of_its_new_release(installed):
    installed.install("1.37", '{"verdicts": [{"outcome": "fatal"}] * 2}')
    allocator = Allocator(installed.find)
    results = [
        (await allocator.confirm(confirmation(minor=minor), installed.read)).result
        for minor in (36, 37, 36)
    ]
    assert results == [Result.AGREES, Result.DIFFERS, Result.AGREES]
    await asyncio.to_thread(allocator.close)
