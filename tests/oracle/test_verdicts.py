"""Verdicts of the real helper for what tenants can write: a question costs itself only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from drakit_explain.cel.gates import DEFAULT_GATES
from drakit_explain.cel.helper import RESPONSE_SECONDS, Helper, QueryError
from drakit_explain.verdicts import MAX_BYTES, Verdict, VerdictOutcome
from e2e.images.go import CEL_DEFAULT, cel_program
from tests.oracle.worlds import Body
from tests.programs import needs_go

MAX_MEMORY = 160 << 20
"""Bytes that the helper may take: its limit, and what it allocates until it notices."""

NUMBERS = "[" + ", ".join(str(number) for number in range(32)) + "]"
EXPENSIVE = f"{NUMBERS}.all(a, {NUMBERS}.all(b, {NUMBERS}.all(c, a + b + c >= 0)))"


pytestmark = [needs_go, pytest.mark.timeout(1200)]  # the first run builds the allocator


@pytest.fixture(scope="module")
def program() -> Path:
    return cel_program(CEL_DEFAULT)


@pytest.fixture
def helper(program: Path) -> Iterator[Helper]:
    with Helper(program) as helper:
        yield helper


def device_class(*expressions: str) -> Body:
    selectors = [{"cel": {"expression": each}} for each in expressions]
    return {"metadata": {"name": "c"}, "spec": {"selectors": selectors}}


def pool(*devices: Body, name: str = "p", **spec: Any) -> Body:
    identity = {"name": name, "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": name, "uid": name},
        "spec": {"driver": "a", "nodeName": "n", "pool": identity, "devices": devices, **spec},
    }


def claim(count: int = 1, *, name: str = "claim", **spec: Any) -> Body:
    exactly = {"deviceClassName": "c", "allocationMode": "ExactCount", "count": 1}
    requests = [{"name": f"r{number}", "exactly": exactly} for number in range(count)]
    metadata = {"name": name, "namespace": "lab", "uid": name}
    return {"metadata": metadata, "spec": {"devices": {"requests": requests, **spec}}}


def question(**changes: Any) -> bytes:
    parts: dict[str, Any] = {
        "nodes": [{"metadata": {"name": "n"}}],
        "claims": [claim()],
        "classes": [device_class('device.driver == "a"')],
        "slices": [pool({"name": "d"})],
        "inUse": [],
        "gates": dict.fromkeys(DEFAULT_GATES["1.36"], True),
    }
    return orjson.dumps({**parts, **changes})


def ask(helper: Helper, asked: bytes) -> Verdict:
    (verdict,) = helper.verdicts(asked, nodes=1)
    return verdict


def nested(levels: int) -> Body:
    body: Body = {}
    for _ in range(levels):
        body = {"a": body}
    return body


def distinct(count: int, *, values: int) -> bytes:
    """Ask for more devices with distinct values than there are values."""
    devices = [
        {"name": f"d{number}", "attributes": {"v": {"int": number % values}}}
        for number in range(2 * values)
    ]
    constraints = [{"distinctAttribute": "a/v"}]
    return question(claims=[claim(count, constraints=constraints)], slices=[pool(*devices)])


def many_pools(count: int) -> list[Body]:
    attributes = {f"a{number}": {"int": number} for number in range(32)}
    devices = [{"name": f"d{number}", "attributes": attributes} for number in range(128)]
    return [pool(*devices, name=f"p{number}") for number in range(count)]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "a-search-without-end": lambda: distinct(13, values=12),
    "a-selector-that-hides-that-it-was-interrupted": lambda: question(
        classes=[device_class(EXPENSIVE + " && false")],
        slices=[pool(*({"name": f"d{number}"} for number in range(2000)))],
    ),
    "a-selector-that-is-long": lambda: question(
        classes=[device_class(" || ".join(["device.driver == 'b'"] * 400))]
    ),
    "many-devices": lambda: question(
        classes=[device_class("device.driver == 'b'")], slices=many_pools(24)
    ),
    "many-devices-in-use": lambda: question(
        inUse=[{"driver": "a", "pool": "p", "device": f"d{number}"} for number in range(60_000)]
    ),
    "many-unknown-fields": lambda: question(
        slices=[pool({"name": "d", **{f"f{number}": {} for number in range(200_000)}})]
    ),
    "one-unknown-field-with-a-large-value": lambda: question(slices=[pool(new=[[{}]] * 1_000_000)]),
    "deeply-nested": lambda: question(slices=[pool(new=nested(200))]),
    "more-bytes-than-allowed": lambda: question(slices=[pool({"name": "d" * MAX_BYTES})]),
    "objects-of-a-wrong-type": lambda: question(slices=[pool({"name": 1})]),
    "objects-without-content": lambda: question(claims=[{"metadata": {}, "spec": {}}]),
}


@pytest.mark.parametrize("make_hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_question_costs_itself_only(helper, make_hostile):
    verdict = ask(helper, question())
    assert verdict.outcome is VerdictOutcome.ALLOCATED

    hostile = make_hostile()
    started = time.monotonic()
    try:
        verdict = ask(helper, hostile)
        print(verdict)
    except QueryError as error:
        print(error)
    seconds = time.monotonic() - started
    memory = peak_memory(helper)
    print(f"{seconds:.2f} s, {memory >> 20} MiB")
    assert seconds < 2 * RESPONSE_SECONDS + 1
    assert memory < MAX_MEMORY

    verdict = ask(helper, question())
    assert verdict.outcome is VerdictOutcome.ALLOCATED


def peak_memory(helper: Helper) -> int:
    """Return the most memory that the helper's process has had, in bytes; 0 if it has ended."""
    process = helper._process
    if process is None:
        return 0
    status = Path(f"/proc/{process.pid}/status").read_text()
    lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0].split()[1]) << 10 if lines else 0


def test_a_search_without_end_is_undecided(helper):
    verdict = ask(helper, distinct(13, values=12))
    assert verdict.outcome is VerdictOutcome.UNDECIDED
    assert "did not end in time" in verdict.text


def test_a_selector_that_fails_is_fatal_where_the_search_reaches_it(helper):
    nodes = [{"metadata": {"name": name}} for name in ("n", "other")]
    classes = [device_class('device.attributes["a"].model == "x"')]
    asked = question(nodes=nodes, classes=classes)
    here, elsewhere = helper.verdicts(asked, nodes=2)
    assert here.outcome is VerdictOutcome.FATAL
    assert here.text == "class c: selector #0: CEL runtime error: no such key: model"
    assert elsewhere.outcome is VerdictOutcome.UNAVAILABLE


def test_an_unknown_field_makes_a_verdict_undecided(helper):
    verdict = ask(helper, question(slices=[pool({"name": "d", "new": 1})]))
    assert verdict.outcome is VerdictOutcome.UNDECIDED
    assert 'unknown field "slices[0].spec.devices[0].new"' in verdict.text


def test_the_release_is_that_of_the_module(helper):
    assert helper.release().startswith("1.36.")
