"""``kubectl drakit explain``: verdicts, counts, and what missing permissions leave of them."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

import pytest

from drakit_formats import crds

API = "/apis/resource.k8s.io/v1"


@pytest.fixture
def stuck(site):
    """One device, which another claim has."""
    site.node("n1")
    site.device_class("gpu")
    site.slice("s1", "gpu-0")
    site.claim("mine")
    site.claim("other", device="gpu-0", pod="holder", namespace="elsewhere")
    site.pod("waiting", "mine", message="0/1 nodes are available")
    return site


async def test_a_blocked_pod_is_explained_with_counts_and_holders(stuck, run):
    code, out, error = await run("explain", "pod/waiting")
    assert error == ""
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("Pod lab/waiting waits: the only device of DeviceClass")
    assert "claim elsewhere/other (pod holder)" in lines[0]
    assert lines[1] == (
        "The pod would fit on node n1 if claim elsewhere/other (pod holder) released its devices."
    )
    head, row = lines[4:6]
    assert head.split()[:6] == ["REQUEST", "CLASS", "WANTS", "PUBLISHED", "MATCHING", "FREE"]
    assert row.split() == ["gpu", "gpu", "1", "1", "1", "0", "1", "0", "0", "0"]
    assert "  gpu: allocated to claim elsewhere/other (pod holder)" in lines
    assert lines[-2:] == ["The scheduler reports:", "  0/1 nodes are available"]
    assert "\x1b" not in out
    assert stuck.writes() == []


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
async def test_a_holder_that_has_ended_is_named(stuck, run, phase):
    path = "/api/v1/namespaces/elsewhere/pods/holder"
    stuck.store(path, {"spec": {}, "status": {"phase": phase}})
    _, body = await run.json("explain", "pod/waiting")
    said = "claim elsewhere/other is still reserved for pod holder, which has ended: "
    assert (said in body["message"]) is (phase == "Succeeded")


@pytest.mark.parametrize("form", ["json", "yaml"])
async def test_programs_get_the_same_facts(stuck, run, form):
    if form == "json":
        code, body = await run.json("explain", "pod/waiting")
    else:
        import yaml

        code, out, _ = await run("explain", "pod/waiting", "-o", "yaml")
        body = yaml.safe_load(out)
    assert code == 1
    assert body["verdict"] == "blocked"
    assert [each["code"] for each in body["reasons"]] == ["DevicesAllocated"]
    (request,) = body["claims"][0]["requests"]
    assert (request["published"], request["free"], request["allocated"]) == (1, 0, 1)
    assert request["holders"] == ["claim elsewhere/other (pod holder)"]
    assert body["remedy"] == (
        "the pod would fit on node n1 if claim elsewhere/other (pod holder) released its devices"
    )
    assert body["message"] == f"{body['reasons'][0]['sentence']}; {body['remedy']}"


async def test_of_many_holders_the_first_are_named_and_all_are_counted(site, run):
    site.device_class("gpu")
    for node in range(2):
        site.node(f"n{node}")
        names = [f"gpu-{each}" for each in range(60)]
        site.slice(f"s{node}", *names, node=f"n{node}")
        for number, name in enumerate(names, start=node * 60):
            site.claim(f"has-{number:03}", device=name, pod="holder", pool=f"n{node}")
    site.claim("mine")
    site.pod("waiting", "mine")
    code, body = await run.json("explain", "pod/waiting")
    assert code == 1
    (request,) = body["claims"][0]["requests"]
    assert request["holders"] == [
        f"claim lab/has-{number:03} (pod holder)" for number in range(100)
    ]
    assert request["holderCount"] == 120
    _, out, _ = await run("explain", "pod/waiting")
    assert "and 117 more (-o wide)" in out


async def test_a_pod_with_free_devices_waits_for_something_else(stuck, run):
    stuck.slice("s2", "gpu-0", node="n2")
    stuck.node("n2")
    code, body = await run.json("explain", "pod/waiting")
    assert (code, body["verdict"], body["fitsOn"]) == (0, "fits", "n2")


@pytest.mark.parametrize(
    ("changes", "constraints", "bug"),
    [
        pytest.param(
            {"adminAccess": True},
            [],
            "kube-scheduler reserves the counters of a device again for a request with admin",
            id="which-can-keep-it-waiting",
        ),
        pytest.param(
            {"count": 3},
            [{"distinctAttribute": "resource.example.com/root"}],
            "kube-scheduler can allocate devices with the same value to a request for several",
            id="which-can-allocate-other-devices",
        ),
        pytest.param({"count": 2}, [], "", id="none"),
    ],
)
async def test_a_known_bug_of_the_release_that_a_pod_can_meet_is_named(
    site, run, changes, constraints, bug
):
    site.runs("v1.36.3", DRAConsumableCapacity=True)
    site.node("n1")
    site.device_class("gpu")
    site.claim("mine")
    site.pod("waiting", "mine", message="0/1 nodes are available: 1 cannot allocate all claims.")
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 2}
    counters = {"memory": {"value": "4"}}
    site.slice("s0", pool=pool, sharedCounters=[{"name": "all", "counters": counters}])
    uses = [{"counterSet": "all", "counters": {"memory": {"value": "1"}}}]
    roots = [{"resource.example.com/root": {"int": number % 2}} for number in range(3)]
    devices = [
        {"name": f"gpu-{number}", "consumesCounters": uses, "attributes": of}
        for number, of in enumerate(roots)
    ]
    site.slice("s1", pool=pool, devices=devices)
    exact = {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1, **changes}
    spec = {"requests": [{"name": "gpu", "exactly": exact}], "constraints": constraints}
    path = "/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims/mine"
    site.change(path, {"spec": {"devices": spec}})
    code, body = await run.json("explain", "pod/waiting")
    assert (code, body["verdict"]) == (0, "fits"), body
    assert ("; in Kubernetes 1.36.3, " in body["message"]) is bool(bug)
    assert bug in body["message"]


@pytest.fixture
def failing(site):
    """A device that fits on n2, and one on n1 at which the class's selector fails."""
    site.node("n1")
    site.node("n2")
    site.device_class("gpu", f'device.attributes["{site.driver}"].model == "x"')
    site.slice("s1", "gpu-0")
    model = {"name": "gpu-0", "attributes": {"model": {"string": "x"}}}
    site.slice("s2", node="n2", devices=[model])
    site.claim("mine")
    site.pod("waiting", "mine", message='running "DynamicResources" filter plugin: no such key')
    return site


