"""NodeDeviceReports and HostDevicePolicies: their facts, and the explanations that quote them."""

from dataclasses import replace

import pytest

from drakit_explain.broken import broken_claim
from drakit_explain.devices import Amount, TaintFacts
from drakit_explain.model import (
    Constraint,
    DeviceID,
    DeviceWords,
    DroppedField,
    PolicyFacts,
    PolicyReport,
    ReportFacts,
    Result,
)
from drakit_explain.pending import Verdict
from drakit_explain.reports import (
    MAX_CONFLICTS,
    MAX_POLICIES,
    MAX_UNHEALTHY,
    project_policy,
    project_report,
)
from tests.fakes.world import (
    ANY,
    POD,
    claim,
    device,
    explain,
    holding,
    node,
    request,
    slice_on,
    world_of,
)
from tests.unit.explain.test_advice import N1, PLACED, USED, answer, broken

UNHEALTHY = TaintFacts(key="drakit.dev/unhealthy", effect="NoSchedule")
EVICTING = TaintFacts(key="drakit.dev/unhealthy", effect="NoExecute")


# ---- from raw objects


def test_a_report_with_what_an_answer_needs():
    found = project_report(
        {
            "metadata": {"name": "n1.d", "uid": "u"},
            "spec": {"nodeName": "n1", "driver": "d"},
            "status": {
                "conditions": [
                    {"type": "EndpointsRunning", "status": "False", "reason": "Stopped"},
                    {
                        "type": "Registered",
                        "status": "False",
                        "reason": "Rejected",
                        "message": "no",
                    },
                ],
                "devices": {"rejected": 3},
                "rejectedDevices": [
                    {"device": "g0", "reason": "Other", "message": "it needs counters"}
                ],
            },
        }
    )
    assert found.registration == "Rejected: no"
    assert (found.rejected, found.rejected_example) == (3, "g0: it needs counters")


@pytest.mark.parametrize(
    ("condition", "registration"),
    [
        (["True", "Registered"], ""),
        (["Unknown", "Pending"], "Pending"),
        (None, ""),
    ],
)
def test_the_registration_in_a_report(condition, registration):
    status = {}
    if condition is not None:
        facts = dict(zip(("status", "reason"), condition, strict=True))
        status = {"conditions": [{"type": "Registered", **facts}]}
    found = project_report({"metadata": {"name": "n1.d", "uid": "u"}, "status": status})
    assert found.registration == registration


def test_hostile_content_of_a_report_is_bounded_and_printable():
    many = [{"pool": "n1", "device": f"g{n}", "message": "x\x1b[1m\n" * 999} for n in range(99)]
    dropped = [{"feature": "Other", "message": "\u202e" + "y" * 999}] * 99
    found = project_report(
        {
            "metadata": {"name": "n1.d", "uid": "u"},
            "spec": {"nodeName": "n1", "driver": "d"},
            "status": {
                "unhealthyDevices": many,
                "droppedFields": dropped,
                "policies": [{"name": "p", "conflicts": [{"device": "d"}] * 10}] * 100,
            },
        }
    )
    assert len(found.unhealthy) == MAX_UNHEALTHY
    assert len(found.dropped) == 10
    assert [len(each.conflicts) for each in found.policies] == [MAX_CONFLICTS] * MAX_POLICIES
    for text in (found.unhealthy[0].message, found.dropped[0].message):
        assert len(text) <= 256
        assert text.isprintable()


@pytest.mark.parametrize(
    ("sharing", "shares"),
    [
        ({"mode": "Users", "users": 4}, 4),
        ({"mode": "Capacity", "users": 4}, 0),
        ({"mode": "Exclusive"}, 0),
        (None, 0),
    ],
)
def test_only_a_policy_with_entries_for_users_offers_shares_by_name(sharing, shares):
    body = {"metadata": {"name": "cams"}, "spec": {"sharing": sharing}}
    assert project_policy(body).shares == shares


# ---- unhealthy devices and drivers that are not registered


def report(driver="d", node="n1", **facts):
    return ReportFacts(name=f"{node}.{driver}", uid="r", node=node, driver=driver, **facts)


WRONG = 'device.attributes["d"].model == "y"'
OF_D = 'device.driver == "d"'
OTHER_MODEL = slice_on("n1", device("g0", attributes={"model": "x"}))


