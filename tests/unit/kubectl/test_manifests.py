"""``kubectl drakit explain -f``: what the API server accepts of a manifest, and what fits."""

from __future__ import annotations

import pytest
import yaml

from drakit_cli.kubectl.manifests import complete, read_documents
from drakit_daemon.kube import NotFoundError

MANIFEST = """\
apiVersion: resource.k8s.io/v1beta1
kind: ResourceClaimTemplate
metadata: {name: two}
spec: {spec: {devices: {requests: [{name: gpu, deviceClassName: gpu, count: COUNT}]}}}
---
apiVersion: v1
kind: Service
metadata: {name: ignored}
---
apiVersion: batch/v1
kind: Job
metadata: {name: big}
spec:
  parallelism: 3
  template:
    spec:
      resourceClaims: [{name: gpu, resourceClaimTemplateName: two}]
      containers: [{name: c, resources: {limits: {cpu: "CPU"}}}]
---
apiVersion: v1
kind: Pod
metadata: {generateName: other-}
spec:
  resourceClaims: [{name: gpu, resourceClaimName: mine}]
  containers: [{name: c}]
"""


@pytest.fixture
def plan(two, run, tmp_path):
    """Explain the manifest; node n2 is free and has a CPU."""
    two.node("n2")
    two.change("/api/v1/nodes/n2", {"status": {"allocatable": {"pods": "110", "cpu": "1"}}})
    two.claim("mine")
    two.served["resource.k8s.io"].append("v1beta1")

    async def ask(count: int = 1, cpu: str = "1", **changes: str) -> tuple[int, dict]:
        path, content = tmp_path / "pod.yaml", MANIFEST
        for old, new in {"COUNT": str(count), "CPU": cpu, **changes}.items():
            content = content.replace(old, new)
        path.write_text(content)
        return await run.json("explain", "-f", str(path))

    return ask


async def test_a_manifest_that_fits_names_the_node(plan, two):
    two.slice("s-n2", "gpu-0", "gpu-1", node="n2")
    code, body = await plan(**{"parallelism: 3": "parallelism: 3\n  completions: 1"})
    assert (code, body["kind"]) == (0, "ExplainReportList")
    job_of, pod_of = body["items"]
    assert job_of["object"] == {"kind": "Job", "namespace": "lab", "name": "big"}
    assert job_of["message"] == "Job lab/big fits on node n2"
    assert job_of["notEvaluated"] == []
    assert pod_of["message"] == "pod lab/other-xxxxx fits on node n2"
    assert_nothing_written(two)


async def test_a_manifest_that_would_wait_says_why(plan):
    code, body = await plan(count=2)
    assert (code, [each["verdict"] for each in body["items"]]) == (1, ["blocked", "fits"])
    assert body["items"][0]["message"].startswith("Job lab/big would wait: ")
    code, body = await plan(cpu="2")
    assert (code, body["items"][0]["verdict"]) == (1, "blocked"), "limits are requests"


async def test_a_manifest_tells_how_many_of_its_pods_fit(plan, two):
    code, body = await plan()
    job_of, pod_of = body["items"]
    assert (code, job_of["verdict"], pod_of["verdict"]) == (1, "blocked", "blocked")
    assert job_of["message"].startswith(
        "1 of the 3 pods of Job lab/big fits; the next one would wait: all 2 devices of DeviceClass"
    )
    assert "too little cpu" in job_of["message"]

    two.slice("s-n2", "gpu-0", "gpu-1", node="n2")
    code, body = await plan(cpu="10m")
    job_of = body["items"][0]
    assert job_of["message"].startswith(
        "2 of the 3 pods of Job lab/big fit; the next one would wait: of the 3 devices"
    )
    assert "claim lab/big-1 (pod big-1)" in job_of["message"]

    two.slice("s-n2", *(f"gpu-{number}" for number in range(4)), node="n2")
    code, body = await plan(cpu="10m")
    job_of, _ = body["items"]
    assert (code, job_of["verdict"], job_of["fitsOn"]) == (0, "fits", "n2")
    assert job_of["message"] == "the 3 pods of Job lab/big fit, the first on node n2"
    assert_nothing_written(two)