async def test_an_error_on_one_node_is_one_of_a_claim_although_another_node_fits(failing, run):
    code, body = await run.json("explain", "claim/mine")
    assert (code, body["verdict"], body["fitsOn"]) == (1, "blocked", "n2")
    assert [each["code"] for each in body["reasons"]] == ["SelectorFailed"]


async def test_nobody_is_told_to_edit_a_class_that_the_operator_restores(failing, run):
    failing.policy("fast", "gpu")
    _, body = await run.json("explain", "pod/waiting")
    assert body["message"].endswith(
        "; the operator restores the class of HostDevicePolicy fast, so do not edit it: read the "
        "log of the node plugin that publishes the device"
    )


@pytest.mark.parametrize(
    ("kubernetes", "verdict"),
    [("v1.34.13", "undecided"), ("v1.35.10", "blocked"), ("v1.37.2", "blocked")],
)
async def test_the_rules_are_those_of_the_cluster(stuck, run, kubernetes, verdict):
    stuck.runs(kubernetes)
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 2}
    stuck.slice("s1", "gpu-0", pool=pool)
    code, body = await run.json("explain", "pod/waiting")
    assert (code, body["verdict"]) == (4 if verdict == "undecided" else 1, verdict)
    assert ("(not counted: pool n1 on node n1, 1 of 2 slices)" in body["message"]) is (
        verdict == "blocked"
    )


async def test_nodes_are_grouped_by_why_the_pod_cannot_use_them(stuck, run):
    for number in range(3, 8):
        stuck.node(f"n{number}", unschedulable=True)
    _, out, _ = await run("explain", "pod/waiting")
    assert "  n3, n4, n5 and 2 more: cordoned" in out.splitlines()
    _, out, _ = await run("explain", "pod/waiting", "-o", "wide")
    assert "  n3, n4, n5, n6, n7: cordoned" in out.splitlines()


async def test_a_v1beta1_server_gives_the_same_answer(site, run):
    site.serve("v1beta1")
    site.runs("v1.33.4")
    site.node("n1")
    site.device_class("gpu")
    site.slice("s1", "gpu-0")
    site.claim("mine")
    site.claim("other", device="gpu-0", pod="holder")
    site.pod("waiting", "mine")
    code, body = await run.json("explain", "pod/waiting")
    assert (code, body["verdict"]) == (1, "blocked")
    assert [each["code"] for each in body["reasons"]] == ["DevicesAllocated"]
    assert body["notEvaluated"] == []


@pytest.mark.parametrize(
    ("path", "verdict", "named"),
    [
        pytest.param(
            f"{API}/resourceslices",
            "undecided",
            "no permission to list ResourceSlices: devices are unknown",
            id="without-slices-nothing-is-guessed",
        ),
        pytest.param(
            "/api/v1/nodes",
            "blocked",
            "no permission to list nodes: node selectors, affinity, taints and resources of "
            "nodes are not checked",
            id="without-nodes-the-devices-still-decide",
        ),
        pytest.param(
            f"{API}/deviceclasses",
            "undecided",
            "no permission to list DeviceClasses: it is unknown which devices a class selects",
            id="without-classes-none-counts-as-missing",
        ),
        pytest.param(
            f"{API}/resourceclaims",
            "undecided",
            "no permission to list ResourceClaims of other namespaces: devices of such claims "
            "are counted as free",
            id="without-claims-of-others-devices-may-be-held",
        ),
    ],
)
async def test_a_kind_that_may_not_be_listed_is_named(stuck, run, path, verdict, named):
    stuck.forbid(path)
    code, body = await run.json("explain", "pod/waiting")
    assert (code, body["verdict"]) == (4 if verdict == "undecided" else 1, verdict)
    assert named in body["notEvaluated"]
    if verdict == "undecided":
        assert body["reasons"] == []


