"""Calls of a driver: their order, their grouping, their time limits and their ends, in virtual
time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drakit import AllocatedClaim
from drakit_daemon import logs
from drakit_driver.runtime.contract import DriverTraits
from drakit_driver.runtime.failures import DeviceFailedError
from drakit_driver.runtime.order import Order, Place, claim_key
from drakit_nodeplugin.claims.work import ClaimWork, call_driver
from drakit_nodeplugin.state.records import StoredClaim
from tests.fakes.checkpoints import stored_claim, stored_device
from tests.fakes.claims import DRIVER, reference

pytestmark = pytest.mark.looptime

PER_CLAIM = DriverTraits()
PER_BATCH = DriverTraits(batches=frozenset({"prepare", "check"}))
BOTH = pytest.mark.parametrize(
    "traits", [pytest.param(PER_CLAIM, id="claims"), pytest.param(PER_BATCH, id="batches")]
)


class SlowEndpoint:
    """Calls take the time of their slowest claim, and their clean-up the same."""

    def __init__(self, traits: DriverTraits) -> None:
        self.traits = traits
        self.seconds: dict[str, float] = {}
        self.clean_up_seconds: dict[str, float] = {}
        self.calls: list[list[str]] = []
        """The UIDs of each call, in the order of their starts."""
        self.ended: list[list[str]] = []
        self.cancelled: list[list[str]] = []
        self.request_ids: list[str] = []
        self.running: list[set[str]] = []
        """The devices of each call in flight."""

    async def prepare(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, Any]:
        uids = [item.claim.uid for item in batch]
        held = {device.name for item in batch for device in item.devices}
        assert not [other for other in self.running if other & held]
        self.running.append(held)
        self.calls.append(uids)
        self.request_ids.append(logs.request_id.get())
        try:
            await asyncio.sleep(max(self.seconds.get(uid, 0) for uid in uids))
        except asyncio.CancelledError:
            self.cancelled.append(uids)
            await asyncio.sleep(max(self.clean_up_seconds.get(uid, 0) for uid in uids))
            raise
        finally:
            self.running.remove(held)
            self.ended.append(uids)
        return dict.fromkeys(uids, "done")


class Claim:
    """A claim in work."""

    def __init__(self, uid: str, devices: Sequence[Any]) -> None:
        made = [each if not isinstance(each, str) else stored_device(each) for each in devices]
        self.stored: StoredClaim = stored_claim(uid, devices=tuple(made))
        self.uid = self.stored.uid
        self.work = ClaimWork(operation="prepare", claim=reference(self.uid))
        self.turn = Place(keys=[claim_key(self.uid)])
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class Lab:
    """Driver calls in their order, with an endpoint."""

    def __init__(
        self,
        traits: DriverTraits,
        *,
        seconds: Mapping[str, float] = MappingProxyType({}),
        clean_up_seconds: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """The times of calls are by claim."""
        self.endpoint = SlowEndpoint(traits)
        self.endpoint.seconds = {f"uid-{name}": each for name, each in seconds.items()}
        self.endpoint.clean_up_seconds = {
            f"uid-{name}": each for name, each in clean_up_seconds.items()
        }
        self.order = Order()
        self.parts: Any = SimpleNamespace(driver=DRIVER, devices=self.endpoint, order=self.order)
        self.groups: list[list[str]] = []
        """The UIDs of each group of results."""
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self, **claims: Sequence[Any]) -> list[Claim]:
        """Begin the work of one batch: claims with their devices."""
        batch = {claim.uid: claim for claim in itertools.starmap(Claim, claims.items())}
        for claim in batch.values():
            assert self.order.enter(claim.turn)
        self.tasks.append(asyncio.create_task(self._run(batch)))
        return [*batch.values()]

    async def _run(self, batch: Mapping[str, Claim]) -> None:
        works = {uid: claim.work for uid, claim in batch.items()}

        async def on_results(results: Mapping[str, Any]) -> None:
            self.groups.append([*results])
            for uid, result in results.items():
                self._finish(batch[uid], "abandoned" if batch[uid].work.abandoned else result)

        claims = [claim.stored for claim in batch.values()]
        call = self.endpoint.prepare
        await call_driver(self.parts, "prepare", call, claims, on_results, works=works)

    def _finish(self, claim: Claim, result: Any) -> None:
        claim.result.set_result(result)
        self.order.leave(claim.turn)

    async def all_done(self) -> None:
        await asyncio.gather(*self.tasks)
        assert self.order.idle.is_set()


# ------------------------------------------------------------ batches


@BOTH
async def test_claims_that_share_a_device_are_one_call_of_a_batch_or_follow_each_other(
    traits, looptime
):
    shares = [stored_device("nic", share_id=f"{n}") for n in range(3)]
    lab = Lab(traits, seconds=dict.fromkeys("abc", 10))
    lab.begin(a=[shares[0]], b=[shares[1], "cam-0"])
    lab.begin(c=[shares[2]])
    await lab.all_done()
    first = [["uid-a", "uid-b"]] if traits is PER_BATCH else [["uid-a"], ["uid-b"]]
    assert lab.endpoint.calls == [*first, ["uid-c"]]
    assert looptime == 10 * len(lab.endpoint.calls)


@BOTH
async def test_a_claim_that_has_to_wait_does_not_delay_the_rest_of_its_batch(traits):
    lab = Lab(traits, seconds={"x": 10, "y": 5})
    lab.begin(x=["cam-0"])
    lab.begin(y=["cam-3"])
    a, b, c, d = lab.begin(a=["cam-0"], b=["cam-1"], c=["cam-2", "cam-3"], d=["cam-4"])
    await asyncio.sleep(1)
    assert [each.result.done() for each in (a, b, c, d)] == [False, True, False, True]
    together = [["uid-b", "uid-d"]] if traits is PER_BATCH else [["uid-b"], ["uid-d"]]
    assert lab.endpoint.calls[2:] == together
    await lab.all_done()
    assert lab.endpoint.calls[-2:] == [["uid-c"], ["uid-a"]]


# ------------------------------------------------------------ order


async def test_a_call_has_the_request_id_of_its_work_even_if_it_had_to_wait():
    lab = Lab(PER_CLAIM, seconds={"a": 10})
    for uid in "abc":
        with logs.request_scope(f"request-{uid}"):
            lab.begin(**{uid: ["cam-0"]})
    await lab.all_done()
    assert lab.endpoint.request_ids == ["request-a", "request-b", "request-c"]


# ------------------------------------------------------------ time limits


async def test_the_time_of_a_call_begins_when_it_begins(looptime):
    lab = Lab(PER_CLAIM, seconds={"a": 200, "b": 299})
    lab.begin(a=["cam-0"])
    (second,) = lab.begin(b=["cam-0"])
    assert await second.result == "done"
    assert looptime == 499
    await lab.all_done()


@BOTH
async def test_a_call_without_an_answer_is_cancelled_and_the_next_waits_for_its_clean_up(
    traits, looptime
):
    lab = Lab(traits, seconds={"a": 1000}, clean_up_seconds={"a": 20})
    (hanging,) = lab.begin(a=["cam-0"])
    (behind,) = lab.begin(b=["cam-0"])
    error = await hanging.result
    assert looptime == 320
    method, index = ("prepare", 0) if traits is PER_CLAIM else ("prepare_claims", None)
    assert isinstance(error, DeviceFailedError)
    assert (str(error), error.index) == (
        f"driver {DRIVER} did not respond to {method} within 300 s",
        index,
    )
    assert await behind.result == "done"
    assert looptime == 320
    await lab.all_done()


# ------------------------------------------------------------ abandoned claims


async def test_a_claim_that_is_abandoned_during_the_clean_up_does_not_cut_that(looptime):
    lab = Lab(PER_CLAIM, seconds={"a": 1000}, clean_up_seconds={"a": 20})
    (claim,) = lab.begin(a=["cam-0"])
    await asyncio.sleep(310)
    claim.work.abandon()
    assert await claim.result == "abandoned"
    assert looptime == 320
    await lab.all_done()


@pytest.mark.parametrize(
    ("abandoned", "seconds"),
    [pytest.param(1, 10, id="one-of-two"), pytest.param(2, 2, id="both")],
)
async def test_a_batch_is_canceled_once_all_its_claims_are_abandoned(looptime, abandoned, seconds):
    lab = Lab(PER_BATCH, seconds={"a": 10})
    claims = lab.begin(a=["cam-0"], b=["cam-1"])
    for claim in claims[:abandoned]:
        await asyncio.sleep(1)
        claim.work.abandon()
    await lab.all_done()
    assert looptime == seconds
    assert lab.endpoint.cancelled == ([] if abandoned == 1 else [["uid-a", "uid-b"]])
    results = [claim.result.result() for claim in claims]
    assert results == ["abandoned", "done" if abandoned == 1 else "abandoned"]


async def test_an_abandoned_claim_does_not_wait_for_one_of_its_batch(looptime):
    lab = Lab(PER_CLAIM, seconds={"a": 10})
    _, second = lab.begin(
        a=[stored_device("nic", share_id="0")], b=[stored_device("nic", share_id="1")]
    )
    await asyncio.sleep(1)
    second.work.abandon()
    assert await second.result == "abandoned"
    assert looptime < 2.1
    await lab.all_done()
    assert lab.endpoint.calls == [["uid-a"]]


@BOTH
async def test_a_claim_that_is_abandoned_while_it_waits_leaves_at_once(traits, looptime):
    lab = Lab(traits, seconds={"a": 10})
    lab.begin(a=["cam-0"])
    waiting, other = lab.begin(b=["cam-0"], c=["cam-1"])
    (behind,) = lab.begin(d=["cam-0"])
    await asyncio.sleep(1)
    waiting.work.abandon()
    assert await waiting.result == "abandoned"
    assert (looptime, other.result.result(), behind.result.done()) == (1, "done", False)
    await lab.all_done()
    assert looptime == 10
    assert lab.endpoint.calls == [["uid-a"], ["uid-c"], ["uid-d"]]


@BOTH
async def test_a_claim_can_be_abandoned_in_the_turn_of_the_loop_in_which_its_call_is_made(
    traits, looptime
):
    lab = Lab(traits, seconds=dict.fromkeys(["a", "b"], 100))
    claims = lab.begin(a=["cam-0"], b=["cam-1"])
    (waiting,) = lab.begin(c=["cam-0"])
    await asyncio.sleep(0)
    for claim in (*claims, waiting):
        claim.work.abandon()
    await lab.all_done()
    assert looptime == 0


async def test_a_call_can_be_abandoned_and_have_had_its_time_in_one_turn_of_the_loop():
    problems: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    lab = Lab(PER_CLAIM, seconds={"a": 1000})
    (claim,) = lab.begin(a=["cam-0"])
    loop.call_at(loop.time() + 300, lambda: claim.work.abandon())
    assert await claim.result == "abandoned"
    await lab.all_done()
    assert problems == []


# ------------------------------------------------------------ any order


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_calls_that_have_a_device_in_common_never_overlap_keep_their_order_and_all_end(data):
    """Any sequence of batches, pauses and abandoned claims, in a loop of its own."""
    traits = data.draw(st.sampled_from([PER_CLAIM, PER_BATCH]))
    claim = st.tuples(
        st.sets(st.sampled_from("wxyz"), min_size=1, max_size=3),
        st.sampled_from([0, 0, 1, 7, 400]),
        st.sampled_from([0, 3]),
    )
    steps = data.draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("batch"), st.lists(claim, min_size=1, max_size=3)),
                st.tuples(st.just("pause"), st.sampled_from([0, 1, 2])),
                st.tuples(st.just("abandon"), st.integers(0, 30)),
            ),
            max_size=30,
        )
    )

    async def play() -> None:
        lab = Lab(traits)
        claims: list[Claim] = []
        devices: dict[str, set[str]] = {}
        batch_of: dict[str, int] = {}
        for number, step in enumerate(steps):
            match step:
                case ("batch", wanted):
                    batch = {}
                    for names, seconds, clean_up_seconds in wanted:
                        name = str(len(devices))
                        uid = f"uid-{name}"
                        devices[uid], batch_of[uid] = names, number
                        lab.endpoint.seconds[uid] = seconds
                        lab.endpoint.clean_up_seconds[uid] = clean_up_seconds
                        batch[name] = sorted(names)
                    claims += lab.begin(**batch)
                case ("pause", seconds):
                    await asyncio.sleep(seconds)
                case ("abandon", index) if index < len(claims):
                    claims[index].work.abandon()
        await lab.all_done()
        for each in claims:
            result = each.result.result()
            assert result in ("done", "abandoned") or isinstance(result, DeviceFailedError)
        begun = [uid for uids in lab.endpoint.calls for uid in uids]
        for earlier, later in itertools.combinations(begun, 2):
            if devices[earlier] & devices[later]:
                # Claims of one batch may overtake one of them that has to wait.
                assert batch_of[earlier] <= batch_of[later]

    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        runner.run(play())
