"""
Every situation on the real cluster: our verdict, the scheduler's, and then the remedy.

All run at the same time, each in a namespace of its own; those that change nodes or the verdicts of
others come after them. A test waits for its situation.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from drakit_explain.pending import Explanation, Verdict
from e2e.cluster.api import Cluster
from e2e.explain import claims as _claims  # noqa: F401 - fills the table
from e2e.explain import devices as _devices  # noqa: F401
from e2e.explain import places as _places  # noqa: F401
from e2e.explain.api import Api
from e2e.explain.scene import Explaining, Scene
from e2e.explain.table import SITUATIONS, Situation

pytestmark = [pytest.mark.e2e, pytest.mark.feature("explain")]

AT_ONCE = 16


def text_of(explanation: Explanation) -> str:
    reasons = explanation.reasons
    if explanation.remedy:
        texts = [*(reason.sentence for reason in reasons), explanation.remedy]
    else:
        texts = [reason.text for reason in reasons]
    return "; ".join([*texts, *explanation.unknown])


def check(found: Explanation, situation: Situation) -> None:
    text = text_of(found)
    assert found.verdict is situation.verdict, f"{found.verdict}: {text}"
    assert {reason.code for reason in found.reasons} == situation.codes, text
    assert [word for word in situation.words if word not in text] == [], text


def run(situation: Situation, scene: Scene) -> str:
    """Run a situation to its end; return what was said."""
    scene.open()
    try:
        scene.held = situation.verdict is Verdict.FITS and not situation.tried
        steps = situation.steps(scene)
        next(steps)
        refusal = scene.wait_refused() if situation.tried else ""
        found = scene.explain()
        check(found, situation)
        assert not scene.scheduled_on(), f"it has a node, but we say: {situation.verdict}"
        assert list(steps) == []
        if scene.held:
            scene.release()
        node = scene.wait_scheduled()
        assert found.fits_on in ("", node) or situation.verdict is not Verdict.FITS
        return f"{situation.name}: {text_of(found)}\n    scheduler: {refusal}"
    finally:
        scene.close()


@pytest.fixture(scope="module")
def outcomes(
    cluster: Cluster, api: Api, explaining: Explaining, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[str]]]:
    node, other = cluster.nodes[:2]
    chosen = {item.callspec.params["situation"].name for item in _items(request)}

    def start(situation: Situation) -> str:
        namespace = f"explain-{uuid.uuid4().hex[:8]}"
        return run(situation, Scene(api, explaining, situation.name, namespace, node, other))

    def start_last(situation: Situation) -> str:
        wait(together)
        return start(situation)

    situations = [each for each in SITUATIONS if each.name in chosen]
    with ThreadPoolExecutor(AT_ONCE) as pool, ThreadPoolExecutor(1) as last:
        futures = {each.name: pool.submit(start, each) for each in situations if not each.alone}
        together = list(futures.values())
        futures |= {each.name: last.submit(start_last, each) for each in situations if each.alone}
        yield futures


def _items(request: pytest.FixtureRequest) -> Iterator[pytest.Function]:
    """The tests of this session that need situations: `-k` runs no others."""
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "outcomes" in item.fixturenames:
            yield item


@pytest.mark.parametrize("situation", [pytest.param(each, id=each.name) for each in SITUATIONS])
def test_the_remedy_that_we_name_lets_the_pod_run(situation, outcomes):
    print(outcomes[situation.name].result())


def test_there_are_at_least_40_situations():
    assert len(SITUATIONS) >= 40
