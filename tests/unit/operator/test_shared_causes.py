"""One Event about a class, node or template in place of many; flapping; what is counted."""

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from drakit_explain.codes import Cause, Code, Reason
from drakit_explain.kinds import CLAIMS, CLASSES, NODES, PODS, SLICES, TEMPLATES
from drakit_explain.model import ObjectReference
from drakit_operator.announcing import Announcer, NotWrittenError
from drakit_operator.config import Events
from drakit_operator.metrics import Metrics
from tests.fakes.operator_reconciler import GPU, Bench, pod, template
from tests.unit.operator.test_object_events import NODE, READY, claim, pool, see_taken_device

pytestmark = pytest.mark.looptime

GPUS = Cause(ObjectReference("DeviceClass", "gpu.example", "k"), "other claims hold the devices")
NODE_1 = Cause(ObjectReference("Node", "n1", "n1", api_version="v1"), "devices are unhealthy")
NAMING = "; the Event of"
WRITE_SECONDS = 0.01
TIMING = Events().model_copy(update={"debounce": 0.0})


def now():
    return asyncio.get_running_loop().time()


def reference(number):
    return ObjectReference("Pod", f"train-{number}", f"u{number}", f"lab-{number % 2}")


class Place:
    """An announcer that checks each object again when the announcer asks for it, several at a time
    as the workers of the operator do."""

    def __init__(self, *, failures=0):
        self.written = []
        self.failures = failures
        self.refused, self.attempts = "", 0
        self.metrics = Metrics()
        self.due = {}
        self.reasons = {}
        self.announcer = Announcer(self.record, timing=TIMING, metrics=self.metrics)

    async def record(self, announcement):
        await asyncio.sleep(WRITE_SECONDS)
        if self.failures:
            self.failures -= 1
            raise OSError("the API server is unavailable")
        self.attempts += 1
        if announcement.regarding.name == self.refused:
            raise NotWrittenError("exceeded quota", refused=True)
        self.written.append((now(), announcement.regarding.name, announcement.note))
        return announcement.regarding.namespace != "deleted"

    def set(self, number, cause=GPUS, code=Code.DEVICES_ALLOCATED, sentence="it waits"):
        regarding = reference(number)
        self.announcer.known(regarding.uid)
        self.reasons[regarding.uid] = [
            Reason(code=code, sentence=sentence, regarding=regarding, cause=cause)
        ]
        self.due[regarding.uid] = now()

    def end(self, number):
        uid = reference(number).uid
        self.announcer.forget(uid)
        del self.due[uid], self.reasons[uid]

    async def run(self, seconds):
        """Check what is due, four times a second."""
        end = now() + seconds
        while now() < end:
            due = [uid for uid, at in self.due.items() if at <= now()]
            await asyncio.gather(*map(self.check, due))
            await asyncio.sleep(0.25)

    async def check(self, uid):
        try:
            again = await self.announcer.announce(
                uid, self.reasons[uid], wake=partial(self.wake, uid)
            )
        except (OSError, NotWrittenError):
            again = 1.0
        self.due[uid] = now() + (3600 if again is None else again)

    def wake(self, uid):
        self.due[uid] = now()

    @property
    def about(self):
        """The objects with an Event, without those whose Event names another object."""
        return [name for _, name, note in self.written if NAMING not in note]

    def naming(self, number):
        """Return the objects that name another one."""
        end = f"{NAMING} Pod train-{number} has the details"
        return {name for _, name, note in self.written if note.endswith(end)}

    def suppressed(self, cause):
        name = "drakit_operator_events_suppressed_total"
        return self.metrics.registry.get_sample_value(name, {"cause": cause})


@pytest.mark.parametrize("pause", [0.0, 0.25], ids=["at-once", "four-a-second"])
async def test_fifty_objects_with_one_cause_give_one_event_and_one_in_each_namespace(pause):
    place = Place()
    for number in range(50):
        place.set(number)
        await place.run(pause)
    await place.run(1000)
    shared = [note for _, name, note in place.written if name == "gpu.example"]
    assert shared[0].startswith("other claims hold the devices; this affects ")
    assert shared[0].endswith(" Pods in 2 namespaces (kubectl drakit explain -A)")
    assert {"train-0", "train-1"} <= set(place.about)
    assert len(shared) <= 1 + bool(pause), "once more, because the number has doubled"
    if not pause:
        assert "50 Pods" in shared[0]
        assert sorted(place.about) == ["gpu.example", "train-0", "train-1"]
        for first in (0, 1):
            others = {reference(number).name for number in range(first + 2, 50, 2)}
            assert place.naming(first) == others
    assert len(place.written) == 50 + len(shared)


async def test_of_a_crowd_only_the_one_with_the_whole_reason_has_an_event():
    place = Place()
    for number in range(0, 300, 2):
        place.set(number)
    await place.run(30)
    assert place.about == ["train-0", "gpu.example"]
    assert (len(place.naming(0)), place.suppressed("shared")) == (0, 149)


