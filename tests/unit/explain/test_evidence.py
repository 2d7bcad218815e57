"""What the kubelet and runtime report: the step that failed last, and messages with a remedy."""

import time
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
            [event("01.5", "PrepareFailed", "c"), event("09", KUBELET)],
            "PrepareFailed",
            id="the-words-of-the-driver-are-better",
        ),
        pytest.param(
            [event("01.5", "PrepareFailed", "c"), event("01", KUBELET), event("30", SANDBOX)],
            SANDBOX,
            id="an-old-failure-of-prepare-does-not-win-over-a-later-one-of-the-sandbox",
        ),
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


RUNC = "OCI runtime create failed: runc create failed: "


@pytest.mark.parametrize(
    ("message", "cause", "remedy"),
    [
        (
            "CDI device injection failed: unresolvable CDI devices a.io/claim=1-0, a.io/claim=1-1",
            "does not find a CDI file for a.io/claim=1-0",
            "cdi_spec_dirs",
        ),
        (
            "endpoint not found in cache for a registered resource: squat.ai/pair",
            "still expects resource squat.ai/pair",
            "delete the pods on node n1 that got squat.ai/pair",
        ),
        (
            "internal error: unable to get claim info for ResourceClaim mine in namespace lab",
            "has no record of claim mine",
            "create it again",
        ),
        ("unable to get information for ResourceClaim mine", "no record of claim mine", "again"),
        (
            "old ResourceClaim with same name mine and different UID 7 still exists",
            "earlier claim mine",
            "wait until",
        ),
        ("DRA driver a.io is not registered", "driver a.io is not registered", "pod runs on"),
        (
            'failed to inject devices: failed to stat CDI host device "/dev/ttyUSB0": no such file '
            "or directory",
            "device node /dev/ttyUSB0 does not exist on node n1",
            "connect the device again",
        ),
        (
            'error gathering device information while adding custom device "/dev/kvm": no such '
            "file or directory",
            "device node /dev/kvm does not exist",
            "connect",
        ),
        (
            f"{RUNC}unable to start container process: open /dev/fuse: permission denied",
            "may not open device node /dev/fuse on node n1",
            "hostUsers",
        ),
        (
            f'{RUNC}creating device nodes: mknod "/dev/x": operation not permitted',
            "may not open device node /dev/x",
            "SELinux",
        ),
        (
            'CDI device ("/dev/a", "/dev/b"), host type mismatch (c, b)',
            "device node /dev/a on node n1 is not the one",
            "create it again",
        ),
        ("runtime does not support user namespaces", "does not support user namespaces", "remove"),
        (
            "requested number of devices unavailable for a.io/b. Requested: 1, Available: 0",
            "fewer healthy devices of a.io/b than",
            "device plugin",
        ),
        ("no such file or directory: /etc/app.conf", "", ""),
        ("Back-off pulling image", "", ""),
    ],
)
def test_known_messages_have_a_cause_and_a_remedy(message, cause, remedy):
    found = known_cause(message, "n1")
    assert cause in found[0]
    assert remedy in found[1]
    assert bool(found[0]) is bool(cause)


@pytest.mark.parametrize("word", ["/dev", "/dev/a ", "/dev/a: ", 'CDI device ("/dev/a", ', "a."])
def test_a_message_costs_little_whatever_command_of_a_tenant_it_quotes(word):
    prefix = "requested number of devices unavailable for "
    before = time.process_time()
    known_cause(f"{prefix}{word * (4_000 // len(word))}", "n1")
    assert time.process_time() - before < 1


def status(name, **state):
    return {"name": name, "state": state}


ENDED = {"reason": "Error", "exitCode": 3, "message": "written by the application"}
UNSTARTED = {"reason": "StartError", "exitCode": 128, "message": "open /dev/x"}
LOOP = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m"}}


@pytest.mark.parametrize(
    ("statuses", "found"),
    [
        pytest.param([status("a", running={})], [], id="it-runs"),
        pytest.param([status("a", waiting={"reason": "ContainerCreating"})], [], id="it-waits"),
        pytest.param([status("a", terminated={"exitCode": 0})], [], id="it-has-ended"),
        pytest.param(
            [status("a", waiting={"reason": "ErrImagePull", "message": "no\nimage"})],
            [("a", "ErrImagePull", "no image")],
            id="it-is-not-created",
        ),
        pytest.param(
            [status("a", terminated=ENDED)], [("a", "Error", "exit code 3")], id="it-has-failed"
        ),
        pytest.param(
            [{"name": "a", "state": LOOP, "lastState": {"terminated": UNSTARTED}}],
            [("a", "CrashLoopBackOff, StartError", "open /dev/x")],
            id="the-runtime-cannot-start-it",
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
