"""Reports of the kubelet and runtime: the step that failed last, and messages with a remedy."""

from dataclasses import replace

import pytest

from drakit_explain.codes import Code
from drakit_explain.evidence import Event, Events, failed_step, known_cause
from drakit_explain.model import ClaimFacts, PodFacts
from drakit_explain.projection import project_pod

POD = PodFacts(namespace="lab", name="train", uid="p", node="n1")
CLAIMS = [ClaimFacts(namespace="lab", name=name, uid=name) for name in ("c", "d")]


def event(time, reason, of="p"):
    return Event(time=f"2026-01-01T00:00:{time}", reason=reason, message="said", uid=of)


KUBELET = "FailedPrepareDynamicResources"
SANDBOX = "FailedCreatePodSandBox"


@pytest.mark.parametrize(
    ("events", "found"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([event("01", KUBELET)], KUBELET, id="the-words-of-the-kubelet"),
        pytest.param(
            [event("01", SANDBOX), event("30", KUBELET)],
            KUBELET,
            id="prepare-fails-again-after-a-restart",
        ),
        pytest.param(
            [event("02", SANDBOX), event("20.1", "PrepareFailed", "d")],
            "PrepareFailed",
            id="a-driver-fails-later",
        ),
        pytest.param(
            [event("01", "FailedMount"), event("05", KUBELET)], KUBELET, id="the-latest-step"
        ),
        pytest.param(
            [
                *(event("01.5", "PrepareFailed", each) for each in "cd"),
                event("02", KUBELET),
                *(event("02.7", "Prepared", each) for each in "cd"),
            ],
            None,
            id="all-claims-were-prepared-later",
        ),
        pytest.param(
            [event("02", KUBELET), event("02.7", "Prepared", "c")],
            KUBELET,
            id="one-of-two-claims-was-prepared",
        ),
        pytest.param(
            [event("02", SANDBOX), event("02.7", "Prepared", "c")],
            SANDBOX,
            id="a-prepared-claim-says-nothing-about-the-sandbox",
        ),
    ],
)
def test_the_latest_failure_is_the_reason(events, found):
    finding = failed_step(POD, CLAIMS, Events(events), "n1")
    if found is None:
        assert finding is None
        return
    assert finding is not None
    assert finding.what.endswith(f"; Event {found}: said")
    prepare = found in (KUBELET, "PrepareFailed")
    assert finding.code is (Code.NOT_PREPARED if prepare else Code.POD_NOT_STARTED)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("unable to get information for ResourceClaim mine", "no record of claim mine"),
        (
            'error gathering device information while adding custom device "/dev/kvm": no such '
            "file or directory",
            "device node /dev/kvm does not exist",
        ),
        ("no such file or directory: /etc/app.conf", ""),
        ("Back-off pulling image", ""),
    ],
)
def test_other_words_of_a_message_with_a_known_cause(message, cause):
    found, _ = known_cause(message, "n1")
    assert cause in found
    assert bool(found) is bool(cause)


def status(name, **state):
    return {"name": name, "state": state}


ENDED = {"reason": "Error", "exitCode": 3, "message": "written by the application"}


@pytest.mark.parametrize(
    ("statuses", "found"),
    [
        pytest.param([status("a", running={})], [], id="it-runs"),
        pytest.param([status("a", waiting={"reason": "ContainerCreating"})], [], id="it-waits"),
        pytest.param([status("a", terminated={"exitCode": 0})], [], id="it-has-ended"),
        pytest.param(
            [status("a", terminated=ENDED)], [("a", "Error", "exit code 3")], id="it-has-failed"
        ),
        pytest.param(
            [status(str(number), terminated=ENDED) for number in range(9)],
            [(str(number), "Error", "exit code 3") for number in range(3)],
            id="the-first-ones",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["initContainerStatuses", "containerStatuses"])
def test_containers_that_do_not_run(statuses, found, kind):
    pod = {"metadata": {"name": "p", "uid": "u"}, "status": {kind: statuses}}
    assert [tuple(each) for each in project_pod(pod).containers] == found


@pytest.mark.parametrize(
    ("phase", "sandbox", "starting"),
    [
        ("Pending", None, True),
        ("Pending", True, False),
        ("Running", None, False),
        ("Running", False, True),
    ],
)
def test_a_pod_starts_again_after_a_reboot_of_its_node(phase, sandbox, starting):
    assert replace(POD, phase=phase, sandbox=sandbox).is_starting is starting