async def test_another_object_gets_the_whole_reason_when_the_one_with_it_is_gone():
    place = Place()
    for number in range(0, 100, 2):
        place.set(number)
    await place.run(10)
    place.written.clear()
    place.end(0)
    for number in range(2, 100, 2):  # what the end of a pod changes is checked
        place.set(number)
    await place.run(10)
    assert place.about == ["train-2"]
    assert len(place.written) == 1


async def test_without_an_event_about_the_cause_each_object_has_its_own():
    place = Place()
    place.refused = "gpu.example"
    for number in range(24):
        place.set(number)
    await place.run(60)
    assert sorted(place.about) == sorted(reference(number).name for number in range(24))
    assert place.attempts <= 24 + 2, "not one for each object"


async def test_an_event_about_a_cause_is_repeated_like_others():
    place = Place()
    for number in range(20):
        place.set(number)
    await place.run(4000)
    assert Counter(place.about) == {"gpu.example": 3, "train-0": 3, "train-1": 3}
    times = [at for at, name, _ in place.written if name == "gpu.example"]
    assert times[1] - times[0] == pytest.approx(1800, abs=2)


async def test_a_few_objects_of_a_namespace_with_one_cause_have_their_own_events():
    place = Place()
    for number in range(18):  # nine in each of two namespaces
        place.set(number)
    await place.run(100)
    assert sorted(place.about) == sorted(reference(number).name for number in range(18))
    place.written.clear()
    place.set(18)
    await place.run(1000)
    assert place.about == ["gpu.example"]
    assert "19 Pods" in place.written[0][2]
    assert place.naming(0) == {"train-18"}


async def test_many_objects_of_a_namespace_do_not_take_the_events_of_another():
    place = Place()
    for number in (*range(0, 100, 2), 1, 3):  # those with an odd number are in lab-1
        place.set(number)
    await place.run(10)
    assert sorted(place.about) == ["gpu.example", "train-0", "train-1", "train-3"]
    place.written.clear()
    for number in (5, 7):
        place.set(number)
    await place.run(10)
    assert sorted(place.about) == ["train-5", "train-7"]


async def test_objects_that_remain_of_many_do_not_get_an_event_each_and_later_ones_do():
    place = Place()
    for number in range(50):
        place.set(number)
    await place.run(10)
    for number in range(45):
        place.end(number)
    for number in range(45, 50):
        place.set(number, sentence="another holder")
    place.set(50)
    await place.run(1000)
    remaining = {"train-45", "train-46"}  # one in each namespace: the one that they named is gone
    assert set(place.about) == {"train-0", "train-1", "gpu.example", "train-50"} | remaining


async def test_two_causes_are_two_events_and_an_object_has_one_of_them():
    place = Place()
    for number in range(40):
        place.set(number, *((GPUS,) if number % 2 else (NODE_1, Code.DEVICE_UNHEALTHY)))
    await place.run(100)
    assert sorted(place.about) == ["gpu.example", "n1", "train-0", "train-1"]
    for _, name, note in place.written:
        assert ("20 Pods" in note) is (name in ("gpu.example", "n1"))


async def test_an_event_about_a_cause_that_could_not_be_written_is_written_later():
    place = Place(failures=3)
    for number in range(50):
        place.set(number)
    await place.run(100)
    shared, *others = sorted(place.about)
    assert shared == "gpu.example"
    assert sorted(int(each.removeprefix("train-")) % 2 for each in others) == [0, 1]


async def test_causes_that_alternate_for_all_objects_give_one_event_each():
    place = Place()
    for turn in range(10):
        for number in range(20):
            place.set(number, *((NODE_1, Code.DEVICE_UNHEALTHY) if turn % 2 else (GPUS,)))
        await place.run(20)
    counts = Counter(place.about)
    assert (counts.pop("gpu.example"), counts.pop("n1")) == (1, 1)
    assert counts.keys() == {"train-0", "train-1"}
    assert max(counts.values()) <= 3, "as for any object that returns to an earlier reason"


async def test_reasons_that_alternate_give_events_after_pauses_that_double():
    place = Place()
    for turn in range(360):
        code = Code.DEVICES_TAINTED if turn % 2 else Code.DEVICES_ALLOCATED
        place.set(1, None, code)
        await place.run(10)
    times = [at for at, _, _ in place.written]
    assert len(times) == 7, "in an hour"
    pauses = [late - early for early, late in itertools.pairwise(times[1:])]
    assert all(pause >= 60 * 2**number for number, pause in enumerate(pauses))
    assert place.suppressed("flapping") > 100


async def test_a_sentence_that_changes_all_the_time_is_announced_after_pauses_that_double():
    place = Place()
    for turn in range(360):
        place.set(1, None, sentence=f"holder {turn}")
        await place.run(10)
    pauses = [
        late[0] - early[0] for early, late in zip(place.written, place.written[1:], strict=False)
    ]
    assert [round(each, -1) for each in pauses] == [60, 120, 240, 480, 960]


