from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from drakit import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimReference,
    Condition,
    DeviceParameters,
    Driver,
    DriverError,
    Edits,
    PreparedDevice,
)
from drakit.driver import DriverConfig
from drakit_driver.runtime.contract import ConnectionEndedError
from drakit_driver.runtime.failures import (
    BadParametersError,
    DeviceFailedError,
    EndpointStoppedError,
)
from tests.fakes.claims import NODE, reference
from tests.fakes.direct import DirectEndpoint, call, call_batch
from tests.fakes.node import StaticNode

A, B, C, D = map(reference, ("uid-a", "uid-b", "uid-c", "uid-d"))


def device(name: str, *, pool: str = NODE, **fields: Any) -> AllocatedDevice:
    return AllocatedDevice(name=name, pool=pool, request="main", **fields)


def prepared(name: str) -> PreparedDevice:
    return PreparedDevice(edits=edits(name))


def edits(name: str) -> Edits:
    return Edits(env={"CAMERA": name})


class Camera(Driver[DriverConfig]):
    """Records its calls, and follows the test's instructions for a device."""

    name = "camera.example.com"

    def __init__(self) -> None:
        super().__init__(DriverConfig(), StaticNode(name=NODE))
        self.asked: list[Any] = []
        self.ended: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.held: dict[str, asyncio.Event] = {}
        self.seen: list[AllocatedDevice] = []
        self.seconds = 0.0
        self.clean_up_fails: Exception | None = None

    async def devices(self):
        yield []

    async def work(self, device: AllocatedDevice) -> None:
        self.seen.append(device)
        try:
            if device.name in self.held:
                await self.held[device.name].wait()
            await asyncio.sleep(self.seconds)
            if device.name in self.failing:
                raise self.failing[device.name]
        except asyncio.CancelledError:
            if self.clean_up_fails is not None:
                raise self.clean_up_fails from None
            raise
        finally:
            self.ended.append(device.name)


class PerDevice(Camera):
    async def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> Edits:
        self.asked.append(device.name)
        await self.work(device)
        return edits(device.name)

    async def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        self.asked.append(device.name)
        await self.work(device)


class PerBatch(Camera):
    def __init__(self) -> None:
        super().__init__()
        self.changes: dict[str, Any] = {}
        """Wrong results by UID. "nothing" omits a result."""

    def answered(self, answers: dict[str, Any]) -> dict[str, Any]:
        answers |= self.changes
        return {uid: answer for uid, answer in answers.items() if answer != "nothing"}

    async def work_for(self, claims: Sequence[AllocatedClaim]) -> None:
        self.asked.append([item.claim.uid for item in claims])
        for device in [each for item in claims for each in item.devices]:
            await self.work(device)

    async def prepare_claims(self, claims: Sequence[AllocatedClaim]) -> Mapping[str, Any]:
        await self.work_for(claims)
        return self.answered(
            {item.claim.uid: [edits(device.name) for device in item.devices] for item in claims}
        )

    async def unprepare_claims(self, claims: Sequence[AllocatedClaim]) -> Mapping[str, Any]:
        await self.work_for(claims)
        return self.answered({item.claim.uid: None for item in claims})


class Resets(Camera):
    """Adds a reset to a driver."""

    refusing: Mapping[str, Exception] = {}

    async def reset(self, device: AllocatedDevice) -> None:
        self.ended.append(f"reset {device.name}")
        if device.name in self.refusing:
            raise self.refusing[device.name]


class ResetsPerDevice(Resets, PerDevice):
    pass


class ResetsPerBatch(Resets, PerBatch):
    pass


def reach(kind: type[Camera]) -> tuple[Any, DirectEndpoint]:
    driver = kind()
    return driver, DirectEndpoint(driver, node=NODE)


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def failure(work) -> DeviceFailedError:
    with pytest.raises(DeviceFailedError) as raised:
        await work
    return raised.value


# ------------------------------------------------------------ one device