@pytest.mark.parametrize(
    ("facts", "selectors", "advice"),
    [
        pytest.param(
            [],
            [WRONG],
            "no ResourceSlice has devices, so check that the driver is running",
            id="nothing-is-published",
        ),
        pytest.param(
            [OTHER_MODEL],
            [WRONG],
            'no device has the value "y" of d/model: they have "x"',
            id="nothing-is-selected",
        ),
        pytest.param(
            [],
            [OF_D],
            "no slice of driver d has devices, so check that the driver is running",
            id="the-driver-publishes-nothing",
        ),
        pytest.param(
            [report("d", rejected=2, rejected_example="g0: it needs counters")],
            [OF_D],
            "driver d publishes no device, and rejects 2 on node n1, such as g0: it needs counters",
            id="the-driver-leaves-its-devices-out",
        ),
        pytest.param(
            [report("e", rejected=2, rejected_example="g0: it needs counters")],
            [OF_D],
            "no slice of driver d has devices, so check that the driver is running",
            id="another-driver-leaves-devices-out",
        ),
    ],
)
def test_the_cause_is_named_and_not_what_it_might_be(facts, selectors, advice):
    code, text, _ = answer(N1, *facts, claim(request(selectors=tuple(selectors))))
    assert code == "NoDevicePublished"
    assert text.endswith(f"; {advice}")


@pytest.mark.parametrize(
    ("registration", "why"),
    [
        pytest.param("Rejected: the socket is gone", " (Rejected: the socket is gone)"),
        pytest.param("Pending", " (Pending)"),
        pytest.param("", None),
    ],
    ids=["rejected", "pending", "registered"],
)
def test_a_driver_that_the_kubelet_has_not_registered_is_named(registration, why):
    facts = [slice_on("n1", device("g0")), USED, report(registration=registration)]
    (reason,) = broken(*facts)
    if why is None:
        assert str(reason.code) == "ClaimsNotPrepared"
        return
    assert str(reason.code) == "DriverUnavailable"
    assert reason.sentence == (
        f"pod lab/train cannot start on node n1: driver d of its claim mine is not registered with "
        f"the kubelet{why}; check the log of the node plugin on node n1"
    )


def test_the_drivers_words_about_an_unhealthy_device_arrive():
    unhealthy = TaintFacts(key="drakit.dev/unhealthy", effect="NoSchedule")
    pod = replace(PLACED, phase="Running", health=(("claim:c/r", "it is too hot"),))
    facts = [slice_on("n1", device("g0", taints=(unhealthy,))), USED]
    (reason,) = broken(*facts, pod=pod)
    assert 'request "r", is unhealthy (it is too hot); check the device' in reason.sentence
    (reason,) = broken(*facts, pod=replace(pod, health=(("claim:other", "no"),)))
    assert "is unhealthy; check the device" in reason.sentence


SAID = report(
    unhealthy=(DeviceWords("n1", "g0", "too hot"), DeviceWords("n1", "g1", "no link")),
)
ELSEWHERE = report(node="n2", unhealthy=(DeviceWords("n1", "g0", "of another node"),))


@pytest.mark.parametrize(
    ("facts", "words", "waits"),
    [
        pytest.param([SAID, ELSEWHERE], " (too hot)", False, id="the-report-has-its-words"),
        pytest.param([ELSEWHERE], "", False, id="there-is-no-report-to-wait-for"),
        pytest.param([report()], "", True, id="the-report-does-not-have-the-device-yet"),
        pytest.param(
            [report(unhealthy=(DeviceWords("n1", "g0", ""),))], "", False, id="a-silent-driver"
        ),
        pytest.param(
            [report(unhealthy=tuple(DeviceWords("n1", f"a{n}", "x") for n in range(20)))],
            "",
            False,
            id="a-full-report",
        ),
    ],
)
def test_a_claims_unhealthy_device_has_the_words_of_the_report_of_its_node(facts, words, waits):
    devices = [device("g0", taints=(UNHEALTHY, EVICTING)), device("g1", taints=(UNHEALTHY,))]
    unhealthy, evicted = broken_claim(USED, world_of(N1, slice_on("n1", *devices), *facts))
    assert f"is unhealthy{words}; check the device" in unhealthy.sentence
    assert f"with effect NoExecute{words}, so Kubernetes evicts" in evicted.sentence
    assert bool(unhealthy.transient) is waits
    assert unhealthy.patience_seconds == 15


