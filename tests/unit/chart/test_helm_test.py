"""`helm test`: the class that it claims, and what its pod may do."""

from __future__ import annotations

from typing import Any

import pytest

from drakit_cli.main import parser
from tests.unit.chart.reading import the

KVM: dict[str, Any] = {"hostdev": {"policies": {"kvm": {"enabled": True}}}}
THINGS: dict[str, Any] = {
    "devicePlugins": {
        "enabled": True,
        "plugins": {"things": {"resources": ["vendor.example/thing"]}},
    }
}
GPUS: dict[str, Any] = {"simulated": {"enabled": True}}
MATCH = [{"subsystem": "tty", "paths": ["/dev/ttyUSB*"]}]


def policy(**spec: Any) -> dict[str, Any]:
    return {"hostdev": {"policies": {"lamp": {"match": MATCH, **spec}}}}


def claimed(objects: list[dict[str, Any]]) -> tuple[str, list[str]] | None:
    """Return the class of the claim, and the arguments of the container; None without a test."""
    tests = [each for each in objects if "test" in hook(each)]
    if not tests:
        return None
    template, pod = (
        the(tests, "ResourceClaimTemplate", "drakit-test"),
        the(tests, "Pod", "drakit-test"),
    )
    assert len(tests) == 2
    (claim,) = pod["spec"]["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["claims"] == [{"name": claim["name"]}]
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["name"] == "device", "the variables have the name of the request"
    return request["exactly"]["deviceClassName"], container.get("args", [])


def hook(body: dict[str, Any]) -> list[str]:
    return body["metadata"].get("annotations", {}).get("helm.sh/hook", "").split(",")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({}, None, id="no-class-no-test"),
        pytest.param(KVM, ("kvm.drakit.dev", ["--variable=HOSTDEV_DEVICE"]), id="policy"),
        pytest.param(
            policy(deviceClass={"name": "lamps.example.com"}),
            ("lamps.example.com", ["--variable=HOSTDEV_DEVICE"]),
            id="policy-with-a-class-of-another-name",
        ),
        pytest.param(policy(deviceClass={"create": "Never"}), None, id="policy-without-a-class"),
        pytest.param(policy(allowedNamespaces={"names": ["lab"]}), None, id="other-namespaces"),
        pytest.param({**KVM, **THINGS}, ("thing.vendor.example", []), id="device-plugin"),
        pytest.param(
            {**KVM, **GPUS},
            ("gpu.simulated.drakit.dev", ["--variable=SIMULATED_DEVICE"]),
            id="simulated",
        ),
        pytest.param(
            {"simulated": {"enabled": True, "config": {"gpu": {"count": 0}}}},
            ("nic.simulated.drakit.dev", ["--variable=SIMULATED_DEVICE"]),
            id="simulated-without-gpus",
        ),
        pytest.param(
            {**GPUS, "test": {"deviceClass": "lamps.example.com"}},
            ("lamps.example.com", []),
            id="class-of-the-values",
        ),
    ],
)
def test_the_class_is_one_of_the_values(render, values, expected):
    assert claimed(render(values)) == expected


def test_the_pod_is_confined_and_runs_a_command_that_exists(render):
    pod = the(render(GPUS), "Pod", "drakit-test")
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    program, *words = container["command"]
    assert program.endswith("/drakit")
    assert parser().parse_args([*words, *container["args"]]).variable == "SIMULATED_DEVICE"


def test_a_test_that_succeeds_leaves_nothing(render):
    for body in render(GPUS):
        if "test" in hook(body):
            policy = body["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
            assert policy == "before-hook-creation,hook-succeeded"


def test_on_openshift_the_constraints_choose_the_user(render):
    scc = {"openShift": {"scc": {"operator": "nonroot-v2"}}}
    context = the(render({**GPUS, **scc}), "Pod", "drakit-test")["spec"]["securityContext"]
    assert "runAsUser" not in context
