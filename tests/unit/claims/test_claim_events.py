from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from drakit_driver.runtime.order import Order
from drakit_nodeplugin.claims import events as announcing
from drakit_nodeplugin.claims.events import ClaimEvents
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.claims.work import ClaimResult
from tests.fakes.claims import DRIVER, reference
from tests.fakes.tasks import running

A, B = reference("uid-a"), reference("uid-b")
EVENTS = "/apis/events.k8s.io/v1/namespaces/lab/events"


class Recorder:
    """Records Events as `type reason name: note`."""

    def __init__(self) -> None:
        self.recorded: list[str] = []
        self.failure: Exception | None = None

    async def record(self, regarding, *, reason, action, note, type="Warning") -> None:
        await asyncio.sleep(0.01)
        if self.failure is not None:
            raise self.failure
        self.recorded.append(f"{type} {reason} {regarding['name']}: {note}")


class Engine:
    """Returns the results of the test, each after some seconds."""

    def __init__(self) -> None:
        self.answers: dict[str, ClaimResult] = {}
        self.seconds = 0.0

    async def prepare(self, works) -> None:
        await asyncio.sleep(self.seconds)
        for work in works:
            work.finish(self.answers.get(work.claim.uid, ClaimResult()))

    unprepare = prepare


class Lab:
    """A queue of claims with an observer, and the reported Events."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.recorder = Recorder()
        self.events = ClaimEvents(DRIVER, node="node-1")
        self.queue = ClaimQueue(DRIVER, self.engine, order=Order(), observers=[self.events])

    async def attempt(
        self, *claims, operation: str = "prepare", error: str | None = None, reason: str = "Other"
    ) -> list[str]:
        """Prepare claims with one result for all; return the Events since the last attempt."""
        answer = ClaimResult() if error is None else ClaimResult(error=error, reason=reason)
        self.engine.answers = {claim.uid: answer for claim in claims}
        answers = await self.queue.ask(operation, claims, timeout_seconds=1)
        assert answers == self.engine.answers
        return await self.news()

    def failed(self, claim, text: str) -> None:
        answer = ClaimResult(error=text, reason="DriverFailed")
        self.events.finished(claim, "prepare", answer, 0.0)

    async def news(self) -> list[str]:
        await asyncio.sleep(1)
        recorded, self.recorder.recorded = self.recorder.recorded, []
        return recorded


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    lab = Lab()
    async with running(lab.events.run(lab.recorder)):
        yield lab


@pytest.mark.looptime
async def test_a_failure_is_reported_once_in_ten_minutes(lab):
    failed = {"error": "cam-0 is broken", "reason": "DriverFailed"}
    assert await lab.attempt(A, **failed) == ["Warning PrepareFailed claim-uid-a: cam-0 is broken"]
    for _ in range(6):
        await asyncio.sleep(90)
        assert await lab.attempt(A, **failed) == []
    await asyncio.sleep(90)
    assert await lab.attempt(A, **failed) == ["Warning PrepareFailed claim-uid-a: cam-0 is broken"]


@pytest.mark.looptime
async def test_another_text_and_another_operation_are_reported_at_once(lab):
    assert len(await lab.attempt(A, error="cam-0 is broken")) == 1
    assert len(await lab.attempt(A, error="cam-0 is gone")) == 1
    assert await lab.attempt(A, operation="unprepare", error="cam-0 is gone") == [
        "Warning UnprepareFailed claim-uid-a: cam-0 is gone"
    ]


@pytest.mark.looptime
async def test_that_a_claim_is_prepared_is_reported_after_its_failure_only(lab):
    assert await lab.attempt(A, B) == []
    assert await lab.attempt(A, B, operation="unprepare") == []
    await lab.attempt(A, error="cam-0 is broken")
    assert await lab.attempt(A, B) == [
        f"Normal Prepared claim-uid-a: claim {A}: driver {DRIVER} has now prepared it"
    ]
    assert await lab.attempt(A, B) == []
    assert len(await lab.attempt(A, error="cam-0 is broken")) == 1, "it fails again"
    await lab.attempt(A, operation="unprepare", error="cam-0 is stuck")
    assert await lab.attempt(A, operation="unprepare") == []
    assert await lab.attempt(A) == [], "a claim that is unprepared is over"


@pytest.mark.looptime
@pytest.mark.parametrize("reason", ["ClaimNotRead", "ClaimBusy"])
async def test_transient_failures_are_reported_only_if_they_last(lab, reason):
    failed = {"error": "the API server does not respond", "reason": reason}
    assert await lab.attempt(A, **failed) == []
    assert await lab.attempt(A) == []
    assert await lab.attempt(A, **failed) == [], "it was prepared between"
    await asyncio.sleep(179)
    assert len(await lab.attempt(A, **failed)) == 1


@pytest.mark.looptime
@pytest.mark.parametrize("reason", ["Abandoned", "ClaimGone", "ClaimReplaced"])
async def test_problems_that_do_not_concern_the_claim_are_not_reported_on_it(lab, reason):
    for _ in range(5):
        assert await lab.attempt(A, error="it is gone", reason=reason) == []
        await asyncio.sleep(90)


@pytest.mark.looptime
async def test_work_that_does_not_end_is_reported_after_three_minutes(lab):
    lab.engine.seconds = 400
    work = asyncio.create_task(lab.queue.ask("prepare", [A], timeout_seconds=999))
    await asyncio.sleep(179)
    assert lab.recorder.recorded == []
    await asyncio.sleep(2)
    assert await lab.news() == [
        f"Warning PrepareFailed claim-uid-a: claim {A}: driver {DRIVER} has been preparing it for "
        f"more than 180 s; check the driver's log on this node, and if this persists, restart the "
        "driver's pod on this node, which is the node plugin's if the driver runs in it"
    ]
    await work
    assert [event.split(":")[0] for event in await lab.news()] == ["Normal Prepared claim-uid-a"]


@pytest.mark.looptime
async def test_a_failure_that_is_over_before_it_was_reported_is_not_reported():
    lab = Lab()
    lab.failed(A, "cam-0 is broken")
    lab.failed(B, "cam-1 is broken")
    lab.events.finished(A, "prepare", ClaimResult(), 0.0)
    async with running(lab.events.run(lab.recorder)):
        assert await lab.news() == ["Warning PrepareFailed claim-uid-b: cam-1 is broken"]


@pytest.mark.looptime
async def test_a_write_that_fails_loses_one_sentence_and_no_more(lab, caplog):
    lab.recorder.failure = ValueError("a bug")
    assert await lab.attempt(A, error="cam-0 is broken") == []
    lab.recorder.failure = None
    assert len(await lab.attempt(B, error="cam-1 is broken")) == 1
    assert [record.msg for record in caplog.records] == ["Event could not be written"]


@pytest.mark.looptime
async def test_more_than_can_wait_is_dropped_with_one_line(monkeypatch, caplog):
    monkeypatch.setattr(announcing, "MAX_WAITING", 3)
    monkeypatch.setattr(announcing, "MAX_REMEMBERED", 5)
    lab = Lab()
    claims = [reference(f"uid-{index}") for index in range(9)]
    for claim in claims:
        lab.failed(claim, "the bus is gone")
    async with running(lab.events.run(lab.recorder)):
        recorded = await lab.news()
        assert len(await lab.attempt(claims[8], error="the bus is gone")) == 1
    assert [event.split(":")[0] for event in recorded] == [
        f"Warning PrepareFailed {claim.name}" for claim in claims[:3]
    ]
    assert [record.msg for record in caplog.records] == ["too many claims to report on"]


@pytest.mark.looptime
async def test_a_device_with_another_number_is_reported_on_each_of_its_claims(lab):
    clause = "the device number of tty-0 changed from c 188:0 to c 188:1"
    for claim in (A, B):
        lab.events.finished(claim, "prepare", ClaimResult(renumbered=(clause,)), 0.0)
    assert await lab.news() == [
        f"Warning DeviceRenumbered claim-{claim.uid}: claim {claim}: on node node-1, {clause}; "
        "running containers keep the old number, and cannot open the new one until they "
        "restart; restart them, or delete the pods that use the claim"
        for claim in (A, B)
    ]
