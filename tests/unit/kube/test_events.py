"""Events: the same sentence counts, a flood is cut short, a failure is nobody's trouble."""

import asyncio

import pytest

from drakit_daemon.kube import UnavailableError
from drakit_daemon.kube.events import EventRecorder, EventTimings
from drakit_daemon.kube.request import error_of_status
from tests.fakes.kube import FakeCluster
from tests.unit.kube.conftest import ObjectSession

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "cam", "namespace": "lab", "uid": "u-1", "resourceVersion": "7"},
}
NODE = {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "u-2"}
EVENTS = "/apis/events.k8s.io/v1/namespaces/lab/events"

pytestmark = pytest.mark.looptime


class Objects(ObjectSession):
    def events(self, namespace="lab"):
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        return self.cluster.request("GET", path)[1]["items"]


@pytest.fixture
def objects():
    return Objects(FakeCluster())


OPERATOR = {"controller": "drakit.dev/operator", "instance": "drakit-operator-0"}
NODE_PLUGIN = {"controller": "drakit.dev/nodeplugin", "instance": "node-1", "shared": False}


def recorder_on(objects, reporter=OPERATOR, **timings):
    return EventRecorder(objects, **reporter, timings=EventTimings(**timings))


async def say(recorder, note="no such class", regarding=POD, **changed):
    said = {"reason": "DeviceClassMissing", "action": "Explain", "note": note} | changed
    await recorder.record(regarding, **said)


async def test_an_event_has_reason_and_object(objects):
    await say(recorder_on(objects))
    (event,) = objects.events()
    assert event["regarding"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "cam",
        "namespace": "lab",
        "uid": "u-1",
        "resourceVersion": "7",
    }
    assert (event["type"], event["reason"], event["action"], event["note"]) == (
        "Warning",
        "DeviceClassMissing",
        "Explain",
        "no such class",
    )
    assert event["reportingController"] == "drakit.dev/operator"
    assert event["reportingInstance"] == "drakit-operator-0"
    assert event["eventTime"].endswith("Z")


async def test_an_object_without_namespace_has_its_events_in_default(objects):
    await say(recorder_on(objects), regarding=NODE, type="Normal")
    (event,) = objects.events("default")
    assert event["regarding"] == NODE
    assert event["type"] == "Normal"


async def test_the_same_sentence_counts(objects):
    recorder = recorder_on(objects)
    for _ in range(10):
        await say(recorder)
        await asyncio.sleep(60)
    (event,) = objects.events()
    assert event["series"]["count"] == 10
    assert objects.writes == ["POST"] + ["PATCH"] * 9


async def test_who_repeats_himself_each_second_is_quoted_now_and_then(objects):
    recorder = recorder_on(objects)
    for _ in range(100):
        await say(recorder)
        await asyncio.sleep(1)
    assert len(objects.writes) <= 5
    assert objects.events()[0]["series"]["count"] >= 80


async def test_another_sentence_or_object_is_another_event(objects):
    recorder = recorder_on(objects)
    await say(recorder)
    await say(recorder, note="no device")
    await say(recorder, reason="NoDevice")
    await say(recorder, regarding={**POD, "metadata": {**POD["metadata"], "uid": "u-9"}})
    assert len(objects.events()) == 4


@pytest.mark.parametrize(
    ("shared", "events"),
    [pytest.param(True, 1, id="replicas"), pytest.param(False, 2, id="one-instance-a-node")],
)
async def test_instances_share_an_event_only_where_they_may_write_it(objects, shared, events):
    for instance in ("node-1", "node-2", "node-1"):
        await say(recorder_on(objects, NODE_PLUGIN | {"instance": instance, "shared": shared}))
    found = objects.events()
    assert len(found) == events
    if not shared:
        counts = {e["reportingInstance"]: e.get("series", {}).get("count") for e in found}
        assert counts == {"node-1": 2, "node-2": None}


async def test_a_restarted_recorder_goes_on_counting(objects):
    for _ in range(3):
        await say(recorder_on(objects))
    (event,) = objects.events()
    assert event["series"]["count"] == 3


