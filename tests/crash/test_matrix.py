"""The crash matrix detects leaks and unreached points. `make crash-matrix` runs the matrix
itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.crash.forkserver import fork_server
from tests.crash.matrix import Matrix, Point
from tests.crash.scenarios import Scenario, all_scenarios
from tests.crash.stage import PODS

HALF = "driver prepare uid-a dev-2: before"


@pytest.fixture
async def matrix():
    async with fork_server() as server:
        yield Matrix(server, jobs=2)


def scenario(name: str) -> Scenario:
    (found,) = [scenario for scenario in all_scenarios() if scenario.name == name]
    return found


async def kill_at(matrix: Matrix, case: Scenario, label: str, variant="unprepare"):
    point = Point(scenario=case.name, label=label)
    async with matrix.prepared_node(case) as node:
        return await matrix.run(case, node, point, variant, pod=PODS[1])


async def test_each_run_has_the_same_steps(matrix):
    case = scenario("prepare")
    async with matrix.prepared_node(case) as node:
        first, second = [await matrix.find_points(case, node) for _ in range(2)]
    assert first == second
    kinds = {point.label.split(" ")[0] for point in first}
    assert {"call", "sql", "driver", "open", "rename"} <= kinds


async def test_a_point_that_is_not_reached_is_a_failure(matrix, monkeypatch):
    monkeypatch.setattr("tests.crash.matrix.ATTEMPTS", 2)
    failure = await kill_at(matrix, scenario("prepare"), "sql COMMIT #99")
    assert failure is not None
    assert failure.kind == "unreached"
    assert matrix.runs == 2


def take_a_device(node) -> None:
    node.hardware.mark("dev-4", "uid-ghost")


def free_a_device(node) -> None:
    node.hardware.clear("dev-1")


def leave_a_file(node) -> None:
    node.cdi.mkdir(exist_ok=True)
    (node.cdi / f"{node.driver.name}-claim_uid-ghost.json").write_text("{}")


@pytest.mark.parametrize(
    ("name", "harm", "label", "variant", "sentence"),
    [
        ("prepare", take_a_device, HALF, "unprepare", "dev-4 is held by uid-ghost"),
        ("prepare", leave_a_file, HALF, "unprepare", "uid-ghost has a CDI file"),
        ("repeat", free_a_device, "call prepare: received", "nobody", "dev-1 is free"),
    ],
)
async def test_an_unexpected_state_is_a_leak(matrix, name, harm, label, variant, sentence):
    settle_seconds = 0.5 if variant == "nobody" else 12.0
    case = replace(scenario(name), after=harm, settle_seconds=settle_seconds)
    failure = await kill_at(matrix, case, label, variant=variant)
    assert failure is not None
    assert failure.kind == "leak"
    assert sentence in failure.text
