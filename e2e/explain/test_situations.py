"""
Every situation on the real cluster: compares the verdict of the operator and of ``kubectl drakit``
with the scheduler's, and then applies the remedy.

All situations run at the same time, each in a separate namespace. Situations that change nodes or
affect others run afterwards. A test waits for its situation.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from drakit_explain.verdicts import VerdictOutcome
from e2e.cluster.api import Cluster
from e2e.kit import operator_metric
from tests.situations.api import Api
from tests.situations.explaining import Explaining
from tests.situations.running import run
from tests.situations.scene import Heartbeats, Scene
from tests.situations.table import SITUATIONS, Situation

pytestmark = [pytest.mark.e2e, pytest.mark.feature("explain")]

AT_ONCE = 10

REAL = [each for each in SITUATIONS if not each.unreal]
"""The situations that a real cluster can have."""


@pytest.fixture(scope="module")
def outcomes(
    release: Cluster,
    api: Api,
    explaining: Explaining,
    heartbeats: Heartbeats,
    request: pytest.FixtureRequest,
) -> Iterator[dict[str, Future[str]]]:
    node, other = release.nodes[:2]
    chosen = {item.callspec.params["situation"].name for item in _items(request)}

    def start(situation: Situation) -> str:
        namespace = f"explain-{uuid.uuid4().hex[:8]}"
        scene = Scene(api, explaining, situation.name, namespace, node, other, heartbeats)
        return run(situation, scene)

    def start_last(situation: Situation) -> str:
        wait(together)
        return start(situation)

    situations = [each for each in REAL if each.name in chosen]
    situations.sort(key=lambda each: not each.settled)  # those that wait must start first
    with ThreadPoolExecutor(AT_ONCE) as pool, ThreadPoolExecutor(1) as last:
        futures = {each.name: pool.submit(start, each) for each in situations if not each.alone}
        together = list(futures.values())
        futures |= {each.name: last.submit(start_last, each) for each in situations if each.alone}
        yield futures


def _items(request: pytest.FixtureRequest) -> Iterator[pytest.Function]:
    """Yield the tests of this session that need situations, because with `-k` no others must
    run."""
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "situation" in item.fixturenames:
            yield item


def case(situation: Situation):
    marks = [pytest.mark.kubernetes(oldest=situation.oldest)]
    if situation.slow:
        marks.append(pytest.mark.slow)
    return pytest.param(situation, id=situation.name, marks=marks)


@pytest.mark.parametrize("situation", [case(each) for each in REAL])
def test_the_remedy_that_we_name_lets_the_pod_run(situation, outcomes):
    print(outcomes[situation.name].result())


def test_kubernetes_own_allocator_decides(outcomes, release):
    wait(outcomes.values())
    counted = {
        each: operator_metric(
            release, f'drakit_operator_allocator_queries_total{{result="{each.value}"}}'
        )
        for each in VerdictOutcome
    }
    assert counted[VerdictOutcome.UNAVAILABLE] >= min(10, len(outcomes) // 3), counted
    assert counted[VerdictOutcome.UNDECIDED] == 0, counted


def test_there_are_at_least_40_situations():
    assert len(REAL) >= 40
