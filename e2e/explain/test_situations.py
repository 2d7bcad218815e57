"""
Every situation on the real cluster: our verdict, by the operator and by ``kubectl drakit``, the
scheduler's, and then the remedy.

All run at the same time, each in a namespace of its own; those that change nodes or the verdicts of
others come after them. A test waits for its situation.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from drakit_cli.kubectl.pods import SETTLE_SECONDS
from drakit_explain.pending import Explanation, Verdict
from drakit_explain.verdicts import VerdictOutcome
from drakit_operator.announcing import NOTE_CHARACTERS
from e2e.cluster.api import Cluster
from e2e.explain import advice as _advice  # noqa: F401 - fills the table
from e2e.explain import broken as _broken  # noqa: F401
from e2e.explain import claims as _claims  # noqa: F401
from e2e.explain import devices as _devices  # noqa: F401
from e2e.explain import errors as _errors  # noqa: F401
from e2e.explain import places as _places  # noqa: F401
from e2e.explain.api import Api, Body
from e2e.explain.explaining import Explaining
from e2e.explain.scene import WAITS, Heartbeats, Scene
from e2e.explain.table import SITUATIONS, WAITING_POD, Situation
from e2e.kit import operator_metric, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.feature("explain")]

AT_ONCE = 10
EVENT_SECONDS = 60
ENDS_SECONDS = 60


def text_of(explanation: Explanation) -> str:
    reasons = explanation.reasons
    if explanation.remedy:
        texts = [*(reason.sentence for reason in reasons), explanation.remedy]
    else:
        texts = [reason.text for reason in reasons]
    return "; ".join([*texts, *explanation.unknown])


def check_words(text: str, situation: Situation) -> None:
    assert [word for word in situation.words if word not in text] == [], text
    assert [word for word in situation.never if word in text] == [], text


def check(found: Explanation, situation: Situation) -> None:
    """Check what the operator's own program finds in the objects of this moment."""
    text = text_of(found)
    assert found.verdict is situation.verdict, f"{found.verdict}: {text}"
    assert {reason.code for reason in found.reasons} == situation.codes, text
    if situation.codes:
        check_words(text, situation)


def check_command(situation: Situation, scene: Scene) -> str:
    """Check the answer of ``kubectl drakit explain``, and return it."""

    def answered() -> tuple[int, Body] | None:
        code, body = scene.command(situation.target)
        lasts = body["verdict"] == situation.verdict or not situation.settled
        return (code, body) if lasts else None

    seconds, period = (SETTLE_SECONDS + 30, 5) if situation.settled else (1, 1)
    what = f"kubectl drakit finds {situation.name}: {situation.verdict}"
    code, body = wait_for(what, answered, seconds=seconds, period=period)
    text = "; ".join([body["message"], *body["notEvaluated"]])
    assert body["verdict"] == situation.verdict, f"{body['verdict']}: {text}"
    assert {each["code"] for each in body["reasons"]} == situation.codes, text
    check_words(text, situation)
    assert code == situation.exit_code
    assert [word for word in situation.scheduler if word not in body["schedulerMessage"]] == []
    return text


def check_event(situation: Situation, scene: Scene, said: str) -> None:
    """Check the operator's Event about the pod. Its own claims do not get the same sentence."""
    reason, note = scene.wait_event(WAITS, seconds=EVENT_SECONDS)
    assert len(note) <= NOTE_CHARACTERS
    if situation.announced is not None:
        assert reason == situation.announced, note
        return
    assert reason in situation.codes, note
    assert [word for word in situation.never if word in note] == [], note
    # Of several reasons, the others are counted, and a long one is shortened.
    if len(situation.codes) == 1 and len(said) <= NOTE_CHARACTERS:
        check_words(note, situation)
    made = [name for name in scene.claims_of(WAITS) if scene.events(name)]
    assert made == [], f"claims of the pod have Events, too: {made}"


def run(situation: Situation, scene: Scene) -> str:
    """Run a situation to its end; return what was said."""
    scene.open()
    try:
        scene.held = situation.verdict is Verdict.FITS and not situation.tried
        scene.settled = situation.settled
        steps = situation.steps(scene)
        next(steps)
        refusal = scene.wait_refused() if situation.tried else ""
        assert [word for word in situation.scheduler if word not in refusal] == [], refusal
        of_pod = situation.target == WAITING_POD
        found = scene.explain() if of_pod else None
        if found is not None:
            check(found, situation)
        said = "" if scene.held else check_command(situation, scene)
        if situation.event:
            check_event(situation, scene, said)
        if situation.verdict in (Verdict.BROKEN, Verdict.DELETING):
            assert list(steps) == []
            what = f"{situation.target} has the problem no more, or is gone"
            wait_for(what, lambda: is_resolved(situation, scene), seconds=ENDS_SECONDS)
        else:
            assert not scene.scheduled_on(), f"it has a node, but we say: {situation.verdict}"
            assert list(steps) == []
            if scene.held:
                scene.release()
            node = scene.wait_scheduled()
            assert (
                situation.verdict is not Verdict.FITS
                or found is None
                or (found.fits_on in ("", node))
            )
        return f"{situation.name}: {said}\n    scheduler: {refusal}"
    finally:
        scene.close()


def is_resolved(situation: Situation, scene: Scene) -> bool:
    """Return whether an object that was broken or stuck has its problem no more, or is gone."""
    kind, name = situation.target.split("/")
    if not scene.exists({"pod": "pods", "claim": "resourceclaims"}[kind], name):
        return True
    if kind == "claim":
        return False
    return situation.codes.isdisjoint(each.code for each in scene.explain(name).reasons)


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

    situations = [each for each in SITUATIONS if each.name in chosen]
    situations.sort(key=lambda each: not each.settled)  # those that wait start first
    with ThreadPoolExecutor(AT_ONCE) as pool, ThreadPoolExecutor(1) as last:
        futures = {each.name: pool.submit(start, each) for each in situations if not each.alone}
        together = list(futures.values())
        futures |= {each.name: last.submit(start_last, each) for each in situations if each.alone}
        yield futures


def _items(request: pytest.FixtureRequest) -> Iterator[pytest.Function]:
    """The tests of this session that need situations: `-k` runs no others."""
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "situation" in item.fixturenames:
            yield item


def case(situation: Situation):
    marks = [pytest.mark.slow] if situation.slow else []
    return pytest.param(situation, id=situation.name, marks=marks)


@pytest.mark.parametrize("situation", [case(each) for each in SITUATIONS])
def test_the_remedy_that_we_name_lets_the_pod_run(situation, outcomes):
    print(outcomes[situation.name].result())


def test_kubernetes_own_allocator_decides(outcomes, release):
    wait(outcomes.values())
    counted = {
        each: operator_metric(
            release, f'drakit_operator_allocator_answers_total{{result="{each.value}"}}'
        )
        for each in VerdictOutcome
    }
    assert counted[VerdictOutcome.UNAVAILABLE] >= min(10, len(outcomes) // 3), counted
    assert counted[VerdictOutcome.UNDECIDED] == 0, counted


def test_there_are_at_least_40_situations():
    assert len(SITUATIONS) >= 40