@pytest.mark.parametrize(
    "reporter",
    [
        pytest.param(("drakit.dev/nodeplugin", "node-2"), id="another-node"),
        pytest.param(("attacker.test/a", "node-1"), id="another-controller"),
    ],
)
async def test_an_event_whose_name_another_reporter_has_taken_gets_another_name(objects, reporter):
    await say(recorder_on(objects, NODE_PLUGIN))
    (event,) = objects.events()
    name = event["metadata"]["name"]
    objects.cluster.request("DELETE", f"{EVENTS}/{name}")
    controller, instance = reporter
    squatter = {"reportingController": controller, "reportingInstance": instance}
    objects.cluster.request("POST", EVENTS, {}, event | squatter | {"metadata": {"name": name}})
    recorder = recorder_on(objects, NODE_PLUGIN)
    for _ in range(3):
        await say(recorder)
        await asyncio.sleep(60)
    found = {each["metadata"]["name"]: each for each in objects.events()}
    assert "series" not in found.pop(name)
    (own,) = found.values()
    assert (own["reportingController"], own["reportingInstance"]) == (
        "drakit.dev/nodeplugin",
        "node-1",
    )
    assert own["note"] == "no such class"
    assert own["series"]["count"] == 3, "it counts on under its own name"


async def test_an_event_that_the_server_forgot_is_created_again(objects):
    recorder = recorder_on(objects)
    await say(recorder)
    await asyncio.sleep(60)
    objects.cluster.objects.clear()
    await say(recorder)
    await say(recorder)
    assert len(objects.events()) == 1


@pytest.mark.parametrize("status", [403, 404, 429, 500])
async def test_a_write_that_fails_is_not_the_callers_trouble(objects, caplog, status):
    recorder = recorder_on(objects)
    body = {"code": status, "reason": "No", "message": "not today"}
    objects.error = error_of_status(body, method="POST", path=EVENTS)
    await say(recorder)
    assert "Event could not be written" in caplog.text
    objects.error = None
    await say(recorder)
    assert len(objects.events()) == 1, "what was not said is said at the next occasion"


async def test_a_failing_count_is_not_the_callers_trouble(objects):
    recorder = recorder_on(objects)
    await say(recorder)
    objects.error = UnavailableError.no_response("PATCH", EVENTS, why="cut")
    await asyncio.sleep(60)
    await say(recorder)
    objects.error = None
    await asyncio.sleep(60)
    await say(recorder)
    assert objects.events()[0]["series"]["count"] == 3


async def test_a_flood_about_one_object_is_cut_short_for_that_object_and_source_alone(objects):
    recorder = recorder_on(objects, burst=3, refill_seconds=60)
    for n in range(50):
        await say(recorder, note=f"at {n}")
    assert len(objects.events()) == 3
    await say(recorder, regarding=NODE)
    assert len(objects.events("default")) == 1
    await say(recorder, note="of another driver", source="camera.example.com")
    assert len(objects.events()) == 4
    await asyncio.sleep(61)
    await say(recorder, note="later")
    assert len(objects.events()) == 5


async def test_what_is_remembered_is_bounded(objects):
    recorder = recorder_on(objects, capacity=5)
    for n in range(20):
        await say(recorder, regarding={**NODE, "uid": f"u-{n}"})
    assert len(recorder._series.items) == len(recorder._limiters.items) == 5


async def test_the_limits_of_the_api_are_kept(objects):
    long = {**NODE, "name": "n" * 229 + "." + "x" * 23}
    await say(recorder_on(objects), regarding=long, note="ä" * 3000, reason="R" * 200)
    (event,) = objects.events("default")
    assert len(event["note"].encode()) <= 1024
    assert event["note"].endswith("ä…")
    assert len(event["reason"]) == 128
    assert len(event["metadata"]["name"]) <= 253
    assert ".." not in event["metadata"]["name"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("\udcff", r"\udcff", id="not-utf-8"),
        pytest.param("\x1b]0;x\x07", r"\u001b]0;x\u0007", id="terminal"),
        pytest.param("\u202e\n\x9b", r"\u202e\n\u009b", id="direction-line-and-c1"),
    ],
)
async def test_a_note_has_no_control_characters(objects, text, shown):
    recorder = recorder_on(objects)
    for _ in range(2):
        await say(recorder, note=f"device usb-{text} is not published")
    (event,) = objects.events()
    assert event["note"] == f"device usb-{shown} is not published"


async def test_an_object_without_kind_is_refused(objects):
    with pytest.raises(ValueError, match="kind and name"):
        await say(recorder_on(objects), regarding={"metadata": {"name": "x"}})


@pytest.mark.parametrize(
    ("status", "details"),
    [
        pytest.param(
            403, {"causes": [{"reason": "NamespaceTerminating"}]}, id="it-is-being-deleted"
        ),
        pytest.param(404, {"name": "lab", "kind": "namespaces"}, id="it-does-not-exist"),
    ],
)
async def test_an_event_in_a_namespace_that_is_gone_is_dropped(objects, caplog, status, details):
    body = {"code": status, "reason": "No", "message": "not there", "details": details}
    objects.error = error_of_status(body, method="POST", path=EVENTS)
    await recorder_on(objects).write(POD, reason="NoDevice", action="Explain", note="no device")
    assert not caplog.records, "also not in the log"