@pytest.fixture
def sharing(site):
    """A device that claims can share, and a class that selects such devices."""
    site.node("n1")
    site.device_class("gpu", "device.allowMultipleAllocations")
    site.slice("s1", devices=[{"name": "gpu-0", "allowMultipleAllocations": True}])
    site.claim("mine")
    site.pod("waiting", "mine")
    return site


@pytest.mark.parametrize("target", ["pod/waiting", "claim/mine"])
@pytest.mark.parametrize(
    ("gate", "verdict", "unknown"),
    [
        pytest.param(True, "fits", [], id="a-gate-that-is-on"),
        pytest.param(False, "fits", [], id="a-gate-that-is-off"),
        pytest.param(
            None,
            "fits",
            [
                "no permission to read feature gates of the API server (/metrics): selectors are "
                "evaluated as if DRAConsumableCapacity and DRAListTypeAttributes were enabled"
            ],
            id="gates-that-may-not-be-read",
        ),
    ],
)
async def test_selectors_are_evaluated_with_the_gates_of_the_api_server(
    sharing, run, target, gate, verdict, unknown
):
    if gate is None:
        sharing.forbid("/metrics")
    else:
        sharing.runs(DRAConsumableCapacity=gate)
    _, body = await run.json("explain", target)
    assert body["verdict"] == verdict
    for text, expected in zip(body["notEvaluated"], unknown, strict=True):
        assert expected in text


async def test_gates_are_read_if_an_attribute_is_a_list(stuck, run):
    tags = {"tags": {"strings": ["a", "b"]}}
    stuck.slice("s2", node="n2", devices=[{"name": "gpu-0", "attributes": tags}])
    await run("explain", "pod/waiting")
    assert ("GET", "/metrics") in stuck.requests


async def test_gates_that_do_not_matter_are_not_named(stuck, run):
    stuck.forbid("/metrics")
    _, body = await run.json("explain", "pod/waiting")
    assert body["notEvaluated"] == []


async def test_a_missing_node_permission_spoils_only_what_depends_on_nodes(stuck, run):
    stuck.forbid("/api/v1/nodes")
    selector = {"nodeSelectorTerms": [{"matchExpressions": []}]}
    stuck.slice("s2", "gpu-9", node="", nodeSelector=selector)
    _, body = await run.json("explain", "pod/waiting")
    assert (body["verdict"], body["reasons"]) == ("undecided", [])


async def test_a_user_without_any_permission_gets_the_refusal(stuck, run):
    stuck.forbid("/")
    code, out, error = await run("explain", "pod/waiting")
    assert (code, out) == (3, "")
    assert error.startswith("error: ")


async def test_a_server_that_does_not_answer_is_named(stuck, run):
    stuck.fail("*", "/", disconnect=True, times=100)
    code, out, error = await run("explain", "pod/waiting")
    assert (code, out) == (3, "")
    assert "closed the connection before the response was complete" in error


async def test_a_cluster_without_the_api_is_named(site, run):
    site.served = {"resource.k8s.io": ["v1alpha3"]}
    site.pod("waiting", "mine")
    code, _, error = await run("explain", "pod/waiting")
    assert code == 3
    assert "only v1alpha3 of the API group resource.k8s.io" in error


@pytest.mark.parametrize(
    ("target", "code", "text"),
    [
        pytest.param("pod/", 2, "malformed: give KIND NAME or KIND/NAME", id="no-name"),
        pytest.param(
            "secret/a",
            2,
            "'secret' is not a kind that can be explained: use pod, ",
            id="another-kind",
        ),
        pytest.param("absent", 5, 'pod "absent" does not exist', id="no-such-pod"),
        pytest.param(
            "claim/absent", 5, 'ResourceClaim "absent" does not exist', id="no-such-claim"
        ),
    ],
)
async def test_wrong_targets(stuck, run, target, code, text):
    found, out, error = await run("explain", target)
    assert (found, out) == (code, "")
    assert text in error


async def test_a_claim_is_explained_as_if_a_pod_used_it_alone(stuck, run):
    code, out, _ = await run("explain", "claim/mine")
    assert code == 1
    assert out.startswith("Claim lab/mine cannot be allocated: the only device of DeviceClass")


