"""The Events of a run are drakit's own, each belongs to its spec, and each needs a reason."""

import json
from datetime import datetime

from e2e.upstream.events import Expected, unexpected, watched, written
from e2e.upstream.report import Spec


def spec(name="sharing", namespace="dra-1", start="00:00:10", end="00:00:20"):
    return Spec(
        name=name,
        labels=frozenset(),
        state="passed",
        started=datetime.fromisoformat(f"2026-11-24T{start}Z"),
        ended=datetime.fromisoformat(f"2026-11-24T{end}Z"),
        namespaces=frozenset({namespace}),
    )


def event(uid="1", namespace="dra-1", controller="drakit.dev/operator", at="00:00:15", **changes):
    kind = changes.pop("kind", "Pod")
    regarding = {"kind": kind, "name": "tester", "namespace": namespace}
    if not namespace:
        regarding = {"kind": "Node", "name": "node-1"}
    return {
        "metadata": {"uid": uid},
        "reportingController": controller,
        "reason": "DevicesAllocated",
        "note": "no device is free: 1 of 1 is allocated",
        "eventTime": f"2026-11-24T{at}.123456Z",
        "regarding": regarding,
        **changes,
    }


def test_a_watch_is_read_up_to_its_last_whole_change():
    changes = [
        {"type": "ADDED", "object": {"n": 1}},
        {"type": "DELETED", "object": {"n": 2}},
        {"type": "MODIFIED", "object": {"n": 3}},
    ]
    text = "\n".join(json.dumps(change, indent=1) for change in changes)
    assert list(watched(f'{text}\n{{"type": "ADD')) == [{"n": 1}, {"n": 3}]


def test_only_events_of_drakit_count_and_each_once():
    foreign = event(uid="2", controller="kubelet")
    assert len(written(iter([event(), event(), foreign]), [spec()])) == 1


def test_an_event_of_specs_that_ended_before_is_not_of_this_run():
    earlier, later = event(namespace="dra-9", at="00:00:05"), event(uid="2", namespace="dra-9")
    node = event(uid="3", namespace="", at="00:00:05")
    found = written(iter([earlier, later, node]), [spec()])
    assert [(one.kind, one.time[17:19]) for one in found] == [("Node", "05"), ("Pod", "15")]


def test_an_event_is_expected_by_spec_reason_and_its_whole_note():
    events = written(iter([event()]), [spec()])
    pod = ("Pod",)
    entry = {"reason": "DevicesAllocated", "kinds": pod, "why": "the spec allocates all devices"}
    note = r"no device is free: \d of \d is allocated"
    assert unexpected(events, [], [Expected(spec="sharing", note=note, **entry)]) == []
    assert unexpected(events, [], [Expected(spec="reusing", note=note, **entry)]) == events
    assert unexpected(events, [], [Expected(spec="sharing", note="no device", **entry)]) == events
    assert unexpected(events, [], []) == events
    claims = Expected(spec="sharing", note=note, **{**entry, "kinds": ("ResourceClaim",)})
    assert unexpected(events, [], [claims]) == events


CLAIM = "claim dra-1/tester: driver dra-1.k8s.io"
INJECTED = f"{CLAIM}: its backend answered UnprepareClaims: injected error; the kubelet retries"
FAILED = {"kind": "ResourceClaim", "reason": "UnprepareFailed", "note": INJECTED}
PREPARED = {"kind": "ResourceClaim", "reason": "Prepared", "note": f"{CLAIM} has now prepared it"}
TAINTED = {
    "reason": "DevicesTainted",
    "note": "no device: 10 are tainted with test.example.com/evict",
}
RULE = "DeviceTaintRule evicts pod"


def judged(specs, *bodies):
    """Return the reasons of the Events that the list does not expect."""
    return [each.reason for each in unexpected(written(iter(bodies), specs), specs)]


def test_an_error_that_is_injected_is_expected_in_each_spec_and_its_end_after_it():
    assert judged([spec()], event(**FAILED)) == []
    assert judged([spec()], event(**{**FAILED, "note": f"{CLAIM}: its backend is gone"})) != []
    again = event("2", at="00:00:17", **PREPARED)
    assert judged([spec()], again) == ["Prepared"]
    assert judged([spec()], event(**FAILED), again) == []
    assert judged([spec()], event("2", at="00:00:13", **PREPARED), event(**FAILED)) == ["Prepared"]


def test_a_pod_waits_while_a_rule_of_another_spec_taints_the_devices():
    earlier = spec(RULE, "dra-2", start="00:00:00", end="00:00:05")
    later = spec(RULE, "dra-2", start="00:00:18", end="00:00:20")
    waiting = event(**TAINTED)
    assert judged([spec(), earlier], waiting) == []
    assert judged([spec(), later], waiting) == ["DevicesTainted"]
    assert judged([spec()], waiting) == ["DevicesTainted"]