def test_a_pod_that_waits_for_unhealthy_devices_gets_the_words_about_the_first_three():
    devices = [device(f"g{n}", taints=(UNHEALTHY,)) for n in range(5)]
    said = tuple(DeviceWords("n1", f"g{n}", f"words {n % 2}") for n in range(5))
    other = replace(slice_on("n2", device("h", taints=(UNHEALTHY,))), driver="e")
    code, text, _ = answer(
        *(N1, node("n2"), slice_on("n1", *devices), other, report(unhealthy=said)),
        claim(request()),
    )
    assert code == "DevicesTainted"
    assert (
        "is removed after 30 s (by default) of good health: check the device "
        "(g0, g2: words 0; g1: words 1)" in text
    )


# ---- pods that fit where their driver is not registered

REJECTED = report(registration="Rejected: no socket")


@pytest.mark.parametrize(
    ("facts", "on", "drivers"),
    [
        pytest.param([], "n1", [], id="no-report-nothing-is-certain"),
        pytest.param([report()], "n1", [], id="registered"),
        pytest.param([REJECTED], "n2", [], id="rejected-on-one-node-of-two"),
        pytest.param(
            [REJECTED, report(node="n2", registration="Pending")], "n1", ["d"], id="on-both"
        ),
        pytest.param([report("e", registration="Pending")], "n1", [], id="another-driver"),
    ],
)
def test_a_pod_fits_rather_where_its_driver_is_registered(facts, on, drivers):
    slices = [slice_on("n1", device("g0")), slice_on("n2", device("g0"))]
    found = explain(POD, world_of(ANY, N1, node("n2"), *slices, claim(request()), *facts))
    assert (found.verdict, found.fits_on) == (Verdict.FITS, on)
    assert [str(each.code) for each in found.reasons] == ["DriverUnavailable"] * len(drivers)
    for each in found.reasons:
        assert each.transient
        assert each.sentence == (
            "pod lab/train fits on node n1, but cannot start there: driver d is not registered "
            "with the kubelet (Rejected: no socket); check the log of the node plugin on that node"
        )


def test_a_pod_whose_device_of_a_registered_driver_is_taken_does_not_fit_where_it_is_not():
    slices = [slice_on("n1", device("g0")), slice_on("n2", device("g0"))]
    taken = holding("other", "g0", pool="n2")
    found = explain(POD, world_of(ANY, N1, node("n2"), *slices, claim(request()), taken, REJECTED))
    assert found.fits_on == "n1"
    assert len(found.reasons) == 1


def test_a_pod_whose_claims_are_allocated_where_their_driver_is_not_registered_cannot_start():
    used = replace(USED, nodes="n1")
    other = report("e", registration="Rejected: not in use")
    for said, number in (([REJECTED, other], 1), ([other], 0)):
        found = explain(POD, world_of(ANY, N1, slice_on("n1", device("g0")), used, *said))
        assert found.verdict is Verdict.FITS
        assert len(found.reasons) == number
        assert all("driver d is not registered" in each.sentence for each in found.reasons)


# ---- fields that the API server drops

LISTS = DroppedField("ListAttributes", "the API server does not support list attributes")
SHARES = DroppedField("MultipleAllocations", "each device can be allocated to only one claim")
OTHER = DroppedField("Other", "the API server does not support some device fields")
DROPPED = report(dropped=(LISTS, SHARES, OTHER))
TAKEN = holding("other", "g0", "g1")
TWO = slice_on("n1", device("g0", attributes={"model": "x"}), device("g1"))


@pytest.mark.parametrize(
    ("asked", "facts", "advice"),
    [
        pytest.param(
            {"selectors": (OF_D, '"lanes" in device.attributes["d"]')},
            [],
            "check whether the selectors need fields that the API server drops (driver d on node "
            f"n1: {LISTS.message})",
            id="nothing-matches",
        ),
        pytest.param(
            {"selectors": ('device.attributes["d"].lanes == 4',)},
            [],
            f"check whether the API server drops lanes (driver d on node n1: {LISTS.message}); if "
            "only some devices have it, test for it first",
            id="a-key-is-missing",
        ),
        pytest.param({}, [TAKEN], f" (driver d on node n1: {SHARES.message})", id="all-are-taken"),
        pytest.param(
            {"capacity": (Amount("users", "1"),)},
            [],
            f" (the devices have none) (driver d on node n1: {OTHER.message})",
            id="a-capacity-is-missing",
        ),
    ],
)
@pytest.mark.parametrize("dropped", [True, False])
def test_what_the_api_server_drops_is_said_where_it_matters(asked, facts, advice, dropped):
    reports = [report("e", dropped=(LISTS, SHARES, OTHER)), DROPPED if dropped else report()]
    _, text, _ = answer(N1, TWO, *facts, *reports, claim(request(**asked)))
    assert (advice in text) is dropped
    assert ("API server" in text or "only one claim" in text) is dropped