async def test_a_claim_with_free_devices_waits_for_its_pod(stuck, run):
    stuck.remove(f"{API}/namespaces/elsewhere/resourceclaims/other")
    code, body = await run.json("explain", "claim/mine")
    assert (code, body["verdict"]) == (0, "fits")
    assert body["message"].endswith("it is allocated when a pod that uses it is scheduled")


async def test_a_claim_without_counts_has_no_table(stuck, run):
    stuck.pod("other", "mine", nodeName="n1")
    _, out, _ = await run("explain", "pod/other")
    assert out.splitlines()[2:] == ['Claim "mine":', "  not allocated"]


async def test_an_allocated_claim_has_a_state(stuck, run):
    stuck.remove(f"{API}/namespaces/elsewhere/resourceclaims/other")
    stuck.claim("held", device="gpu-0", pod="user")
    code, out, _ = await run("explain", "resourceclaim/held")
    assert code == 0
    assert out.splitlines() == [
        "Claim lab/held is allocated: gpu.example.com/n1/gpu-0.",
        "It is reserved for pod user.",
        "1 of these pods do not run: Kubernetes removes their entries of status.reservedFor, so if "
        "they stay, check that the kube-controller-manager is running.",
    ]
    stuck.pod("user")
    uid = stuck.object("/api/v1/namespaces/lab/pods/user")["metadata"]["uid"]
    entry = {"resource": "pods", "name": "user", "uid": uid}
    path = f"{API}/namespaces/lab/resourceclaims/held"
    stuck.change(path, {"status": {"reservedFor": [entry]}})
    _, out, _ = await run("explain", "resourceclaim/held")
    assert "do not run" not in out


async def test_a_pod_that_kueue_holds_is_waited_for_and_says_why(stuck, run):
    stuck.served["kueue.x-k8s.io"] = ["v1beta1"]
    stuck.pod("other", "mine", schedulingGates=[{"name": "kueue.x-k8s.io/admission"}])
    uid = stuck.object("/api/v1/namespaces/lab/pods/other")["metadata"]["uid"]
    waits = {"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota"}
    stuck.store(
        "/apis/kueue.x-k8s.io/v1beta1/namespaces/lab/workloads/pod-other",
        {"metadata": {"ownerReferences": [{"uid": uid}]}, "status": {"conditions": [waits]}},
    )
    code, body = await run.json("explain", "pod/other")
    assert (code, body["verdict"]) == (0, "not pending")
    assert body["message"].endswith("; Kueue: insufficient unused quota")
    assert (await run("explain", "pod/other", "--wait", "--timeout", "1s"))[0] == 1


@pytest.fixture
def placed(stuck):
    """A pod on a node with its device, for a long time."""
    stuck.remove(f"{API}/namespaces/elsewhere/resourceclaims/other")
    stuck.claim("mine", device="gpu-0", pod="placed")
    stuck.pod("placed", "mine", nodeName="n1")
    uid = stuck.object("/api/v1/namespaces/lab/pods/placed")["metadata"]["uid"]
    entry = {"resource": "pods", "name": "placed", "uid": uid}
    path = f"{API}/namespaces/lab/resourceclaims/mine"
    stuck.change(path, {"status": {"reservedFor": [entry]}})
    stuck.change("/api/v1/namespaces/lab/pods/placed", {"status": {"phase": "Running"}})
    return stuck


async def test_a_pod_with_its_devices_has_no_problem(placed, run):
    code, body = await run.json("explain", "pod/placed")
    assert (code, body["verdict"], body["reasons"]) == (0, "not pending", [])
    assert body["message"].startswith("pod lab/placed is scheduled to node n1 (phase Running)")
    code, out, _ = await run("explain", "claim/mine")
    assert (code, out.splitlines()[0]) == (
        0,
        "Claim lab/mine is allocated: gpu.example.com/n1/gpu-0.",
    )


async def test_a_pod_that_is_never_prepared_is_broken_after_a_while(placed, run):
    placed.change("/api/v1/namespaces/lab/pods/placed", {"status": {"phase": "Pending"}})
    code, body = await run.json("explain", "pod/placed")
    assert [each["code"] for each in body["reasons"]] == ["ClaimsNotPrepared"]
    now = datetime.now(UTC).isoformat()
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now}
    placed.change("/api/v1/namespaces/lab/pods/placed", {"status": {"conditions": [condition]}})
    code, body = await run.json("explain", "pod/placed")
    assert (code, body["reasons"]) == (0, [])


# ---- what is not a device


def room(site, node="n1", **allocatable):
    site.change(f"/api/v1/nodes/{node}", {"status": {"allocatable": {"pods": "9"} | allocatable}})


def running(site, name, node="n1", *, phase="Running", cpu="3", **spec):
    """A pod that takes CPU of a node."""
    container = {"name": "main", "resources": {"requests": {"cpu": cpu}}}
    site.pod(name, phase=phase, nodeName=node, containers=[container], **spec)


ONE_CPU = [{"name": "main", "resources": {"requests": {"cpu": "2"}}}]