@pytest.mark.parametrize("operation", ["prepare", "unprepare"])
async def test_the_first_failure_is_raised_once_nothing_works_on_the_claim_any_more(operation):
    driver, caller = reach(PerDevice)
    driver.failing = {name: DriverError(f"{name} is dirty") for name in ("cam-1", "cam-2")}
    driver.held["cam-0"] = asyncio.Event()
    devices = [device(f"cam-{number}") for number in range(3)]
    work = asyncio.create_task(call(getattr(caller, operation), A, devices))
    await turns()
    assert (sorted(driver.ended), work.done()) == (["cam-1", "cam-2"], False)
    driver.held["cam-0"].set()
    error = await failure(work)
    assert (str(error), error.index) == ("cam-1 is dirty", 1)


async def test_devices_are_prepared_side_by_side_each_with_a_call_of_its_own():
    driver, caller = reach(PerDevice)
    driver.held["cam-0"] = driver.held["cam-1"] = asyncio.Event()
    work = asyncio.create_task(call(caller.prepare, A, [device("cam-0"), device("cam-1")]))
    await turns()
    assert driver.asked == ["cam-0", "cam-1"]
    driver.held["cam-0"].set()
    assert await work == [prepared("cam-0"), prepared("cam-1")]
    assert caller.calls == [("prepare", ["uid-a"])]


async def test_a_claim_that_is_given_up_gives_up_all_of_its_devices():
    driver, caller = reach(PerDevice)
    driver.held["cam-0"] = driver.held["cam-1"] = asyncio.Event()
    work = asyncio.create_task(call(caller.prepare, A, [device("cam-0"), device("cam-1")]))
    await turns()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await turns()
    assert sorted(driver.ended) == ["cam-0", "cam-1"]


async def test_a_cancellation_that_the_driver_makes_itself_is_no_cancellation_of_its_caller():
    driver, caller = reach(PerDevice)
    driver.failing["cam-0"] = asyncio.CancelledError()
    error = await failure(call(caller.prepare, A, [device("cam-0")]))
    assert str(error).endswith("the driver canceled its own call, which is a bug in the driver")


async def test_a_pool_is_named_in_the_drivers_words():
    driver, caller = reach(PerDevice)
    pools = [NODE, f"{NODE}/gpus", "other"]
    await call(caller.prepare, A, [device("cam-0", pool=pool) for pool in pools])
    assert [seen.pool for seen in driver.seen] == ["", "gpus", "other"]


# ------------------------------------------------------------ what a driver does wrong


def ours(caplog) -> list[logging.LogRecord]:
    """Return only our log records: asyncio also logs here when it collects tasks of other tests."""
    return [record for record in caplog.records if record.name.startswith("drakit")]


async def test_only_what_a_driver_did_not_mean_to_raise_is_logged(caplog):
    driver, caller = reach(PerDevice)
    driver.failing["cam-0"] = DriverError("clean it")
    await failure(call(caller.prepare, A, [device("cam-0")]))
    assert ours(caplog) == []
    driver.failing["cam-0"] = KeyError("a bug")
    await failure(call(caller.prepare, A, [device("cam-0")]))
    (record,) = ours(caplog)
    assert record.exc_info is None
    assert record.exception.endswith("KeyError: 'a bug'\n")


@pytest.mark.parametrize("kind", [PerDevice, PerBatch])
@pytest.mark.parametrize("operation", ["prepare", "unprepare", "check"])
async def test_a_driver_that_is_stopped_or_ends_meanwhile_is_reported_as_stopped(kind, operation):
    _, caller = reach(kind)
    caller.failure = ConnectionEndedError("it ended in the meantime")
    with pytest.raises(EndpointStoppedError, match="is unavailable: it ended in the meantime"):
        await call(getattr(caller, operation), A, [device("cam-0")])
    caller.stopped = EndpointStoppedError(driver=Camera.name, reason="its stream ended")
    with pytest.raises(EndpointStoppedError, match="is unavailable: its stream ended"):
        await call(getattr(caller, operation), A, [device("cam-0")])


class Broken(Sequence):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index):
        raise RuntimeError("a bug")


async def test_a_failure_that_is_about_no_device_names_the_driver():
    driver, caller = reach(PerBatch)
    driver.failing["cam-1"] = DriverError("the bus is gone")
    for operation in (caller.prepare, caller.unprepare):
        error = await failure(call(operation, A, [device("cam-0"), device("cam-1")]))
        assert (str(error), error.index) == (f"driver {Camera.name}: the bus is gone", None)


# ------------------------------------------------------------ batches