@pytest.mark.parametrize("dropped", [True, False])
def test_an_attribute_of_a_constraint_that_the_api_server_drops_is_said(dropped):
    constraint = Constraint(attribute="d/lanes", requests=("r",))
    facts = [DROPPED if dropped else report(), report("e", dropped=(LISTS,))]
    both = claim(request(count=2), constraints=[constraint])
    _, text, _ = answer(N1, TWO, *facts, both)
    fix = "correct the constraint"
    if dropped:
        fix = (
            f"check whether the API server drops the attribute (driver d on node n1: "
            f"{LISTS.message})"
        )
    assert text.endswith(f"has attribute d/lanes, which matchAttribute requires; {fix}")


def test_other_dropped_fields_are_not_named_where_devices_are_taken():
    _, text, _ = answer(N1, TWO, TAKEN, report(dropped=(LISTS,)), claim(request()))
    assert LISTS.message not in text


# ---- shares that a policy no longer offers

HOSTDEV = "hostdev.drakit.dev"
GONE = TaintFacts(key="drakit.dev/gone", effect="NoSchedule")
POLICY = PolicyFacts(name="cams", uid="p", generation=3, shares=2)
OUTCOME = PolicyReport(
    name="cams", uid="p", observed_generation=3, generation=3, matched=2, published=2
)
APPLIED = report(HOSTDEV, policies=(OUTCOME,))


@pytest.mark.parametrize(
    ("name", "facts", "certain"),
    [
        pytest.param("cams-046d-1-5", [POLICY, APPLIED], True, id="fewer-shares"),
        pytest.param("cams-046d-1-1", [POLICY, APPLIED], False, id="a-share-that-is-offered"),
        pytest.param("cams-12345678", [POLICY, APPLIED], False, id="a-hash-of-digits"),
        pytest.param("cams-046d", [POLICY, APPLIED], False, id="a-name-without-a-number"),
        pytest.param("cams-046d-1-5", [APPLIED], False, id="the-policy-is-unknown"),
        pytest.param(
            "cams-046d-1-5",
            [replace(POLICY, shares=0), APPLIED],
            False,
            id="no-entries-so-the-number-may-be-of-the-identity",
        ),
        pytest.param("cams-046d-1-5", [POLICY], False, id="no-report"),
        pytest.param(
            "cams-046d-1-5",
            [replace(POLICY, generation=4), APPLIED],
            False,
            id="the-node-has-an-older-policy",
        ),
        pytest.param(
            "cams-046d-1-5",
            [POLICY, report(HOSTDEV, policies=(replace(OUTCOME, generation=0),))],
            False,
            id="the-node-has-not-applied-it-yet",
        ),
        pytest.param(
            "cams-046d-1-5",
            [replace(POLICY, uid="p2"), APPLIED],
            False,
            id="the-node-has-a-policy-that-had-the-name-before",
        ),
        pytest.param(
            "cams-046d-1-5",
            [POLICY, report(HOSTDEV, policies=(replace(OUTCOME, problem="no"),))],
            False,
            id="the-node-cannot-apply-it",
        ),
        pytest.param(
            "cams-046d-1-5",
            [replace(POLICY, name="mics"), APPLIED],
            False,
            id="another-policy",
        ),
    ],
)
def test_a_share_that_is_not_offered_does_not_come_back_with_a_cable(name, facts, certain):
    share = DeviceID(HOSTDEV, "n1", name)
    used = replace(USED, devices=(share,), results=(Result(request="r", device=share),))
    attributes = {"policy": "cams"}
    devices = [
        device("cams-046d-1-0", attributes=attributes),
        device(name, attributes=attributes, taints=(GONE,)),
    ]
    published = replace(slice_on("n1", *devices), driver=HOSTDEV)
    (reason,) = broken_claim(used, world_of(N1, published, *facts))
    remedy = "check that a HostDevicePolicy still offers it, and that it is connected"
    if certain:
        remedy = (
            "HostDevicePolicy cams offers only 2 shares of each device (sharing.users), and this "
            "is share 6: raise sharing.users"
        )
    assert f"no longer lists it; {remedy}, or delete the pod and the claim" in reason.sentence
