"""
Runs a situation: drakit's verdict by the explainer, by ``kubectl drakit explain`` and by the
operator's Event, the scheduler's, and then the remedy.

Does not depend on whether the cluster is real.
"""

from __future__ import annotations

from collections.abc import Iterator

from drakit_cli.kubectl.pods import SETTLE_SECONDS
from drakit_explain.pending import Explanation, Verdict
from drakit_operator.announcing import NOTE_CHARACTERS
from e2e.kit import wait_for
from tests.situations import advice as _advice  # noqa: F401 - fills the table
from tests.situations import broken as _broken  # noqa: F401
from tests.situations import claims as _claims  # noqa: F401
from tests.situations import devices as _devices  # noqa: F401
from tests.situations import errors as _errors  # noqa: F401
from tests.situations import places as _places  # noqa: F401
from tests.situations import starting as _starting  # noqa: F401
from tests.situations.api import Body
from tests.situations.scene import WAITS, Scene
from tests.situations.table import WAITING_POD, Situation

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
    """Check the output of ``kubectl drakit explain``, and return it."""

    def answered() -> tuple[int, Body] | None:
        code, body = scene.command(situation.target)
        lasts = body["verdict"] == situation.verdict or not situation.settled
        return (code, body) if lasts else None

    seconds, period = (SETTLE_SECONDS + 30, 1) if situation.settled else (1, 1)
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
    reason, note = scene.wait_event(WAITS, kind="Pod", seconds=EVENT_SECONDS)
    assert len(note) <= NOTE_CHARACTERS, note
    assert reason in situation.codes, note
    assert [word for word in situation.never if word in note] == [], note
    # Of several reasons, the others are counted, and a long one is shortened.
    if len(situation.codes) == 1 and len(said) <= NOTE_CHARACTERS:
        check_words(note, situation)
    if "runs on node" in said:  # its claim has a problem of its own
        return
    made = [name for name in scene.claims_of(WAITS) if scene.events(name)]
    assert made == [], f"claims of the pod have Events, too: {made}"


def begin(situation: Situation, scene: Scene) -> Iterator[None]:
    """Make a situation, and return the rest of its steps."""
    scene.open()
    scene.held = situation.verdict is Verdict.FITS and not situation.tried
    scene.settled = situation.settled
    if not situation.classless:
        scene.device_class()
    steps = situation.steps(scene)
    next(steps)
    return steps


def run(situation: Situation, scene: Scene) -> str:
    """Run a situation to its end. Return the explanations."""
    try:
        steps = begin(situation, scene)
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
