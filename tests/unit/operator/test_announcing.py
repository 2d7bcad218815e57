"""When an object gets an Event: debounce, deduplication, pauses."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from drakit.testing.apiserver import FakeApiServer
from drakit_daemon.kube import connect
from drakit_explain.codes import Code, Reason
from drakit_explain.model import ObjectReference
from drakit_operator.announcing import (
    BURST,
    Announced,
    Announcement,
    Announcer,
    EventWriter,
    NotWrittenError,
    decide,
)
from drakit_operator.config import Events
from drakit_operator.metrics import Metrics

POD = ObjectReference(api_version="v1", kind="Pod", namespace="lab", name="train", uid="u")
NODE = ObjectReference(api_version="v1", kind="Node", namespace="", name="n1", uid="n")
TIMING = Events()
AT_ONCE = TIMING.model_copy(update={"debounce": 0.0})


def reason(sentence="it waits", code=Code.DEVICES_ALLOCATED, transient=""):
    return Reason(code=code, sentence=sentence, regarding=POD, transient=transient)


def announced(note="it waits", at=100.0):
    return Announced(code=Code.DEVICES_ALLOCATED, note=note, at=at)


@pytest.mark.parametrize(
    ("before", "age", "now", "announce", "again"),
    [
        pytest.param(None, 0.25, 100, False, 0.75, id="too-young"),
        pytest.param(None, 1, 100, True, 1800, id="first-time"),
        pytest.param(announced(), 50, 150, False, 1750, id="same-again-waits-for-the-rest"),
        pytest.param(announced(), 5000, 1900, True, 1800, id="same-again-after-half-an-hour"),
        pytest.param(announced("other"), 50, 130, False, 30, id="other-sentence-waits-a-minute"),
        pytest.param(announced("other"), 99, 160, True, 1800, id="other-sentence-after-a-minute"),
        pytest.param(
            Announced(code=Code.DEVICE_CLASS_MISSING, note="x", at=100.0),
            50,
            101,
            True,
            1800,
            id="other-word-at-once",
        ),
    ],
)
def test_the_decision(before, age, now, announce, again):
    wanted = Announcement(code=Code.DEVICES_ALLOCATED, note="it waits", regarding=POD)
    decision = decide(wanted, before, age_seconds=age, now=now, timing=TIMING)
    assert decision == (announce, again)


class Recorded:
    """An announcer that knows the object `u`, and the Events that it writes."""

    def __init__(self, timing=TIMING):
        self.woken = []
        self.times = []
        self.notes = []
        self.codes = []
        self.announcer = Announcer(self.record, timing=timing, metrics=Metrics())
        self.announcer.known("u")

    async def record(self, announcement):
        self.times.append(now())
        self.notes.append(announcement.note)
        self.codes.append(announcement.code)
        return True

    async def announce(self, *reasons, uid="u", **options):
        wake = partial(self.woken.append, uid)
        return await self.announcer.announce(uid, list(reasons), wake=wake, **options)


def now():
    return asyncio.get_running_loop().time()


def with_remedy(remedy, *reasons):
    first, *others = reasons
    return [replace(first, find_remedy=lambda: remedy), *others]


@pytest.mark.parametrize(
    ("reasons", "note"),
    [
        pytest.param(
            [reason("pod lab/train waits: a"), reason("pod lab/train waits: b")],
            "pod lab/train waits: a; and 1 more reason",
            id="one-sentence",
        ),
        pytest.param(
            [replace(reason("a"), advice="do x"), replace(reason("b"), advice="do y")],
            "a; do x; and 1 more reason",
            id="general-advice-without-a-proven-remedy",
        ),
        pytest.param(
            with_remedy("z helps", replace(reason("a"), advice="do x"), reason("b")),
            "a; and 1 more reason; z helps",
            id="a-proven-remedy-replaces-advice-and-ends-the-note",
        ),
        pytest.param(
            with_remedy("z helps", reason("a" * 900), reason("b" * 900)),
            f"{'a' * 269}...; and 1 more reason; z helps",
            id="a-remedy-has-room-before-further-reasons",
        ),
        pytest.param(
            with_remedy("z" * 200, replace(reason("a" * 900), advice="do x")),
            f"{'a' * 297}...",
            id="a-remedy-without-room-is-left-out",
        ),
        pytest.param(
            [reason("a\n" * 101)], "a\\n" * 99 + "...", id="line-breaks-are-escaped-before-the-cut"
        ),
        pytest.param([reason("ü" * 600)], "ü" * 297 + "...", id="a-reason-that-is-too-long-is-cut"),
        pytest.param(
            with_remedy(
                f"release b; or {'c' * 300}",
                reason(
                    f"pod lab/train waits: no device (of 3, {'x' * 300} (and y)) matches (gpu); "
                    f"{'d' * 300}; check e"
                ),
            ),
            "no device matches (gpu); check e; release b",
            id="details-and-second-remedies-are-left-out-of-a-long-note",
        ),
        pytest.param(
            with_remedy(
                f"release lab/{'b' * 95}", reason(f"claim lab/{'c' * 95}, claim slab/{'d' * 80}")
            ),
            f"claim {'c' * 95}, claim slab/{'d' * 80}; release {'b' * 95}",
            id="its-own-namespace-is-left-out-of-a-long-note",
        ),
        pytest.param(
            [replace(reason(f"device /dev/{'a' * 300}"), regarding=NODE)],
            f"device /dev/{'a' * 285}...",
            id="an-object-without-a-namespace-keeps-its-paths",
        ),
    ],
)
async def test_the_note_has_reasons_then_the_remedy(reasons, note):
    events = Recorded(AT_ONCE)
    await events.announce(*reasons)
    assert events.notes == [note]
    assert len(note) <= 300


@pytest.mark.looptime
async def test_a_pod_gets_an_event_once_and_again_after_half_an_hour():
    events = Recorded()
    while now() < 4000:
        again = await events.announce(reason())
        assert again is not None, f"no check again after {now()}"
        await asyncio.sleep(min(again, 100))
    assert events.notes == ["it waits"] * 3
    assert events.times == [1, 1801, 3601]


@pytest.mark.looptime
async def test_a_reason_that_flaps_is_announced_once():
    events = Recorded()
    await asyncio.sleep(2)
    for found in ([reason()], [], [reason()], [], [reason()]):
        await events.announce(*found)
        await asyncio.sleep(5)
    assert events.notes == ["it waits"]


@pytest.mark.looptime
async def test_an_object_that_is_deleted_during_the_write_leaves_no_memory():
    class Deleting(Recorded):
        async def record(self, announcement):
            await super().record(announcement)
            self.announcer.forget("u")
            return True

    events = Deleting()
    for _ in range(2):
        events.announcer.known("u")
        await asyncio.sleep(2)
        await events.announce(reason())
    assert events.notes == ["it waits", "it waits"]


@pytest.mark.looptime
async def test_another_object_of_the_same_name_gets_its_own_event():
    events = Recorded()
    for uid in ("u1", "u2"):
        events.announcer.known(uid)
        await asyncio.sleep(2)
        await events.announce(reason(), uid=uid)
        events.announcer.forget(uid)
    assert events.notes == ["it waits", "it waits"]


@pytest.mark.looptime
async def test_a_remedy_is_searched_only_for_an_event_that_is_due():
    events, searched = Recorded(), []

    def find_remedy():
        searched.append(now())
        return f"the pod would fit {len(searched)}"

    while now() < 1900:
        await events.announce(replace(reason(), find_remedy=find_remedy), reason("too"))
        await asyncio.sleep(30)
    assert events.notes == [
        "it waits; and 1 more reason; the pod would fit 1",
        "it waits; and 1 more reason; the pod would fit 2",
    ]
    assert searched == events.times == [30, 1830]


@pytest.mark.looptime
async def test_one_event_for_each_reason_is_enough_for_an_object_that_does_not_change():
    events = Recorded()
    await asyncio.sleep(2)
    for found in (reason("a"), reason("b"), reason("c", Code.DEVICE_CLASS_MISSING)):
        assert await events.announce(found, once=True) is None
        await asyncio.sleep(4000)
    assert events.notes == ["a", "c"]
    assert events.codes == [Code.DEVICES_ALLOCATED, Code.DEVICE_CLASS_MISSING]


@pytest.mark.looptime
async def test_a_transient_state_is_announced_when_it_has_lasted():
    events = Recorded()
    half = reason("pool p has 1 of 2 slices", transient="pool p")
    other = reason("pool q has 1 of 2 slices", transient="pool q")

    assert await events.announce(half) == 300
    await asyncio.sleep(299)
    assert await events.announce(half, other) == 1
    await events.announce(other)  # p is complete for a moment
    assert await events.announce(half, other) == 300
    await asyncio.sleep(300)
    assert await events.announce(half, other) == 1800
    assert events.notes == ["pool p has 1 of 2 slices; and 1 more reason"]
    assert events.times == [599]


@pytest.mark.looptime
async def test_a_reason_that_is_certain_does_not_wait_for_a_transient_one():
    events = Recorded()
    await asyncio.sleep(2)
    assert await events.announce(reason("a", transient="a"), reason("b")) == 300
    assert events.notes == ["b"]


@pytest.mark.looptime
async def test_ten_thousand_objects_that_are_due_are_announced_at_a_limited_rate():
    events = Recorded()
    due = [str(number) for number in range(10_000)]
    for uid in due:
        events.announcer.known(uid)
    await asyncio.sleep(1)
    checks = 0
    while len(events.times) < 10_000:
        for uid in due:
            checks += 1
            await events.announce(reason(), uid=uid)
        due = list(events.woken)
        events.woken.clear()
        await asyncio.sleep(0.25)
    times = events.times
    assert sum(at <= 1 for at in times) == 1_000
    busiest = max(sum(second < at <= second + 1 for at in times) for second in range(1, 200))
    assert busiest <= 201
    assert times[-1] <= 47
    assert checks == 19_000, "an object waits for its turn, and is not checked meanwhile"


def of(namespace, number=0):
    found = replace(reason(), regarding=replace(POD, namespace=namespace))
    return found, f"{namespace}-{number}"


async def many_of_one_namespace(events, number):
    for each in range(number):
        found, uid = of("many", each)
        events.announcer.known(uid)
        await events.announce(found, uid=uid)


@pytest.mark.looptime
@pytest.mark.parametrize("deleted", [False, True], ids=["waiting", "deleted"])
@pytest.mark.parametrize("namespace", ["other", "many"])
async def test_many_objects_of_a_namespace_do_not_delay_those_of_others(namespace, deleted):
    events = Recorded(AT_ONCE)
    await many_of_one_namespace(events, 5_000)
    assert len(events.times) == BURST
    for each in range(5_000) if deleted else ():
        events.announcer.forget(of("many", each)[1])
    found, uid = of(namespace, "late")
    events.announcer.known(uid)
    began = now()
    await events.announce(found, uid=uid)
    while uid not in events.woken and now() < began + 200:
        await asyncio.sleep(0.05)
    waited = now() - began
    assert waited == pytest.approx(20 if (namespace, deleted) == ("many", False) else 0, abs=1)


@pytest.mark.looptime
async def test_an_object_without_a_reason_gives_its_place_and_its_turn_back():
    events = Recorded(AT_ONCE)
    await many_of_one_namespace(events, BURST + 3)
    ids = [of("many", BURST + each)[1] for each in range(3)]
    await events.announce(uid=ids[1])
    await asyncio.sleep(1)
    assert events.woken == [ids[0], ids[2]]
    assert events.announcer._turns._limiter.reserve() == 0


@pytest.mark.parametrize(
    ("code", "refused"), [(403, True), (422, True), (500, True), (429, False), (503, False)]
)
async def test_an_event_that_is_refused_is_not_one_that_can_be_written_later(
    tmp_path, code, refused
):
    async with FakeApiServer() as server:
        server.fail("POST", "/apis/events.k8s.io", status=code, message="exceeded quota")
        async with await connect(server.write_kubeconfig(tmp_path), user_agent="t") as session:
            writer = EventWriter(session, instance="one", may_write=lambda: True)
            with pytest.raises(NotWrittenError, match="exceeded quota") as caught:
                await writer(Announcement(code=reason().code, note="it waits", regarding=POD))
    assert caught.value.refused is refused