def assert_nothing_written(site):
    """All writes are dry runs with strict validation."""
    strict = {"dryRun": "All", "fieldValidation": "Strict"}
    writes = [
        query
        for (method, _), query in zip(site.requests, site.queries, strict=True)
        if method != "GET"
    ]
    assert writes
    assert all(query.items() >= strict.items() for query in writes)


async def test_pods_of_a_manifest_that_share_a_claim_are_placed_on_its_node(plan):
    shared = {"resourceClaimTemplateName: two": "resourceClaimName: mine"}
    code, body = await plan(**shared)
    job_of, pod_of = body["items"]
    assert (code, job_of["verdict"]) == (1, "blocked"), "node n2 has one CPU"
    code, body = await plan(cpu="10m", **shared)
    job_of, pod_of = body["items"]
    assert (code, job_of["message"]) == (
        0,
        "the 3 pods of Job lab/big fit, the first on node n2",
    )
    assert pod_of["message"] == "pod lab/other-xxxxx needs no free device"


class Recorder:
    """An API server that accepts everything; `created` has the pods."""

    def __init__(self):
        self.created = []

    async def get(self, path):
        raise NotFoundError(status=404, reason="NotFound", message="no", method="GET", path=path)

    async def create(self, path, body, **_):
        if path.endswith("/pods"):
            self.created.append(body)
        return body


async def created(content):
    server = Recorder()
    manifest = await complete(server, *read_documents(content, "lab"))
    return server.created, manifest.pods


async def test_the_pod_of_a_stateful_set_has_the_volumes_of_its_claims():
    claims = "volumeClaimTemplates: [{metadata: {name: data}}]"
    content = DEPLOYMENT.replace("Deployment", "StatefulSet").replace(
        "template:", f"{claims}\n  template:"
    )
    (pod,), _ = await created(content)
    claim = {"claimName": "data-d-0"}
    assert pod["spec"]["volumes"] == [{"name": "data", "persistentVolumeClaim": claim}]


async def test_the_pods_of_a_daemon_set_run_on_cordoned_nodes():
    _, (planned,) = await created(DEPLOYMENT.replace("Deployment", "DaemonSet"))
    tolerated = {each.key for each in planned.facts.placement.tolerations}
    assert "node.kubernetes.io/unschedulable" in tolerated
    _, (planned,) = await created(DEPLOYMENT)
    assert "node.kubernetes.io/unschedulable" not in {
        each.key for each in planned.facts.placement.tolerations
    }


async def test_one_pod_of_a_daemon_set_is_checked(plan):
    _, body = await plan(**{"batch/v1": "apps/v1", "Job": "DaemonSet"})
    assert body["items"][0]["notEvaluated"] == [
        "only one pod of DaemonSet lab/big was checked, not one on each node"
    ]


POD = """\
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  resourceClaims: [{name: gpu, resourceClaimTemplateName: t}]
  containers: [{name: c, image: i}]
---
"""
TEMPLATE = """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: t}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu}}]}}}
"""
DEPLOYMENT = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: d}
spec:
  replicas: 1
  template:
    spec:
      resourceClaims: [{name: gpu, resourceClaimTemplateName: t}]
      containers: [{name: c, image: i}]