@pytest.fixture
def free(site):
    """A free device, and a pod that asks for it and for 2 CPUs."""
    site.node("n1")
    site.node("n2")
    room(site, cpu="4")
    site.device_class("gpu")
    site.slice("s1", "gpu-0")
    site.claim("mine")
    site.pod("waiting", "mine", containers=ONE_CPU)
    return site


@pytest.mark.parametrize(
    ("other", "policy", "verdict"),
    [
        pytest.param(None, None, "fits", id="an-empty-node"),
        pytest.param({}, None, "blocked", id="a-pod-takes-the-cpus"),
        pytest.param({"phase": "Succeeded"}, None, "fits", id="a-pod-that-has-ended"),
        pytest.param({"node": "n2"}, None, "fits", id="on-another-node"),
        pytest.param({"priority": -1}, None, "fits", id="a-pod-that-can-be-preempted"),
        pytest.param({"priority": -1}, "Never", "blocked", id="for-a-pod-that-never-preempts"),
    ],
)
async def test_the_pods_of_a_node_take_its_resources(free, run, other, policy, verdict):
    if other is not None:
        running(free, "other", **other)
    free.pod("waiting", "mine", containers=ONE_CPU, preemptionPolicy=policy)
    _, body = await run.json("explain", "pod/waiting")
    assert body["verdict"] == verdict
    if verdict == "blocked":
        assert [each["code"] for each in body["reasons"]] == ["DevicesOnOtherNodes"]
        assert "too little cpu left" in body["message"]
        assert body["unusableNodes"] == {"too little cpu left": ["n1"]}


async def test_only_the_pods_of_nodes_with_matching_devices_are_read(free, run):
    await run("explain", "pod/waiting")
    read = [path for _, path in free.requests if path.startswith("/api/v1/pods")]
    assert len(read) == 1


@pytest.mark.parametrize("path", ["/api/v1/nodes", "/api/v1/pods"])
@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ("0/2 nodes are available: 2 Insufficient cpu.", "undecided"),
        ('running "DynamicResources" filter plugin: no such key', "blocked"),
    ],
)
async def test_an_error_on_a_node_of_which_too_little_is_known_needs_the_word_of_the_scheduler(
    failing, run, path, message, verdict
):
    failing.pod("waiting", "mine", containers=ONE_CPU, message=message)
    failing.forbid(path)
    code, out, _ = await run("explain", "pod/waiting", "-o", "json")
    body = json.loads(out)
    assert (code, body["verdict"], body["fitsOn"]) == (
        4 if verdict == "undecided" else 1,
        verdict,
        "n2",
    )
    assert [each["code"] for each in body["reasons"]] == (
        ["SelectorFailed"] if verdict == "blocked" else []
    )
    unknown = "the allocator fails on a node that the scheduler may exclude first"
    assert (unknown in body["notEvaluated"]) is (verdict == "undecided")


async def test_pods_that_may_not_be_listed_are_named(free, run):
    running(free, "other")
    free.forbid("/api/v1/pods")
    _, body = await run.json("explain", "pod/waiting")
    assert body["verdict"] == "fits"
    assert body["notEvaluated"] == [
        "no permission to list pods of all namespaces: the free CPU, memory and number of pods of "
        "nodes are unknown"
    ]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        pytest.param({"volumes": [{"name": "v", "emptyDir": {}}]}, "", id="a-volume-of-any-node"),
        pytest.param(
            {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]},
            "its volumes",
            id="a-volume-that-may-be-elsewhere",
        ),
        pytest.param(
            {"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]},
            "its topology spread constraints",
            id="topology-spread",
        ),
        pytest.param(
            {
                "affinity": {
                    "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}
                }
            },
            "",
            id="no-affinity-between-pods",
        ),
    ],
)
async def test_what_was_not_looked_at_is_named(free, run, spec, named):
    free.pod("waiting", "mine", **spec)
    _, body = await run.json("explain", "pod/waiting")
    assert body["verdict"] == "fits"
    end = "if it stays pending, devices are not the cause"
    assert body["message"].endswith(f"{end} (not checked: {named})" if named else end)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"conditions": []}, "but no scheduler has tried the pod: if that lasts, check that the "),
        (
            {"nominatedNodeName": "n1"},
            "; the scheduler preempts other pods on node n1 for it, and waits until they have ",
        ),
    ],
)
async def test_what_the_scheduler_does_about_a_pod_that_fits(free, run, status, said):
    free.pod("waiting", "mine")
    free.change("/api/v1/namespaces/lab/pods/waiting", {"status": status})
    _, body = await run.json("explain", "pod/waiting")
    assert said in body["message"]
    assert "not the cause" not in body["message"]


async def test_the_autoscaler_of_nodes_is_quoted(stuck, run):
    path = "/api/v1/namespaces/lab/pods/waiting"
    event(stuck, "e", of=path, reason="NotTriggerScaleUp", message="no group fits", at=1)
    _, body = await run.json("explain", "pod/waiting")
    assert (
        "the autoscaler of the nodes reports: Event NotTriggerScaleUp: no group fits"
        in (body["message"])
    )