async def test_only_what_is_written_is_counted_as_an_event():
    place = Place()
    place.set(1, None)
    place.reasons["u1"] = [
        replace(place.reasons["u1"][0], regarding=replace(reference(1), namespace="deleted"))
    ]
    await place.run(1)
    count = place.metrics.registry.get_sample_value
    labels = {"reason": "DevicesAllocated"}
    assert count("drakit_operator_events_total", labels) is None
    assert place.suppressed("namespace_deleted") == 1
    place.set(2, None)
    await place.run(1)
    assert count("drakit_operator_events_total", labels) == 1


async def test_events_that_wait_for_the_rate_limit_are_counted():
    place = Place()
    for number in range(1010):
        place.set(number, None)
    await place.run(1)
    assert len(place.written) == 1010
    assert place.metrics.registry.get_sample_value("drakit_operator_events_delayed_total") == 10


# ---- from the objects of a cluster


def whole(bench):
    """The Events that do not name another object."""
    return {(name, code) for _, name, code in bench.told if NAMING not in bench.notes[name]}


def named_by(bench):
    """The pod whose Event has the details."""
    (found,) = {name for name, _ in whole(bench)} - {"gpu.example"}
    return found


async def test_fifty_pods_for_taken_devices_give_one_event_about_the_class():
    async with Bench().running() as bench:
        see_taken_device(bench)
        for number in range(50):
            bench.see(CLAIMS, claim(f"claim-{number}"))
            bench.see(PODS, pod(f"train-{number}", f"claim-{number}"))
        await asyncio.sleep(100)
    first = named_by(bench)
    assert whole(bench) == {("gpu.example", "DevicesAllocated"), (first, "DevicesAllocated")}
    assert (
        "this affects 50 Pods and 50 ResourceClaims in one namespace" in bench.notes["gpu.example"]
    )
    assert "claim lab/taken (pod pod-taken) released its devices" in bench.notes[first]
    for name in {"train-7", "train-8", "claim-0"} - {first}:
        assert bench.notes[name] == (
            "other claims hold the devices of the class that match the requests; the Event of Pod "
            f"{first} has the details"
        )


async def test_the_events_of_a_crowd_do_not_name_holders_of_other_namespaces():
    async with Bench().running() as bench:
        see_taken_device(bench, holder="secret", namespace="other")
        for number in range(12):
            bench.see(CLAIMS, claim(f"claim-{number}"))
            bench.see(PODS, pod(f"train-{number}", f"claim-{number}"))
        await asyncio.sleep(100)
    assert "a claim in another namespace" in bench.notes[named_by(bench)]
    assert len(bench.notes) == 25
    assert not any("secret" in note or "other/" in note for note in bench.notes.values())


@pytest.mark.parametrize("gone", [True, False], ids=["that-is-gone", "with-unhealthy-devices"])
async def test_fifty_claims_of_a_node_give_one_event_about_the_node(gone):
    devices = [f"g{number}" for number in range(50)]
    async with Bench().running() as bench:
        for kind, body in ((CLASSES, GPU), (NODES, READY), (SLICES, pool("s", *devices))):
            bench.see(kind, body)
        other = {"metadata": {"name": "n2", "uid": "n2"}}
        bench.see(NODES, other)
        for name in devices:
            made = claim(f"claim-{name}", devices=[name])
            made["status"]["allocation"]["nodeSelector"] = {
                "nodeSelectorTerms": [
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
                ]
            }
            bench.see(CLAIMS, made)
        await asyncio.sleep(10)
        assert bench.told == []
        if gone:
            bench.see(NODES, NODE, gone=True)
        else:
            unhealthy = {"key": "drakit.dev/unhealthy", "effect": "NoSchedule"}
            bench.see(SLICES, pool("s", *devices, taints=[unhealthy]))
        await asyncio.sleep(400)
    code = "NodeGone" if gone else "DeviceUnhealthy"
    (of_node, of_claim) = sorted(whole(bench) - {("s", "NodeGone")}, reverse=True)
    assert (of_node, of_claim[1]) == (("n1", code), code)
    assert of_claim[0].startswith("claim-g")
    if gone:
        words = "the node no longer exists; this affects 50 ResourceClaims"
        assert bench.notes["n1"].startswith(words)


async def test_fifty_pods_of_a_template_without_its_class_give_one_event_about_the_template():

    async with Bench().running() as bench:
        bench.see(TEMPLATES, template("absent.example"))
        await asyncio.sleep(10)
        assert [told[1:] for told in bench.told] == [("tpl", "DeviceClassMissing")]
        bench.told.clear()
        for number in range(50):
            body = pod(f"train-{number}")
            body["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "tpl"}]
            bench.see(PODS, body)
        await asyncio.sleep(20)
    assert whole(bench) == {("tpl", "DeviceClassMissing"), ("train-0", "DeviceClassMissing")}
    assert "this affects 50 Pods in one namespace" in bench.notes["tpl"]
