"""``kubectl drakit explain`` of other objects than pods and claims, and of several pods."""

from __future__ import annotations

import asyncio
import json

import pytest

from drakit_cli.kubectl import explain_command
from drakit_cli.kubectl.targets import KINDS, find_kind

APPS = "/apis/apps/v1/namespaces/lab"
JOB = "/apis/batch/v1/namespaces/lab/jobs/train"


def member(site, name: str, *, owner: str = "train", phase: str = "Pending", **spec) -> None:
    """A pod of a Job, with a claim from the template."""
    claims = [{"name": "gpu", "resourceClaimTemplateName": "gpus"}]
    made = [{"name": "gpu", "resourceClaimName": f"{name}-gpu"}]
    node = spec.get("nodeName")
    site.claim(f"{name}-gpu", **({"device": "gpu-0", "pod": name, "pool": node} if node else {}))
    site.store(
        f"/api/v1/namespaces/lab/pods/{name}",
        {
            "metadata": {
                "uid": name,
                "labels": {"job-name": "train"},
                "ownerReferences": [{"kind": "Job", "uid": owner, "name": "x", "controller": True}],
            },
            "spec": {"resourceClaims": claims} | spec,
            "status": {"phase": phase, "resourceClaimStatuses": made},
        },
    )


def job(site, *, parallelism: int = 4, **spec) -> None:
    selector = {"matchLabels": {"job-name": "train"}}
    spec = {"selector": selector, "parallelism": parallelism} | spec
    site.store(JOB, {"metadata": {"uid": "train"}, "spec": spec})


def test_the_words_of_kubectl_name_kinds():
    for word, kind in (
        ("po", "Pod"),
        ("Pods", "Pod"),
        ("no", "Node"),
        ("deploy", "Deployment"),
        ("deployment.apps", "Deployment"),
        ("deployments.v1.apps", "Deployment"),
        ("sts", "StatefulSet"),
        ("ds", "DaemonSet"),
        ("rs", "ReplicaSet"),
        ("resourceclaim.resource.k8s.io", "ResourceClaim"),
        ("deviceclasses", "DeviceClass"),
        ("podgroup", "PodGroup"),
    ):
        found = find_kind(word)
        assert found is not None, word
        assert found.kind == kind
    assert find_kind("pods.apps") is None
    assert len({name for each in KINDS for name in each.names}) == sum(
        len(each.names) for each in KINDS
    )


@pytest.mark.parametrize("target", [["mine"], ["po", "mine"], ["pods/mine"]])
async def test_a_bare_name_is_a_pod(two, run, target):
    two.claim("c")
    two.pod("mine", "c")
    code, body = await run.json("explain", *target)
    assert (body["apiVersion"], body["kind"]) == ("drakit.dev/cli/v1", "ExplainReport")
    assert (code, body["object"]) == (1, {"kind": "Pod", "namespace": "lab", "name": "mine"})


# ---------------------------------------------------------------- templates and classes


@pytest.mark.parametrize("target", ["template/gpus", "class/gpu"])
async def test_templates_and_classes_are_explained_as_for_a_pod_of_their_own(two, run, target):
    code, body = await run.json("explain", target)
    assert (code, body["verdict"]) == (1, "blocked")
    assert [each["code"] for each in body["reasons"]] == ["DevicesAllocated"]
    assert "cannot be allocated: " in body["message"]
    assert "a-device" not in body["message"]
    assert body["remedy"].startswith("a pod that uses it would fit on node n1 if ")
    two.node("n2")
    code, body = await run.json("explain", target)
    assert (code, body["verdict"], body["fitsOn"]) == (0, "fits", "n2")
    assert body["message"].endswith(" are available on node n2")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("template/gpus", "ResourceClaimTemplate lab/gpus: no published device"),
        ("class/gpu", 'no published device matches DeviceClass "gpu"'),
    ],
)
async def test_what_no_device_can_satisfy_is_said(two, run, target, said):
    two.device_class("gpu", 'device.driver == "absent.example.com"')
    code, body = await run.json("explain", target)
    assert (code, body["verdict"]) == (1, "blocked")
    assert [each["code"] for each in body["reasons"]] == ["NoDevicePublished"]
    assert body["message"].startswith(said)


async def test_the_class_of_a_template_may_be_missing(two, run):
    two.template("odd", device_class="absent")
    code, body = await run.json("explain", "resourceclaimtemplate", "odd")
    assert (code, [each["code"] for each in body["reasons"]]) == (1, ["DeviceClassMissing"])
    assert body["object"] == {"kind": "ResourceClaimTemplate", "namespace": "lab", "name": "odd"}