---
"""


@pytest.fixture
def planned(two, run, tmp_path):
    """Explain a manifest; of the two devices, that of node n2 is free."""
    two.node("n2")

    async def ask(content: str) -> tuple[int, list[dict]]:
        path = tmp_path / "pod.yaml"
        path.write_text(content)
        code, body = await run.json("explain", "-f", str(path))
        return code, body["items"]

    return ask


@pytest.mark.parametrize("plugin", [False], indirect=True)
async def test_without_the_programs_of_the_plugin_a_manifest_is_undecided(planned):
    code, (found,) = await planned(DEPLOYMENT + TEMPLATE)
    assert (code, found["message"]) == (
        4,
        "it is unknown whether Deployment lab/d can be scheduled",
    )
    assert any("is not installed" in each for each in found["notEvaluated"])
    code, (found,) = await planned(DEPLOYMENT)
    assert (code, "does not exist in namespace" in found["message"]) == (1, True)


async def test_the_pods_of_a_manifest_take_devices_from_each_other(planned):
    code, (first, second) = await planned(POD.replace("NAME", "a") + POD + TEMPLATE)
    assert (code, first["message"]) == (1, "pod lab/a fits on node n2")
    assert second["message"].startswith("pod lab/NAME would wait: all 2 devices")
    assert "claim lab/a (pod a)" in second["message"]


async def test_a_pod_of_a_manifest_that_runs_does_not_block_itself(planned, two):
    two.claim("a-gpu", device="gpu-0", pool="n2", pod="a")
    made = [{"name": "gpu", "resourceClaimName": "a-gpu"}]
    claims = [{"name": "gpu", "resourceClaimTemplateName": "t"}]
    two.pod("a", phase="Running", nodeName="n2", resourceClaims=claims)
    two.change(
        "/api/v1/namespaces/lab/pods/a",
        {"metadata": {"uid": "a"}, "status": {"resourceClaimStatuses": made}},
    )
    code, (found,) = await planned(POD.replace("NAME", "a") + TEMPLATE)
    assert (code, found["verdict"]) == (0, "not pending")
    assert found["message"].startswith("pod lab/a is scheduled to node n2")
    assert_nothing_written(two)


async def test_claims_and_templates_without_pods_are_explained(planned):
    claim = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: c}\nspec: "
    claim += "{devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu}}]}}"
    code, (first, second) = await planned(f"{TEMPLATE}---\n{claim}")
    assert (code, first["message"]) == (
        1,
        "ResourceClaimTemplate lab/t fits on node n2",
    )
    assert second["message"].startswith("ResourceClaim lab/c would wait: all 2 devices")


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        pytest.param(
            DEPLOYMENT.replace("replicas: 1", "replicas: 0"), 0, "would create no pod", id="none"
        ),
        pytest.param(
            DEPLOYMENT.replace("replicas: 1", "replicas: -1"),
            0,
            "would create no pod",
            id="negative",
        ),
        pytest.param(
            DEPLOYMENT.replace("replicas: 1", "replicas: 9").replace("resourceClaims", "other"),
            0,
            "the 9 pods of Deployment lab/d need no free device",
            id="without-claims",
        ),
        pytest.param(
            DEPLOYMENT.replace("apps", "batch")
            .replace("Deployment", "Job")
            .replace("replicas: 1", "suspend: true"),
            0,
            "would create no pod",
            id="suspended",
        ),
        pytest.param(
            POD.replace("spec:", "spec:\n  nodeName: n2"),
            1,
            "would not start: it sets spec.nodeName, so the scheduler does not allocate its claims",
            id="without-scheduler",
        ),
    ],
)
async def test_what_is_not_scheduled_is_named(planned, content, code, text):
    found, (report,) = await planned(content + TEMPLATE)
    assert (found, text in report["message"]) == (code, True), report


@pytest.fixture
def deployed(two):
    """A Deployment whose pod holds the device of n2."""
    (body,) = [each for each in yaml.safe_load_all(DEPLOYMENT) if each]
    two.store("/apis/apps/v1/namespaces/lab/deployments/d", body)
    two.template("t")
    two.claim("d-1", device="gpu-0", pool="n2", pod="d-1")
    owner = {"controller": True, "kind": "ReplicaSet", "name": "d-7", "uid": "rs"}
    claims = [{"name": "gpu", "resourceClaimTemplateName": "t"}]
    two.pod("d-1", phase="Running", nodeName="n2", resourceClaims=claims)
    metadata = {"uid": "d-1", "ownerReferences": [owner], "labels": {"pod-template-hash": "7"}}
    made = [{"name": "gpu", "resourceClaimName": "d-1"}]
    two.change(
        "/api/v1/namespaces/lab/pods/d-1",
        {"metadata": metadata, "status": {"resourceClaimStatuses": made}},
    )


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        pytest.param({}, 0, "Deployment lab/d would create no pod", id="unchanged"),
        pytest.param(
            {"replicas: 1": "replicas: 2"}, 1, "Deployment lab/d would wait: all 2", id="more"
        ),
        pytest.param(
            {"image: i": "image: j"}, 1, "Deployment lab/d would wait: all 2", id="rolling-update"
        ),
        pytest.param(
            {"image: i": "image: j", "replicas: 1": "replicas: 1\n  strategy: {type: Recreate}"},
            0,
            "Deployment lab/d fits on node n2",
            id="old-pods-end-first",
        ),
        pytest.param(
            {
                "image: i": "image: j",
                "replicas: 1": "replicas: 1\n  strategy: {rollingUpdate: {maxUnavailable: 1}}",
            },
            0,
            "Deployment lab/d fits on node n2",
            id="one-old-pod-ends-first",
        ),
    ],
)
@pytest.mark.parametrize("permitted", [True, False])
@pytest.mark.usefixtures("deployed")
async def test_the_pods_of_an_existing_workload_count(planned, two, changes, code, text, permitted):
    if not permitted:
        deployments = "/apis/apps/v1/namespaces/lab/deployments"
        message = '"me" cannot patch resource "deployments" in API group "apps"'
        two.fail("PATCH", deployments, status=403, reason="Forbidden", message=message, times=9)
    content = DEPLOYMENT + TEMPLATE
    for old, new in changes.items():
        content = content.replace(old, new)
    found, items = await planned(content)
    assert found == code, items
    assert items[0]["message"].startswith(text)
    assert_nothing_written(two)


PODS = "/api/v1/namespaces/lab/pods"
RESOURCES = "/apis/resource.k8s.io/v1/namespaces/lab"
UNKNOWN = 'strict decoding error: unknown field "spec.resourceClaim"'


@pytest.mark.parametrize(
    ("path", "status", "reason", "message", "text"),
    [
        pytest.param(
            PODS,
            *(400, "BadRequest", UNKNOWN),
            f"the API server does not accept pod lab/a: {UNKNOWN}",
            id="an-unknown-field",
        ),
        pytest.param(
            PODS,
            *(403, "Forbidden", 'pods "a" is forbidden: exceeded quota: pods'),
            'the API server does not accept pod lab/a: pods "a" is forbidden: exceeded quota: pods',
            id="a-quota-of-pods",
        ),
        pytest.param(
            f"{RESOURCES}/resourceclaims",
            *(403, "Forbidden", "exceeded quota: claims"),
            "pod lab/a would wait: the API server does not accept its claim from "
            'ResourceClaimTemplate "t": exceeded quota: claims',
            id="a-quota-of-claims",
        ),
        pytest.param(
            f"{RESOURCES}/resourceclaimtemplates",
            *(422, "Invalid", "spec: Required value"),
            "the API server does not accept ResourceClaimTemplate lab/t: spec: Required value",
            id="an-invalid-template",
        ),
    ],
)
async def test_what_the_api_server_does_not_accept_is_quoted(
    planned, two, path, status, reason, message, text
):
    two.fail("POST", path, status=status, reason=reason, message=message, times=9)
    code, items = await planned(POD.replace("NAME", "a") + TEMPLATE)
    assert (code, items[0]["message"]) == (1, text)
    assert [each["code"] for each in items[0]["reasons"]] == ["Refused"]


async def test_the_pods_of_a_workload_are_created_like_pods(planned, two):
    two.fail("POST", PODS, status=403, reason="Forbidden", message="violates PodSecurity", times=9)
    code, (found,) = await planned(DEPLOYMENT + TEMPLATE)
    assert (code, found["message"]) == (
        1,
        "the API server does not accept Deployment lab/d: its pods: violates PodSecurity",
    )


async def test_an_older_cluster_has_no_claims_of_v1(planned, two):
    two.serve("v1beta1")
    two.runs("v1.33.4")
    two.device_class("gpu")
    two.slice("s-n2", "gpu-0", node="n2")
    template = TEMPLATE.replace("resource.k8s.io/v1", "resource.k8s.io/v1beta1").replace(
        "exactly: {deviceClassName: gpu}", "deviceClassName: gpu"
    )
    code, (found,) = await planned(POD.replace("NAME", "a") + template)
    assert (code, found["message"]) == (0, "pod lab/a fits on node n2")


async def test_what_exists_is_not_held_to_the_quota_that_it_fills(planned, two):
    two.pod("a", phase="Running", nodeName="n1")
    two.fail("POST", PODS, status=403, reason="Forbidden", message="exceeded quota", times=9)
    code, (found,) = await planned(POD.replace("NAME", "a") + TEMPLATE)
    assert (code, found["verdict"]) == (0, "not pending"), found


async def test_a_missing_namespace_and_version_are_named(planned, two):
    two.fail(
        *("POST", "/api/v1/namespaces/gone"),
        status=404,
        reason="NotFound",
        message='namespaces "gone" not found',
        details={"kind": "namespaces", "name": "gone"},
        times=9,
    )
    elsewhere = POD.replace("NAME", "a, namespace: gone")
    _, (found,) = await planned(elsewhere)
    assert found["message"].endswith('pod gone/a: namespaces "gone" not found')
    _, items = await planned(POD.replace("NAME", "a") + TEMPLATE.replace("/v1", "/v1beta1"))
    assert items[0]["message"].endswith("lab/t: it does not serve resource.k8s.io/v1beta1")


@pytest.mark.parametrize(
    ("status", "reason", "message", "why"),
    [
        pytest.param(
            *(403, "Forbidden", '"me" cannot create resource "RESOURCE" in API group ""'),
            "no permission to create RESOURCE",
            id="no-permission",
        ),
        pytest.param(
            *(400, "BadRequest", 'admission webhook "w" does not support dry run'),
            'admission webhook "w" does not support dry run',
            id="a-webhook",
        ),
        pytest.param(*(503, "ServiceUnavailable", "later"), "later", id="no-answer"),
        pytest.param(
            *(403, "Forbidden", 'pods "a" is forbidden: serviceaccount "me" not found'),
            'pods "a" is forbidden: serviceaccount "me" not found',
            id="an-object-that-the-manifest-creates",
        ),
    ],
)
@pytest.mark.parametrize("first", ["exactly", "firstAvailable"])
async def test_what_cannot_be_asked_is_named_and_the_defaults_are_filled_in(
    planned, two, status, reason, message, why, first
):
    for resource, path in (
        ("pods", PODS),
        ("resourceclaims", f"{RESOURCES}/resourceclaims"),
        ("resourceclaimtemplates", f"{RESOURCES}/resourceclaimtemplates"),
    ):
        said = message.replace("RESOURCE", resource)
        two.fail("POST", path, status=status, reason=reason, message=said, times=9)
    template = TEMPLATE
    if first == "firstAvailable":
        template = template.replace(
            "exactly: {deviceClassName: gpu}", "firstAvailable: [{name: x, deviceClassName: gpu}]"
        )
    account = "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: me}\n---\n"
    code, (found,) = await planned(account + POD.replace("NAME", "a") + template)
    assert (code, found["message"]) == (0, "pod lab/a fits on node n2")
    effect = "unknown fields, quotas and admission are not checked"
    assert set(found["notEvaluated"]) == {
        f"not validated by the API server ({each}: {why.replace('RESOURCE', each)}): {effect}"
        for each in ("pods", "resourceclaims", "resourceclaimtemplates")
    }


async def test_a_pod_claim_without_a_source_is_named(planned, two):
    message = '"me" cannot create resource "pods" in API group ""'
    two.fail("POST", PODS, status=403, reason="Forbidden", message=message, times=9)
    code, (found,) = await planned(POD.replace("resourceClaimTemplateName", "templateName"))
    assert (code, found["message"]) == (
        1,
        'pod lab/NAME would wait: pod claim "gpu" names no claim; set resourceClaimName or '
        "resourceClaimTemplateName",
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("kind: [", "not valid YAML"),
        ("!!int x", "not valid YAML"),
        ("&a [*a]", "not valid YAML"),
        ("- 1", "not an object"),
        ("{apiVersion: v1, kind: Service}", "none of the kinds"),
        ("{apiVersion: example.com/v1, kind: Job}", "none of the kinds"),
        ("{apiVersion: v1}", "no kind"),
        ("{kind: Pod}", "no apiVersion"),
        ("{apiVersion: v1, kind: Pod, metadata: {name: 7}}", 'must be a string; quote it: "7"'),
        ("{apiVersion: v1, kind: Pod, metadata: [1]}", "metadata is not an object"),
        ("{apiVersion: v1, kind: Pod, spec: {resourceClaims: [1]}}", "malformed"),
        (POD.replace("Name: t", "Name: 7"), "pod lab/NAME of the manifest is malformed"),
        (POD + TEMPLATE.replace("{name: gpu", "{name: [1]"), "Template lab/t of the manifest is"),
    ],
)
async def test_a_wrong_manifest_is_wrong_usage(two, run, tmp_path, content, text):
    path = tmp_path / "pod.yaml"
    path.write_text(content)
    code, _, error = await run("explain", "-f", str(path))
    assert (code, text in error) == (2, True), error
