"""What `kubectl drakit explain` says would help does help: a row breaks one thing, and mends it."""

from __future__ import annotations

import pytest

API = "/apis/resource.k8s.io/v1"
CLAIM = f"{API}/namespaces/lab/resourceclaims/mine"
NODE = "/api/v1/nodes/n1"
POD = "/api/v1/namespaces/lab/pods/p"
TAINTED = {"taints": [{"key": "x", "effect": "NoSchedule"}]}


def exactly(site, **changes):
    """Change the request of the pod's claim, in all fields that the API server defaults."""
    exact = {"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1} | changes
    site.change(CLAIM, {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exact}]}}})


def selector(expression):
    return [{"cel": {"expression": expression}}]


def spec_of_pod(site, **spec):
    site.change(POD, {"spec": spec})


def resources(**requests):
    return [{"name": "c", "resources": {"requests": requests}}]


def taint(*keys):
    return [{"name": "a", "taints": [{"key": key, "effect": "NoSchedule"} for key in keys]}]


def constrained(site, attribute):
    devices = [{"name": name, "attributes": {"board": {"int": n}}} for n, name in enumerate("ab")]
    site.slice("s1", devices=devices)
    exactly(site, count=2)
    constraints = [{"matchAttribute": f"{site.driver}/{attribute}"}]
    site.change(CLAIM, {"spec": {"devices": {"constraints": constraints}}})


def from_template(site):
    spec_of_pod(site, resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "t"}])


def controller(site):
    """Do what the resource claim controller does when nothing prevents it any more."""
    site.claim("p-gpu")
    made = [{"name": "gpu", "resourceClaimName": "p-gpu"}]
    site.change(POD, {"status": {"resourceClaimStatuses": made}})


def quota(site, number):
    amounts = {"count/resourceclaims.resource.k8s.io": number}
    used = {"count/resourceclaims.resource.k8s.io": "0"}
    path = "/api/v1/namespaces/lab/resourcequotas/q"
    site.store(path, {"status": {"hard": amounts, "used": used}})


def rule(site):
    site.served["resource.k8s.io"] = ["v1", "v1beta2"]
    spec = {"deviceSelector": {}, "taint": {"key": "repair", "effect": "NoSchedule"}}
    site.store(f"{API}/devicetaintrules/r", {"spec": spec})


ROWS = [
    pytest.param(
        lambda site: site.remove(f"{API}/deviceclasses/gpu"),
        'DeviceClass "gpu" of claim "mine", request "gpu", does not exist; create it',
        lambda site: site.device_class("gpu"),
        id="create-the-class",
    ),
    pytest.param(
        lambda site: site.remove(CLAIM),
        'ResourceClaim "mine" for pod claim "gpu" does not exist in namespace "lab"; create it',
        lambda site: site.claim("mine"),
        id="create-the-claim",
    ),
    pytest.param(
        from_template,
        'ResourceClaimTemplate "t" for pod claim "gpu" does not exist in namespace "lab"; create',
        lambda site: (site.template("t"), controller(site)),
        id="create-the-template",
    ),
    pytest.param(
        lambda site: (from_template(site), site.template("t"), quota(site, "0")),
        "delete claims that are not needed, or ask an admin for more",
        lambda site: (quota(site, "1"), controller(site)),
        id="raise-the-quota",
    ),
    pytest.param(
        lambda site: site.claim("other", device="a", pod="q"),
        "if claim lab/other (pod q) released its devices",
        lambda site: site.remove(f"{API}/namespaces/lab/resourceclaims/other"),
        id="release-the-device",
    ),
    pytest.param(
        lambda site: site.slice("s1", devices=taint("hot")),
        'if request "gpu" tolerated the taint hot:NoSchedule',
        lambda site: exactly(site, tolerations=[{"key": "hot", "operator": "Exists"}]),
        id="tolerate-the-taint-of-a-device",
    ),
    pytest.param(
        rule,
        "DeviceTaintRule r sets a taint, which is removed when the rule is deleted",
        lambda site: site.remove(f"{API}/devicetaintrules/r"),
        id="delete-the-rule",
    ),
    pytest.param(
        lambda site: site.change(NODE, {"spec": {"unschedulable": True}}),
        "if that node were not cordoned",
        lambda site: site.change(NODE, {"spec": {"unschedulable": None}}),
        id="uncordon-the-node",
    ),
    pytest.param(
        lambda site: site.change(
            NODE, {"spec": {"taints": [{"key": "x", "effect": "NoSchedule"}]}}
        ),
        "if the pod tolerated the node's taint x",
        lambda site: spec_of_pod(site, tolerations=[{"key": "x", "operator": "Exists"}]),
        id="tolerate-the-taint-of-a-node",
    ),
    pytest.param(
        lambda site: spec_of_pod(site, nodeSelector={"zone": "a"}),
        "if the pod's node selector and affinity allowed that node",
        lambda site: spec_of_pod(site, nodeSelector=None),
        id="allow-the-node",
    ),
    pytest.param(
        lambda site: spec_of_pod(site, containers=resources(cpu="9")),
        "if that node had enough resources left (cpu)",
        lambda site: site.change(NODE, {"status": {"allocatable": {"cpu": "9"}}}),
        id="more-cpu",
    ),
    pytest.param(
        lambda site: exactly(site, count=2),
        'if request "gpu" asked for 1 instead of 2',
        lambda site: exactly(site, count=1),
        id="ask-for-fewer",
    ),
    pytest.param(
        lambda site: exactly(site, selectors=selector("false")),
        'if request "gpu" had no selector',
        exactly,
        id="without-the-selector",
    ),
    pytest.param(
        lambda site: site.device_class("gpu", 'device.driver == "gpu.exmaple.com"'),
        "but driver gpu.example.com publishes some",
        lambda site: site.device_class("gpu"),
        id="correct-the-driver",
    ),
    pytest.param(
        lambda site: constrained(site, "board"),
        "did not have the constraint matchAttribute gpu.example.com/board",
        lambda site: site.change(CLAIM, {"spec": {"devices": {"constraints": None}}}),
        id="without-the-constraint",
    ),
]


@pytest.mark.parametrize(("spoil", "text", "mend"), ROWS)
async def test_the_remedy_ends_the_problem(site, run, spoil, text, mend):
    site.node("n1")
    site.change(NODE, {"status": {"allocatable": {"pods": "9", "cpu": "4"}}})
    site.device_class("gpu")
    site.slice("s1", "a")
    site.claim("mine")
    site.pod("p", "mine")
    assert (await run.json("explain", "p"))[0] == 0
    spoil(site)
    code, body = await run.json("explain", "p")
    assert (code, body["verdict"]) == (1, "blocked")
    assert text in body["message"]
    mend(site)
    code, body = await run.json("explain", "p")
    assert (code, body["verdict"]) == (0, "fits"), body["message"]