@pytest.mark.parametrize("operation", ["prepare", "unprepare"])
async def test_a_batch_is_one_call_if_the_driver_takes_batches(operation):
    driver, caller = reach(PerBatch)
    first, second = await call_batch(
        getattr(caller, operation), (A, [device("cam-0"), device("cam-1")]), (B, [device("cam-2")])
    )
    await call(getattr(caller, operation), C, [device("cam-3")])
    assert driver.asked == [["uid-a", "uid-b"], ["uid-c"]]
    assert caller.calls == [(operation, ["uid-a", "uid-b"]), (operation, ["uid-c"])]
    if operation == "prepare":
        assert (list(first), list(second)) == (
            [prepared("cam-0"), prepared("cam-1")],
            [prepared("cam-2")],
        )


async def test_edits_and_more_can_be_mixed():
    driver, caller = reach(PerBatch)
    data = {"channels": [1, 2]}
    ready = Condition(type="Ready", status="True", reason="Configured")
    more = PreparedDevice(edits=edits("cam-1"), conditions=(ready,), data=data)
    driver.changes = {"uid-a": [edits("cam-0"), more]}
    results = await call(caller.prepare, A, [device("cam-0"), device("cam-1")])
    data["channels"].append(3)  # the driver changes its own object later
    assert list(results) == [
        prepared("cam-0"),
        PreparedDevice(edits=edits("cam-1"), conditions=(ready,), data={"channels": [1, 2]}),
    ]


BAD_ANSWERS = {
    "left-out": ("nothing", "returned nothing for this claim; this is a bug", None),
    "refused": (DriverError("dirty"), f"driver {Camera.name}: dirty", None),
    "bug": (ValueError("a bug"), "in prepare_claims: ValueError: a bug", None),
    "cancelled": (asyncio.CancelledError(), "CancelledError, which is no", None),
    "none": (None, "NoneType, which is not a sequence of Edits", None),
    "no-list": (edits("b"), "Edits, which is not a sequence of Edits", None),
    "too-few": ([edits("b")], "1 Edits for 2 devices of a claim", None),
    "too-many": ([edits("b")] * 3, "3 Edits for 2 devices", None),
    "a-gap": ([edits("b"), None], "NoneType, which is neither an Edits", 1),
    "text": ("ab", "str, which is neither an Edits", 0),
    "unreadable": (Broken(), "in prepare_claims: RuntimeError: a bug", None),
}


@pytest.mark.parametrize(("answer", "text", "index"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
async def test_a_claim_of_a_batch_fails_alone(answer, text, index):
    driver, caller = reach(PerBatch)
    driver.changes = {"uid-b": answer}
    fine, failed = await call_batch(
        caller.prepare, (A, [device("cam-0")]), (B, [device("cam-1"), device("cam-2")])
    )
    assert list(fine) == [prepared("cam-0")]
    assert isinstance(failed, DeviceFailedError)
    assert text in str(failed)
    assert f"driver {Camera.name}" in str(failed)
    assert failed.index == index


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        pytest.param("nothing", "returned nothing for this claim; this is a bug", id="left-out"),
        pytest.param(DriverError("b is dirty"), f"driver {Camera.name}: b is dirty", id="refused"),
        pytest.param(True, "returned bool for a claim, which is neither None nor", id="not-none"),
    ],
)
async def test_a_claim_of_a_batch_stays_to_be_undone_alone(answer, text):
    driver, caller = reach(ResetsPerBatch)
    driver.changes = {"uid-b": answer}
    fine, failed = await call_batch(
        caller.unprepare, (A, [device("cam-0")]), (B, [device("cam-1")])
    )
    assert fine is None
    assert text in str(failed)
    assert driver.ended == ["cam-0", "cam-1", "reset cam-0"]


@pytest.mark.parametrize("operation", ["prepare", "unprepare"])
@pytest.mark.parametrize(
    ("raised", "text"),
    [
        pytest.param(DriverError("the bus is gone"), "the bus is gone", id="raises"),
        pytest.param(None, "returned NoneType, which is not a mapping of claims", id="no-mapping"),
    ],
)
async def test_an_error_of_the_batch_fails_all_of_its_claims(operation, raised, text, monkeypatch):
    driver, caller = reach(PerBatch)
    if raised is None:
        monkeypatch.setattr(PerBatch, f"{operation}_claims", lambda *_: None)
    else:
        driver.failing["cam-0"] = raised
    errors = await call_batch(
        getattr(caller, operation), (A, [device("cam-0")]), (B, [device("cam-1")])
    )
    assert [text in str(error) for error in errors] == [True, True]