@pytest.mark.parametrize(
    ("spec", "unknown"),
    [
        pytest.param(
            {"schedulerName": "volcano"},
            "scheduler volcano places the pod, and drakit knows only the rules of Kubernetes' own",
            id="another-scheduler",
        ),
        pytest.param(
            {"schedulingGroup": {"podGroupName": "train"}},
            "the pod is placed together with its group train, but drakit checks only one pod",
            id="a-pod-group",
        ),
        pytest.param(
            {"workloadRef": {"name": "w", "podGroup": "workers"}},
            "the pod is placed together with its group workers, but drakit checks only one pod",
            id="a-pod-group-of-a-workload",
        ),
        pytest.param(
            {"schedulingGroup": {"other": {"name": "train"}}},
            "the pod is placed together with its group other, but drakit checks only one pod",
            id="a-group-of-an-unknown-kind",
        ),
    ],
)
async def test_what_others_decide_makes_the_answer_undecided(free, run, spec, unknown):
    free.pod("waiting", "mine", **spec)
    code, body = await run.json("explain", "pod/waiting")
    assert (code, body["verdict"], body["fitsOn"]) == (4, "undecided", "n1")
    assert body["notEvaluated"] == [unknown]


# ---- allocated claims

FAILURE = "claim lab/mine, request gpu, device gpu-0: its cable is loose"


def event(site, name, *, of, reason, message, at):
    """An Event about an object, at a second of the year 2026."""
    regarding = site.object(of)["metadata"]
    body = {
        "involvedObject": {"name": regarding["name"], "uid": regarding["uid"]},
        "reason": reason,
        "message": message,
        "eventTime": f"2026-01-01T00:00:{at:02}.000000Z",
    }
    site.store(f"/api/v1/namespaces/lab/events/{name}", body)


POD = "/api/v1/namespaces/lab/pods/placed"
MINE = f"{API}/namespaces/lab/resourceclaims/mine"


async def test_a_quota_and_the_event_about_it_need_no_time(stuck, run):
    stuck.template("gpus")
    stuck.pod("alone", resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "gpus"}])
    path = "/api/v1/namespaces/lab/pods/alone"
    stuck.change(path, {"metadata": {"creationTimestamp": datetime.now(UTC).isoformat()}})
    event(stuck, "e", of=path, reason="FailedResourceClaimCreation", message="exceeded quota", at=1)
    code, body = await run.json("explain", "alone")
    assert (code, [each["code"] for each in body["reasons"]]) == (1, ["ResourceClaimNotCreated"])
    assert body["message"].endswith("; Event FailedResourceClaimCreation: exceeded quota")
    amounts = {"count/resourceclaims.resource.k8s.io": "2"}
    status = {"status": {"hard": amounts, "used": amounts}}
    stuck.store("/api/v1/namespaces/lab/resourcequotas/small", status)
    code, body = await run.json("explain", "alone")
    assert (code, [each["code"] for each in body["reasons"]]) == (1, ["QuotaExceeded"])


def unresolvable(name="main"):
    message = f"failed to create containerd container: CDI device injection failed: {CDI}"
    waiting = {"reason": "CreateContainerError", "message": message}
    return {"name": name, "state": {"waiting": waiting}}


CDI = "unresolvable CDI devices hostdev.drakit.dev/claim=1-0"


@pytest.mark.parametrize("phase", ["Pending", "Running"])
async def test_a_container_that_is_not_created_is_a_problem_and_its_pod_is_waited_for(
    placed, run, phase
):
    """A container of a pod that ran before can fail in the same way."""
    ready = {"type": "PodReadyToStartContainers", "status": "True"}
    status = {"phase": phase, "conditions": [ready], "containerStatuses": [unresolvable()]}
    placed.change(POD, {"status": status})
    code, body = await run.json("explain", "pod/placed", "--wait", "--timeout", "1s")
    assert (code, [each["code"] for each in body["reasons"]]) == (1, ["PodNotStarted"])
    assert f"{CDI}; the container runtime on node n1 does not find a CDI file" in body["message"]
    assert "cdi_spec_dirs" in body["message"]
    placed.change(POD, {"status": {"containerStatuses": [{"name": "main", "state": {}}]}})
    code, body = await run.json("explain", "pod/placed", "--wait", "--timeout", "1s")
    fine = phase == "Running"
    assert (code, body["verdict"]) == (not fine, "not pending" if fine else "starting")


async def test_a_failed_prepare_is_quoted_before_the_pod_is_settled(placed, run):
    now = datetime.now(UTC).isoformat()
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now}
    placed.change(POD, {"status": {"phase": "Pending", "conditions": [condition]}})
    event(placed, "e", of=MINE, reason="PrepareFailed", message=FAILURE, at=1)
    code, body = await run.json("explain", "pod/placed")
    assert (code, body["verdict"]) == (1, "broken")
    assert FAILURE in body["message"]