@pytest.mark.parametrize("kind", [each.names[1] for each in KINDS])
async def test_an_object_that_does_not_exist_has_its_exit_code(two, run, kind):
    code, out, error = await run("explain", kind, "absent")
    assert (code, out) == (5, "")
    assert '"absent"' in error


# ---------------------------------------------------------------- nodes and slices


async def test_a_node_without_problems_shows_its_pools(two, run):
    code, out, _ = await run("explain", "node", "n2")
    assert code == 0
    first, _, head, row = out.splitlines()
    assert first == (
        "Node n2 publishes 1 device in 1 pool; it is cordoned, so new pods do not get them."
    )
    assert head.split()[:2] == ["DRIVER", "POOL"]
    assert row.split()[:3] == [two.driver, "n2", "n2"]
    _, body = await run.json("explain", "node/n2")
    assert (body["verdict"], [each["node"] for each in body["pools"]]) == ("not pending", ["n2"])


async def test_the_reports_of_a_node_are_read(two, run):
    two.report("n1", state="Rejected")
    two.report("n1", driver="other.example.com", **{"lamp-1": "no light"})
    two.report("n2", **{"gpu-0": "of another node"})
    code, body = await run.json("explain", "node/n1")
    assert (code, body["verdict"]) == (1, "broken")
    codes = [each["code"] for each in body["reasons"]]
    assert sorted(codes) == ["DeviceUnhealthy", "DriverUnavailable"]
    assert "is unhealthy: no light" in body["message"]
    assert "of another node" not in body["message"]


async def test_what_a_driver_does_not_publish_is_no_problem_of_its_node(two, run):
    two.report("n1")
    path = f"/apis/drakit.dev/v1beta1/nodedevicereports/n1.{two.driver}"
    rejected = [{"device": "lamp-9", "message": "its name is too long"}]
    policies = [{"name": "p1", "problem": "no such bus"}, {"name": "p2"}]
    status = {
        "devices": {"rejected": 2},
        "rejectedDevices": rejected,
        "policies": policies,
        "droppedFields": [{"feature": "DRADeviceTaints", "message": "taints are dropped"}],
    }
    two.change(path, {"status": status})
    code, out, _ = await run("explain", "node/n1")
    assert code == 0
    assert out.splitlines()[1:4] == [
        f"Driver {two.driver} does not apply policy p1: no such bus.",
        f"Driver {two.driver} does not publish 2 devices, such as lamp-9: its name is too long.",
        f"Driver {two.driver}: taints are dropped.",
    ]


@pytest.mark.parametrize("target", ["node/n1", "slice/s-n1"])
async def test_an_incomplete_pool_is_a_problem_of_its_node_and_its_slice(two, run, target):
    pool = {"name": "n1", "generation": 1, "resourceSliceCount": 2}
    two.slice("s-n1", "gpu-0", pool=pool)
    code, body = await run.json("explain", target)
    assert (code, [each["code"] for each in body["reasons"]]) == (1, ["PoolIncomplete"])
    assert (await run("explain", target.replace("n1", "n2")))[0] == 0


async def test_a_slice_of_a_node_that_is_gone_is_a_problem(two, run):
    two.slice("lost", "gpu-0", node="gone")
    code, body = await run.json("explain", "resourceslice", "lost")
    assert (code, [each["code"] for each in body["reasons"]]) == (1, ["NodeGone"])


async def test_without_the_permission_for_nodes_a_slice_is_undecided(two, run):
    two.forbid("/api/v1/nodes")
    assert (await run("explain", "slice/s-n1"))[0] == 4
    code, _, error = await run("explain", "node/n1")
    assert (code, error) == (3, "error: no permission to read node n1\n")


# ---------------------------------------------------------------- workloads


async def test_all_pods_of_a_job_have_one_answer(two, run):
    job(two)
    member(two, "train-0", phase="Running", nodeName="n2")
    member(two, "train-1")
    member(two, "train-2")
    member(two, "foreign", owner="another job")
    code, body = await run.json("explain", "job", "train")
    assert (code, body["verdict"]) == (1, "blocked")
    assert body["message"] == (
        "Job lab/train: 1 of 4 pods run; 2 wait for devices; 1 is not created"
    )
    (group,) = body["groups"]
    assert group["pods"] == ["train-1", "train-2"]
    assert [each["code"] for each in group["reasons"]] == ["DevicesAllocated"]
    assert body["pods"]["running"] == 1

    code, out, _ = await run("explain", "jobs/train")
    lines = out.splitlines()
    assert lines[0] == f"{body['message']}."
    assert lines[2] == "2 wait for devices: train-1, train-2"
    assert lines[3].startswith("Pod lab/train-1 waits: of the 2 devices of DeviceClass")
    assert "train-2 waits" not in out