class OddAnswers(DirectEndpoint):
    """A driver whose connection returns results that none of our drivers may return."""

    answer: Any = None

    async def _connection(self, ended: object = None) -> Any:
        async def answers(batch: Sequence[AllocatedClaim]) -> Mapping[str, Any]:
            return {batch[0].claim.uid: self.answer, batch[1].claim.uid: [prepared("cam-1")]}

        return SimpleNamespace(prepare=answers)


class BrokenLength(Broken):
    def __len__(self) -> int:
        raise RuntimeError("a bug")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        pytest.param(None, "in prepare_claims: TypeError: object of type 'NoneType'", id="none"),
        pytest.param(BrokenLength(), "in prepare_claims: RuntimeError: a bug", id="unreadable"),
    ],
)
async def test_an_odd_answer_of_a_connection_fails_its_claim_alone(answer, text):
    endpoint = OddAnswers(PerBatch(), node=NODE)
    endpoint.answer = answer
    failed, fine = await call_batch(
        endpoint.prepare, (A, [device("cam-0")]), (B, [device("cam-1")])
    )
    assert fine == [prepared("cam-1")]
    assert isinstance(failed, DeviceFailedError)
    assert text in str(failed)


async def test_an_answer_for_a_claim_that_was_not_asked_for_is_logged(caplog):
    driver, caller = reach(PerBatch)
    driver.changes = {"uid-other": [edits("cam-9")]}
    assert list(await call(caller.prepare, A, [device("cam-0")])) == [prepared("cam-0")]
    assert [record.message for record in caplog.records] == [
        "driver returned results for unrequested claims"
    ]


# ------------------------------------------------------------ cancellations


@pytest.mark.looptime
async def test_an_exception_of_an_abandoned_call_is_logged(caplog):
    driver, caller = reach(PerBatch)
    driver.seconds = 10
    driver.clean_up_fails = ValueError("cannot undo it")
    work = asyncio.create_task(call(caller.prepare, A, [device("a")]))
    await asyncio.sleep(1)
    work.cancel()
    await asyncio.sleep(1)
    bug, late = [record for record in caplog.records if record.name.startswith("drakit")]
    assert bug.exception.endswith("cannot undo it\n")
    assert (late.levelno, late.msg) == (
        logging.ERROR,
        "call failed after its timeout or cancellation",
    )
    assert late.error.endswith("ValueError: cannot undo it")
    assert work.cancelled()


# ------------------------------------------------------------ reset


@pytest.mark.parametrize(
    "kind", [pytest.param(ResetsPerDevice, id="device"), pytest.param(ResetsPerBatch, id="batch")]
)
async def test_a_device_is_reset_in_the_call_that_undid_it_unless_others_may_use_it(kind):
    driver, caller = reach(kind)
    devices = [
        device("cam-0"),
        device("cam-1", share_id="share-1"),
        device("cam-2", admin_access=True),
        device("cam-3"),
    ]
    await call(caller.unprepare, A, devices)
    assert len(caller.calls) == 1
    resets = [done for done in driver.ended if done.startswith("reset")]
    assert sorted(resets) == ["reset cam-0", "reset cam-3"]
    for name in ("cam-0", "cam-3"):
        assert driver.ended.index(name) < driver.ended.index(f"reset {name}")


@pytest.mark.parametrize("kind", [ResetsPerDevice, ResetsPerBatch])
async def test_a_device_whose_unprepare_failed_is_not_reset(kind):
    driver, caller = reach(kind)
    driver.failing["cam-0"] = DriverError("it is busy")
    await failure(call(caller.unprepare, A, [device("cam-0")]))
    assert driver.ended == ["cam-0"]


