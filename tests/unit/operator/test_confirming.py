"""A reason is confirmed before its Event: what is read, what is kept, and whose time it is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from drakit_daemon.kube import NotFoundError, UnavailableError
from drakit_explain.cel.allocator import Confirmed, DeletedError, Result
from drakit_explain.codes import Code, Reason
from drakit_explain.confirmation import Confirmation
from drakit_explain.model import ObjectReference
from drakit_operator.announcing import Announcer
from drakit_operator.config import Events
from drakit_operator.confirming import (
    AGAIN_SECONDS,
    BUSY_SECONDS,
    MAX_KEPT,
    OUTDATED_SECONDS,
    Confirmations,
)
from drakit_operator.metrics import Metrics

API = "/apis/resource.k8s.io/v1"
AGREES = Confirmed(result=Result.AGREES)
DIFFERS = Confirmed(result=Result.DIFFERS, why="it finds devices there")
UNDECIDED = Confirmed(result=Result.UNDECIDED, why="it has no end")
UNAVAILABLE = Confirmed(result=Result.UNAVAILABLE, why="it is not installed")


def asked(claim="one", slices=("s", "t")):
    return Confirmation(
        nodes=(),
        expected=(),
        claims=(f"{API}/namespaces/lab/resourceclaims/{claim}",),
        classes=(f"{API}/deviceclasses/c", f"{API}/deviceclasses/d"),
        slices=tuple(f"{API}/resourceslices/{each}" for each in slices),
        in_use=(),
        taints={},
        minor=36,
    )


class Session:
    """An API server in memory."""

    def __init__(self):
        self.read = []
        self.away = False
        self.deleted = ""
        self.devices = 0

    async def get(self, path):
        if self.away:
            raise UnavailableError.no_answer("GET", path, why="it is away")
        if path.endswith(f"/{self.deleted}"):
            gone = {"status": 404, "reason": "NotFound", "message": "it does not exist"}
            raise NotFoundError(**gone, method="GET", path=path)
        self.read.append(path.rpartition("/")[2])
        return {"at": len(self.read), "spec": {"devices": [{}] * self.devices}}


class Allocator:
    """An allocator that reads what it needs, and gives prepared answers."""

    def __init__(self):
        self.answers = [AGREES]
        self.bodies = []
        self.seconds = 0.0

    async def confirm(self, asked, read):
        await asyncio.sleep(self.seconds)
        self.bodies.append([await read(each) for each in asked.paths()])
        if None in self.bodies[-1]:
            return UNAVAILABLE
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Place:
    def __init__(self, *, seconds=0.0):
        self.session = Session()
        self.allocator = Allocator()
        self.allocator.seconds = seconds
        self.metrics = Metrics()
        clock = asyncio.get_running_loop().time
        self.confirm = Confirmations(self.session, self.allocator, self.metrics, clock=clock)

    def counted(self, result):
        name = "drakit_operator_confirmations_total"
        return self.metrics.registry.get_sample_value(name, {"result": result})


@pytest.fixture
async def place():
    return Place()


async def test_slices_and_classes_are_read_once_for_pods_that_wait_together(place):
    assert await place.confirm(asked("one"), "lab") is None
    assert await place.confirm(asked("two"), "lab") is None
    assert sorted(place.session.read) == ["c", "d", "one", "s", "t", "two"]
    assert place.counted("agrees") == 2


async def test_an_object_may_have_changed_since_it_was_read(place):
    await place.confirm(asked("one"), "lab")
    place.allocator.answers = [DIFFERS, AGREES]
    assert await place.confirm(asked("one"), "lab") is None
    first, kept, again = place.allocator.bodies
    assert first[1:] == kept[1:]
    assert all(old != new for old, new in zip(kept, again, strict=True))


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (DIFFERS, AGAIN_SECONDS),
        (UNDECIDED, AGAIN_SECONDS),
        (replace(UNDECIDED, outdated=True), OUTDATED_SECONDS),
    ],
)
async def test_a_reason_that_is_refuted_is_asked_about_again_later(place, answer, seconds):
    place.allocator.answers = [answer]
    assert await place.confirm(asked(), "lab") == seconds
    assert place.counted(answer.result) == 1


async def test_without_an_answer_the_reason_stays(place, caplog):
    place.session.away = True
    assert await place.confirm(asked(), "lab") is None
    assert await place.confirm(asked(), "lab") is None
    assert place.counted("unavailable") == 2
    assert len([each for each in caplog.records if "not confirmed" in each.message]) == 1


async def test_an_object_that_was_deleted_is_no_problem_of_the_allocator(place):
    place.session.deleted = "t"
    with pytest.raises(DeletedError):
        await place.confirm(asked(), "lab")
    place.session.deleted = ""
    assert await place.confirm(asked(), "lab") is None


async def test_few_devices_are_kept(place):
    place.session.devices = 128
    many = [f"s{number}" for number in range(MAX_KEPT // 64)]
    await place.confirm(asked(slices=many), "lab")
    place.session.read.clear()
    await place.confirm(asked(slices=[*many[-2:], *many[:2]]), "lab")
    assert place.session.read == ["one", "c", "d", *many[:2]]


async def test_the_slices_of_many_nodes_are_read_once(place):
    place.session.devices = 2
    many = [f"s{number}" for number in range(1000)]
    await place.confirm(asked("one", slices=many), "lab")
    place.session.read.clear()
    await place.confirm(asked("two", slices=many), "lab")
    assert place.session.read == ["two"]


@pytest.mark.looptime
async def test_one_namespace_keeps_neither_the_workers_nor_the_turn():
    place = Place(seconds=5.0)
    loop = asyncio.get_running_loop()
    hostile = [asyncio.create_task(place.confirm(asked(), "hostile")) for _ in range(15)]
    await asyncio.sleep(4)
    assert [each.done() for each in hostile] == [False] + [True] * 14
    assert {each.result() for each in hostile[1:]} == {BUSY_SECONDS}
    hostile += [asyncio.create_task(place.confirm(asked(), "hostile")) for _ in range(15)]
    await asyncio.sleep(0)
    assert await place.confirm(asked(), "lab") is None
    assert loop.time() < 15


POD = ObjectReference(api_version="v1", kind="Pod", namespace="lab", name="train", uid="u")


class Announcing:
    """An announcer that knows a pod with a reason, and what it asks and writes."""

    def __init__(self):
        self.said = []
        self.asked = []
        self.uncertain = None
        self.announcer = Announcer(
            self.record,
            confirm=self.confirm,
            timing=Events().model_copy(update={"debounce": 0.0}),
            metrics=Metrics(),
        )
        self.announcer.known("u")

    async def record(self, announcement):
        self.said.append(announcement.note)
        return True

    async def confirm(self, asked, namespace):
        self.asked.append((asked, namespace))
        return self.uncertain

    async def announce(self, find_confirmation, *, uid="u"):
        reason = Reason(
            code=Code.DEVICES_ALLOCATED,
            sentence="it waits",
            regarding=POD,
            find_confirmation=find_confirmation,
        )
        return await self.announcer.announce(uid, [reason], wake=lambda: None)


async def test_an_event_is_written_after_its_reason_is_confirmed():
    place, question = Announcing(), asked()
    place.uncertain = 60.0
    assert await place.announce(lambda: question) == 60.0
    assert place.said == []
    place.uncertain = None
    await place.announce(lambda: question)
    assert place.said == ["it waits"]
    assert place.asked == [(question, "lab")] * 2


async def test_an_event_that_is_not_due_asks_nothing():
    place = Announcing()
    await place.announce(lambda: None)
    await place.announce(asked)
    assert (place.said, place.asked) == (["it waits"], [])


async def test_what_is_not_written_takes_nothing_from_the_rate_of_events(monkeypatch):
    monkeypatch.setattr("drakit_operator.announcing.BURST", 2)
    monkeypatch.setattr("drakit_operator.announcing.PER_SECOND", 0.001)
    place = Announcing()
    place.uncertain = 1.0
    for _ in range(9):
        assert await place.announce(asked) == 1.0
    place.uncertain = None
    await place.announce(asked, uid="v")
    await place.announce(asked)
    assert place.said == ["it waits"] * 2
    place.said.clear()
    assert await place.announce(asked, uid="w") is None
    assert place.said == [], "it waits for its turn"