async def test_pods_with_one_reason_and_two_causes_are_two_groups(two, run):
    """Their devices are gone, on two nodes."""
    job(two, parallelism=2)
    for node in ("n1", "n2"):
        two.node(node)
        member(two, f"train-{node}", phase="Running", nodeName=node)
        two.slice(f"s-{node}", "another", node=node)
    code, body = await run.json("explain", "job/train")
    assert (code, body["message"]) == (
        1,
        "Job lab/train: 2 of 2 pods run; 2 have a problem",
    )
    assert [each["pods"] for each in body["groups"]] == [["train-n1"], ["train-n2"]]


async def test_a_failed_pod_is_no_problem_once_it_has_a_successor(two, run):
    job(two, parallelism=1)
    member(two, "train-0", phase="Failed", nodeName="n2")
    code, body = await run.json("explain", "job/train")
    assert (code, body["groups"][0]["reasons"][0]["code"]) == (1, "PodFailed")
    member(two, "train-1", phase="Running", nodeName="n2")
    code, body = await run.json("explain", "job/train")
    assert (code, body["message"]) == (0, "Job lab/train: 1 of 2 pods run; 1 has failed")


QUOTA = 'pods "w-7c-x" is forbidden: exceeded quota: small, requested: pods=1'


@pytest.mark.parametrize("seen_in", ["condition", "Event"])
async def test_pods_that_are_refused_are_not_created(two, run, seen_in):
    job(two)
    if seen_in == "condition":
        refused = {"type": "ReplicaFailure", "status": "True", "message": QUOTA}
        two.change(JOB, {"status": {"conditions": [refused]}})
    else:
        body = {"involvedObject": {"uid": "train"}, "reason": "FailedCreate", "message": QUOTA}
        two.store("/api/v1/namespaces/lab/events/e", body)
    code, body = await run.json("explain", "job/train")
    assert (code, body["message"]) == (
        1,
        f"Job lab/train: 0 of 4 pods run; 4 are not created: the API server refuses them: {QUOTA}; "
        "delete unneeded objects, or ask an administrator for a larger quota",
    )


async def test_a_suspended_job_names_its_queue_and_is_waited_for(two, run):
    job(two, suspend=True)
    code, body = await run.json("explain", "job/train")
    said = "Job lab/train: 0 of 4 pods run; 4 are not created: the Job is suspended (spec.suspend)"
    assert (code, body["message"]) == (0, said)
    assert (await run("explain", "job/train", "--wait", "--timeout", "300ms"))[0] == 1

    two.change(JOB, {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "night"}}})
    resumed = f"{said}, and queue night of Kueue resumes it"
    assert (await run.json("explain", "job/train"))[1]["message"] == resumed
    two.served["kueue.x-k8s.io"] = ["v1beta1"]
    waits = {"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota"}
    for name, owner in (("job-train", "train"), ("job-other", "other")):
        two.store(
            f"/apis/kueue.x-k8s.io/v1beta1/namespaces/lab/workloads/{name}",
            {
                "metadata": {"ownerReferences": [{"uid": owner}]},
                "status": {"conditions": [waits | {"message": f"{waits['message']} for {owner}"}]},
            },
        )
    assert (await run.json("explain", "job/train"))[1]["message"] == (
        f"{resumed}: insufficient unused quota for train"
    )
    two.forbid("/apis/kueue.x-k8s.io/v1beta1/namespaces")
    assert (await run.json("explain", "job/train"))[1]["message"] == resumed


async def test_a_job_whose_pods_run_has_no_problem(two, run):
    job(two, parallelism=2)
    member(two, "train-0", phase="Running", nodeName="n2")
    member(two, "train-1", phase="Succeeded", nodeName="n2")
    code, out, _ = await run("explain", "job/train")
    assert (code, out) == (0, "Job lab/train: 1 of 2 pods run; 1 has succeeded.\n")