async def test_events_that_may_not_be_listed_are_named(placed, run):
    placed.change(POD, {"status": {"phase": "Pending"}})
    placed.forbid("/api/v1/namespaces/lab/events")
    _, body = await run.json("explain", "pod/placed")
    assert "ask an administrator, because you are not allowed to list them" in body["message"]
    assert "kubectl describe" not in body["message"]
    assert body["notEvaluated"] == [
        "no permission to list Events: the reports of the kubelet, drivers and controllers are "
        "unknown"
    ]


async def test_a_pod_whose_device_a_rule_taints_is_told_so(placed, run):
    placed.served = {"resource.k8s.io": ["v1", "v1beta2"]}
    taint = {"key": "repair", "value": "today", "effect": "NoSchedule"}
    placed.store(
        "/apis/resource.k8s.io/v1/devicetaintrules/r1",
        {"spec": {"deviceSelector": {}, "taint": taint}},
    )
    for target in ("pod/placed", "claim/mine"):
        code, body = await run.json("explain", target)
        assert (code, body["verdict"]) == (0, "not pending")
        assert body["message"].endswith(
            "device gpu-0 (driver gpu.example.com, pool n1) has the taint repair=today with effect "
            "NoSchedule, which DeviceTaintRule r1 sets: new pods do not get the device"
        )


async def test_the_taint_that_a_foreign_driver_sets_is_named(placed, run):
    taint = {"key": "gpu.example.com/xid", "value": "79", "effect": "NoSchedule"}
    placed.slice("s1", devices=[{"name": "gpu-0", "taints": [taint]}])
    _, body = await run.json("explain", "pod/placed")
    assert "no known problem" not in body["message"]
    assert "has the taint gpu.example.com/xid=79 with effect NoSchedule: new" in body["message"]


REPORTS = f"/apis/{crds.API_VERSION}/nodedevicereports"


@pytest.mark.parametrize("target", ["pod/placed", "claim/mine"])
async def test_the_words_of_a_driver_about_an_unhealthy_device_are_quoted(placed, run, target):
    taint = {"key": "drakit.dev/unhealthy", "effect": "NoSchedule"}
    placed.slice("s1", devices=[{"name": "gpu-0", "taints": [taint]}, {"name": "gpu-1"}])
    placed.report("n1", driver="other.example.com", **{"gpu-0": "of another driver"})
    placed.report("n1", **{"gpu-0": "the fan\x1b[2J is loose", "gpu-1": "fine"})
    code, body = await run.json("explain", target)
    assert (code, body["verdict"], body["notEvaluated"]) == (1, "broken", [])
    assert "is unhealthy (the fan?[2J is loose); check the device" in body["message"]


@pytest.mark.parametrize("target", ["pod/placed", "claim/mine"])
@pytest.mark.parametrize("status", [403, 404, 500])
async def test_reports_are_not_needed_and_named_unless_there_are_none(placed, run, target, status):
    taint = {"key": "drakit.dev/unhealthy", "effect": "NoSchedule"}
    placed.slice("s1", devices=[{"name": "gpu-0", "taints": [taint]}])
    for path in (REPORTS, REPORTS.replace("nodedevicereports", "hostdevicepolicies")):
        placed.fail("*", path, status=status, reason="No", message="no", times=100)
    code, body = await run.json("explain", target)
    assert (code, body["verdict"]) == (1, "broken")
    assert "is unhealthy; check the device" in body["message"]
    effect = ": problems that drivers report, and drivers that are not registered, are unknown"
    named = [each for each in body["notEvaluated"] if each.endswith(effect)]
    assert len(named) == (status != 404)
    assert body["notEvaluated"] == named
    if status == 403:
        assert named == [f"no permission to list NodeDeviceReports{effect}"]


@pytest.mark.parametrize("target", ["pod/waiting", "claim/mine"])
async def test_a_pod_that_cannot_start_because_no_driver_is_registered_is_told_so(
    free, run, target
):
    free.node("n2")
    room(free, "n2", cpu="4")
    free.slice("s2", "gpu-0", node="n2")
    free.report("n1", state="Pending")
    free.report("n2")
    assert (await run.json("explain", target))[0] == 0
    free.report("n2", state="Rejected")
    code, body = await run.json("explain", target)
    assert (code, body["verdict"], body["fitsOn"]) == (1, "fits", "n1")
    (reason,) = body["reasons"]
    assert reason == {
        "code": "DriverUnavailable",
        "sentence": f"{target.replace('/', ' lab/')} fits on node n1, but cannot start there: "
        f"driver {free.driver} is not registered with the kubelet (Pending); check the log of the "
        "node plugin on that node",
    }
    _, out, _ = await run("explain", target)
    assert "are available on node n1" in out.splitlines()[1]