@pytest.mark.parametrize("kind", [ResetsPerDevice, ResetsPerBatch])
@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        pytest.param(DriverError("turn it off and on"), "turn it off and on", id="refuses"),
        pytest.param(
            ValueError("a bug"),
            f"driver {Camera.name} failed in reset: ValueError: a bug",
            id="bug",
        ),
    ],
)
async def test_a_reset_that_fails_names_its_device_once_all_are_done(kind, refusal, text):
    driver, caller = reach(kind)
    driver.refusing = {"cam-1": refusal}
    devices = [device(f"cam-{number}") for number in range(3)]
    error, other = await call_batch(caller.unprepare, (A, devices), (B, [device("cam-3")]))
    assert (str(error), error.index, other) == (text, 1, None)
    assert {"reset cam-2", "reset cam-3"} <= set(driver.ended)


# ------------------------------------------------------------ parameters


class Parameters(DeviceParameters):
    mode: str


@pytest.mark.parametrize("kind", [PerDevice, PerBatch])
async def test_bad_parameters_fail_their_claim_and_name_the_device(kind, monkeypatch):
    monkeypatch.setattr(kind, "parameters_type", Parameters)
    driver, caller = reach(kind)
    good = device("cam-0", configs=({"mode": "fast"},))
    bad = replace(good, name="cam-1", configs=({"mode": 7},))
    fine, failed = await asyncio.gather(
        call(caller.prepare, A, [replace(good, name="cam-2")]),
        call(caller.prepare, B, [good, bad]),
        return_exceptions=True,
    )
    assert list(fine) == [prepared("cam-2")]
    assert isinstance(failed, BadParametersError)
    assert (failed.index, "mode: Input should be a valid string" in str(failed)) == (1, True)
    assert {seen.name: seen.parameters for seen in driver.seen}["cam-2"] == Parameters(mode="fast")


@pytest.mark.parametrize("kind", [PerDevice, PerBatch])
async def test_bad_parameters_do_not_keep_a_device_from_being_undone(kind, monkeypatch):
    monkeypatch.setattr(kind, "parameters_type", Parameters)
    driver, caller = reach(kind)
    await call(caller.unprepare, A, [device("cam-0"), device("cam-1", configs=({"mode": "fast"},))])
    assert {seen.name: seen.parameters for seen in driver.seen} == {
        "cam-0": None,
        "cam-1": Parameters(mode="fast"),
    }


# ------------------------------------------------------------ check


@pytest.mark.parametrize(
    ("answers", "expected", "logged"),
    [
        pytest.param([True, True], True, 0, id="all-in-order"),
        pytest.param([True, False], False, 0, id="one-is-not"),
        pytest.param([True, None], False, 1, id="forgets-an-answer"),
    ],
)
async def test_a_check_reports_whether_all_devices_are_prepared(
    answers, expected, logged, monkeypatch, caplog
):
    def check(self, claim, device):
        answer = answers[int(device.name[-1])]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(PerDevice, "check", check, raising=False)
    _, caller = reach(PerDevice)
    assert await call(caller.check, A, [device("cam-0"), device("cam-1")]) is expected
    assert len(caplog.records) == logged


@pytest.mark.looptime
async def test_a_claim_of_a_batch_that_cannot_be_checked_fails_alone(monkeypatch, caplog):
    def check(self: PerBatch, claim: ClaimReference, device: AllocatedDevice) -> bool:
        if claim == A:
            raise DriverError("the bus is gone")
        return True

    monkeypatch.setattr(PerBatch, "check", check, raising=False)
    _, caller = reach(PerBatch)
    first, second = await call_batch(caller.check, (A, [device("a")]), (B, [device("b")]))
    assert (first, second) == (False, True)
    (record,) = caplog.records
    assert (record.claim_uid, record.error) == (A.uid, "the bus is gone")


@pytest.mark.looptime
async def test_a_call_is_reported_while_it_takes_longer_than_five_seconds(caplog):
    driver = PerDevice()
    driver.seconds = 7
    endpoint = DirectEndpoint(driver, node=NODE)
    work = asyncio.create_task(call(endpoint.prepare, A, [device("cam-0")]))
    await asyncio.sleep(4.9)
    assert endpoint.slow_calls == []
    await asyncio.sleep(0.2)
    assert endpoint.slow_calls == [f"it has not responded to prepare for 5 s (claim {A})"]
    assert caplog.messages == ["driver has not responded to a call yet"]
    await work
    assert endpoint.slow_calls == []