@pytest.mark.parametrize(
    ("kind", "path", "owner"),
    [
        ("sts", "statefulsets", {"uid": "w", "name": "w"}),
        ("rs", "replicasets", {"uid": "w", "name": "w"}),
        ("ds", "daemonsets", {"uid": "w", "name": "w"}),
        ("deploy", "deployments", {"uid": "of a ReplicaSet", "name": "w-7c"}),
    ],
)
async def test_other_workloads_find_their_pods(two, run, kind, path, owner):
    labels = {"app": "w", "pod-template-hash": "7c"}
    selector = {"matchLabels": {"app": "w"}}
    two.store(
        f"{APPS}/{path}/w",
        {
            "metadata": {"uid": "w"},
            "spec": {"selector": selector, "replicas": 2},
            "status": {"desiredNumberScheduled": 2},
        },
    )
    two.claim("mine")
    for name, of in (("w-a", owner), ("w-b", owner), ("w-c", {"uid": "x", "name": "other-7c"})):
        claims = [{"name": "gpu", "resourceClaimName": "mine"}]
        meta = {"labels": labels, "ownerReferences": [{**of, "controller": True}]}
        body = {"metadata": meta, "spec": {"resourceClaims": claims}}
        two.store(f"/api/v1/namespaces/lab/pods/{name}", {**body, "status": {"phase": "Pending"}})
    code, body = await run.json("explain", kind, "w")
    assert code == 1
    assert body["message"].endswith("lab/w: 0 of 2 pods run; 2 wait for devices")
    assert body["groups"][0]["pods"] == ["w-a", "w-b"]


async def test_the_pods_of_a_group_name_it(two, run):
    two.claim("mine")
    for name, group in (("a", "g"), ("b", "g"), ("c", "other")):
        two.pod(name, "mine", schedulingGroup={"podGroupName": group})
    _, body = await run.json("explain", "podgroup/g")
    assert body["message"] == "PodGroup lab/g: 0 of 2 pods run; 2 wait for devices"
    assert body["groups"][0]["pods"] == ["a", "b"]

    two.served["scheduling.k8s.io"] = ["v1", "v1alpha3"]
    gang = {"spec": {"schedulingPolicy": {"gang": {"minCount": 3}}}}
    for name in ("g", "empty"):
        two.store(f"/apis/scheduling.k8s.io/v1alpha3/namespaces/lab/podgroups/{name}", gang)
    _, body = await run.json("explain", "podgroup/g")
    assert body["message"].endswith(": 0 of 3 pods run; 2 wait for devices; 1 is not created")
    _, body = await run.json("explain", "podgroup/empty")
    assert body["message"] == "PodGroup lab/empty: 0 of 3 pods run; 3 are not created"
    code, _, error = await run("explain", "podgroup/absent")
    assert (code, error) == (5, 'error: PodGroup "absent" does not exist in namespace "lab"\n')

    two.forbid("/apis/scheduling.k8s.io/v1alpha3/namespaces")
    _, body = await run.json("explain", "podgroup/g")
    assert body["groups"][0]["pods"] == ["a", "b"]
    assert (await run("explain", "podgroup/empty"))[0] == 3


async def test_a_cluster_without_pod_groups_says_so(two, run):
    two.served["scheduling.k8s.io"] = ["v1"]
    code, _, error = await run("explain", "podgroup/g")
    assert code == 5
    assert error == (
        'error: no pod in namespace "lab" is of PodGroup "g", and the API server does not serve '
        "PodGroups: they need the feature gate GenericWorkload\n"
    )


# ---------------------------------------------------------------- all pods that wait


async def test_every_pod_that_waits_has_a_line(two, run):
    two.claim("mine")
    two.pod("first", "mine")
    two.pod("second", "mine")
    two.pod("without")
    two.pod("done", "mine", phase="Succeeded")
    two.store(
        "/api/v1/namespaces/elsewhere/pods/far",
        {
            "spec": {"resourceClaims": [{"name": "gpu", "resourceClaimName": "absent"}]},
            "status": {"phase": "Pending"},
        },
    )
    code, out, _ = await run("explain")
    assert code == 1
    rows = [line.split(maxsplit=4) for line in out.splitlines() if line]
    assert rows[0] == ["NAMESPACE", "NAME", "VERDICT", "REASON", "MESSAGE"]
    assert [row[:4] for row in rows[1:3]] == [
        ["lab", "first", "blocked", "DevicesAllocated"],
        ["lab", "second", "blocked", "DevicesAllocated"],
    ]
    assert rows[1][4].startswith("of the 2 devices of DeviceClass")
    assert len(rows) == 3

    code, body = await run.json("explain", "-A")
    assert (code, body["kind"]) == (1, "ExplainReportList")
    names = [each["object"]["namespace"] + "/" + each["object"]["name"] for each in body["items"]]
    assert names == ["elsewhere/far", "lab/first", "lab/second"]
    assert body["items"][0]["reasons"][0]["code"] == "ResourceClaimMissing"
    assert await run("explain", "-o", "name") == (1, "pod/first\npod/second\n", "")
    name = "deviceclass.resource.k8s.io/gpu\n"
    assert (await run("explain", "class/gpu", "-o", "name"))[1] == name