@pytest.mark.parametrize("target", ["pod/placed", "claim/mine"])
async def test_without_slices_no_device_is_gone(placed, run, target):
    placed.forbid(f"{API}/resourceslices")
    code, body = await run.json("explain", target)
    assert (code, body["verdict"], body["reasons"]) == (4, "undecided", [])
    assert "have a problem" in body["message"]


async def test_a_claim_that_stays_names_what_holds_it(placed, run):
    meta = {
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "finalizers": ["resource.kubernetes.io/delete-protection"],
    }
    placed.change(f"{API}/namespaces/lab/resourceclaims/mine", {"metadata": meta})
    code, body = await run.json("explain", "claim/mine")
    assert (code, body["verdict"]) == (1, "deleting")
    assert [each["code"] for each in body["reasons"]] == ["ClaimInUse"]
    assert "it is reserved for pod placed (Running)" in body["message"]
    _, body = await run.json("claims")
    assert body["claims"][0]["state"] == "deleting"


async def test_hostile_text_reaches_no_terminal(stuck, run):
    stuck.pod("evil", "mine", message="\x1b[2J\x1b]0;owned\x07 waits")
    _, out, _ = await run("explain", "pod/evil")
    assert "\x1b" not in out
    assert "\\u001b[2J" in out


async def test_an_unreadable_slice_is_named_and_costs_only_certainty(stuck, run):
    stuck.resource("resourceslices", "odd", {"spec": {"devices": [{"name": 7, "taints": [3]}]}})
    code, body = await run.json("explain", "pod/waiting")
    assert (code, body["verdict"]) == (4, "undecided")
    assert "ResourceSlice odd cannot be read: it is not checked" in body["notEvaluated"]


async def test_a_taint_rule_taints_devices(site, run):
    site.served = {"resource.k8s.io": ["v1", "v1beta2"]}
    site.node("n1")
    site.device_class("gpu")
    site.slice("s1", "gpu-0")
    site.claim("mine")
    site.pod("waiting", "mine")
    site.store(
        "/apis/resource.k8s.io/v1/devicetaintrules/r1",
        {"spec": {"deviceSelector": {}, "taint": {"key": "repair", "effect": "NoSchedule"}}},
    )
    _, body = await run.json("explain", "pod/waiting")
    assert [each["code"] for each in body["reasons"]] == ["DevicesTainted"]
    assert body["claims"][0]["requests"][0]["taints"] == ["repair"]


ALLOCATOR = """#!{python} -ISu
import json, sys
for line in sys.stdin:
    verdict = dict(outcome="fatal", text={text!r})
    answer = dict(verdicts=[verdict]) if "verdict" in json.loads(line) else dict(reads=[])
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize("plugin", [False], indirect=True)
async def test_the_allocators_words_do_not_reach_the_terminal_as_they_are(
    stuck, run, tmp_path, monkeypatch
):
    program = tmp_path / "drakit-cel-1.36"
    program.write_text(ALLOCATOR.format(python=sys.executable, text="a\x1b[31m\u202eb\nc"))
    program.chmod(0o755)
    monkeypatch.setenv("DRAKIT_CEL", str(tmp_path / "drakit-cel"))
    code, out, _ = await run("explain", "pod/waiting")
    assert code == 1
    assert r"a\u001b[31m\u202eb c" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("plugin", [False], indirect=True)
@pytest.mark.parametrize("target", ["pod/waiting", "claim/mine"])
async def test_without_the_allocator_only_what_is_counted_is_said(stuck, run, target):
    code, body = await run.json("explain", target)
    assert (code, body["verdict"], body["reasons"], body["remedy"]) == (4, "undecided", [], "")
    why, counted = body["notEvaluated"]
    assert why == (
        "the allocator of Kubernetes 1.36, which decides whether the claims fit, is not installed"
    )
    assert counted.startswith("according to drakit's own counts, the only device ")


async def test_a_pod_whose_device_is_gone_is_told_which_one_is_free_on_another_node(placed, run):
    gone = {"key": "drakit.dev/gone", "effect": "NoSchedule"}
    placed.node("n2")
    placed.slice("s1", devices=[{"name": "gpu-0", "taints": [gone]}])
    placed.slice("s2", "gpu-1", node="n2")
    placed.template("gpu")
    pod = "/api/v1/namespaces/lab/pods/placed"
    claims = [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]
    made = [{"name": "gpu", "resourceClaimName": "mine"}]
    status = {"resourceClaimStatuses": made}
    placed.change(pod, {"spec": {"resourceClaims": claims}, "status": status})
    code, body = await run.json("explain", "pod/placed")
    assert (code, body["verdict"]) == (1, "broken")
    assert [each["code"] for each in body["reasons"]] == ["DeviceGone"]
    assert body["remedy"] == (
        "device gpu-1 on node n2 matches and is free: delete the pod, and a pod that replaces it "
        "gets that device"
    )