async def test_no_pod_waits(two, run):
    assert await run("explain") == (0, "No pod waits for devices in namespace lab.\n", "")
    assert await run("explain", "-A") == (0, "No pod waits for devices.\n", "")


async def test_the_events_of_many_pods_are_listed_by_reason(two, run):
    for number in range(6):
        name = f"p{number}"
        member(two, name, nodeName="n1")
        claim = two.object(f"/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims/{name}-gpu")
        for reason, time in (("Prepared", 1), ("PrepareFailed", 2))[: 1 + (number == 3)]:
            two.store(
                f"/api/v1/namespaces/lab/events/{name}-{reason}",
                {
                    "involvedObject": {"uid": claim["metadata"]["uid"]},
                    "reason": reason,
                    "message": "the fan is loose",
                    "eventTime": f"2026-01-01T00:00:0{time}.000000Z",
                },
            )
    _, body = await run.json("explain")
    quoted = [
        each["object"]["name"] for each in body["items"] if "the fan is loose" in each["message"]
    ]
    assert quoted == ["p3"]


async def test_who_may_not_list_pods_gets_no_answer(two, run):
    two.forbid("/api/v1/pods")
    assert (await run("explain", "-A"))[0] == 3
    assert (await run("explain"))[0] == 0


@pytest.mark.parametrize(
    "arguments", [["-A", "-f", "x"], ["pod", "a", "b"], ["a", "-A"], ["a", "--timeout", "3"]]
)
async def test_questions_that_exclude_each_other(two, run, arguments):
    assert (await run("explain", *arguments))[0] == 2


@pytest.mark.parametrize("plugin", [False], indirect=True)
@pytest.mark.parametrize("target", ["template/gpus", "class/gpu", "job/train", "-A"])
async def test_without_the_programs_of_the_plugin_nothing_fits_for_certain(two, run, target):
    job(two)
    member(two, "w1")
    code, body = await run.json("explain", target)
    assert code == 4
    verdicts = {each["verdict"] for each in body.get("items", [body])}
    assert verdicts == {"undecided"}


# ---------------------------------------------------------------- again


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(explain_command, "MIN_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(explain_command, "MAX_PAUSE_SECONDS", 0.05)


async def test_waiting_ends_when_nothing_is_blocked(two, run):
    two.claim("c")
    two.pod("mine", "c")
    waiting = asyncio.create_task(run.json("explain", "mine", "--wait"))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    two.node("n2")
    code, body = await waiting
    assert (code, body["verdict"]) == (0, "fits")


async def test_waiting_goes_on_while_the_server_is_away(two, run):
    two.claim("c")
    two.pod("mine", "c")
    waiting = asyncio.create_task(run("explain", "mine", "--wait", "-o", "json"))
    await asyncio.sleep(0.5)
    two.fail("*", "/api/v1/namespaces/lab/pods/mine", status=503, message="no", times=3)
    await asyncio.sleep(0.5)
    two.node("n2")
    code, out, error = await waiting
    assert (code, json.loads(out)["verdict"]) == (0, "fits")
    assert error.startswith("error: ")


async def test_waiting_has_a_limit(two, run):
    two.claim("c")
    two.pod("mine", "c")
    code, body = await run.json("explain", "mine", "--wait", "--timeout", "300ms")
    assert (code, body["verdict"]) == (1, "blocked")


async def test_watching_prints_changes_only(two, run):
    """The watch ends here because the pod is deleted."""
    two.claim("c")
    two.pod("mine", "c")
    watching = asyncio.create_task(run("explain", "mine", "--watch", "-o", "json"))
    await run.until_said('"blocked"')
    two.node("n2")
    await run.until_said('"fits"')
    two.remove("/api/v1/namespaces/lab/pods/mine")
    code, out, _ = await watching
    first, second = out.strip().split("}\n{")
    assert (code, json.loads(first + "}")["verdict"]) == (5, "blocked")
    assert json.loads("{" + second)["verdict"] == "fits"
