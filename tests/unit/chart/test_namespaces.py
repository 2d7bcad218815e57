"""The admission policy of ``allowedNamespaces``: the claims that a HostDevicePolicy allows."""

from __future__ import annotations

from typing import Any

import pytest

from drakit_drivers.hostdev.policy import LabelSelector
from drakit_operator.config import read_config
from tests.unit.chart.reading import AdmissionPolicy, the, written

NAME = "drakit-operator-namespaces"
ON = {"hostdev": {"restrictNamespaces": True}}
NAMES = {"names": ["lab", "test"]}


def namespace(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, **({"labels": labels} if labels else {})}}


def policy(allowed: dict[str, Any] | None, **device_class: str) -> dict[str, Any]:
    spec = {} if allowed is None else {"allowedNamespaces": allowed}
    return {"metadata": {"name": "serial"}, "spec": spec | {"deviceClass": device_class}}


def claim(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "ResourceClaim", "spec": {"devices": {"requests": list(requests)}}}


def exact(name: str) -> dict[str, Any]:
    return {"name": "one", "exactly": {"deviceClassName": name}}


def template(body: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "ResourceClaimTemplate", "spec": {"spec": body["spec"]}}


OURS = claim(exact("serial.drakit.dev"))
ALTERNATIVES = [{"deviceClassName": "other.test"}, {"deviceClassName": "serial.drakit.dev"}]


@pytest.fixture
def admission(render) -> AdmissionPolicy:
    return AdmissionPolicy(render(ON), NAME)


@pytest.mark.parametrize(
    ("claim", "refused"),
    [
        pytest.param(OURS, True, id="claim"),
        pytest.param(template(OURS), True, id="template"),
        pytest.param(claim({"name": "one", "deviceClassName": "serial.drakit.dev"}), True,
                     id="v1beta1"),
        pytest.param(claim(exact("other.test"), exact("serial.drakit.dev")), True,
                     id="second-request"),
        pytest.param(claim({"name": "one", "firstAvailable": ALTERNATIVES}), True,
                     id="second-alternative"),
        pytest.param(claim({"name": "one", "firstAvailable": ALTERNATIVES[:1]}), False,
                     id="alternatives-of-another-class"),
        pytest.param(claim(exact("other.test")), False, id="another-class"),
        pytest.param(claim(exact("serial.drakit.dev.test")), False, id="longer-name"),
        pytest.param({"kind": "ResourceClaim", "spec": {}}, False, id="no-devices"),
        pytest.param({"kind": "ResourceClaim", "spec": {"devices": {}}}, False, id="no-requests"),
    ],
)  # fmt: skip
def test_claims_for_the_class_need_an_allowed_namespace(admission, claim, refused):
    reason, message = admission.refusal(
        None, claim, params=policy(NAMES), namespace=namespace("office")
    )
    assert (reason == "Forbidden") is refused
    if refused:
        assert message.startswith(
            "HostDevicePolicy 'serial' allows claims for DeviceClass 'serial.drakit.dev' only in "
            "some namespaces, and not in 'office'"
        )
    for allowed in (namespace("lab"), namespace("test", team="a")):
        assert admission.refusal(None, claim, params=policy(NAMES), namespace=allowed) == ("", "")


def test_a_policy_restricts_the_class_that_it_names(admission):
    named = policy(NAMES, name="ports.test")
    office = namespace("office")
    assert admission.refusal(None, OURS, params=named, namespace=office) == ("", "")
    of_class = claim(exact("ports.test"))
    assert admission.refusal(None, of_class, params=named, namespace=office)[0] == "Forbidden"


def test_a_policy_without_the_field_restricts_nothing(admission):
    unrestricted = policy(None)
    assert admission.refusal(None, OURS, params=unrestricted, namespace=namespace("a")) == ("", "")


def requirement(operator: str, *values: str) -> dict[str, Any]:
    found = {"key": "room", "operator": operator}
    return {"matchExpressions": [found | ({"values": list(values)} if values else {})]}


@pytest.mark.parametrize(
    "selector",
    [
        pytest.param({"matchLabels": {"team": "a"}}, id="label"),
        pytest.param({"matchLabels": {"team": "a", "room": "hall"}}, id="labels"),
        pytest.param(requirement("In", "lab", "hall"), id="in"),
        pytest.param(requirement("NotIn", "hall"), id="not-in"),
        pytest.param(requirement("Exists"), id="exists"),
        pytest.param(requirement("DoesNotExist"), id="does-not-exist"),
        pytest.param({"matchLabels": {"team": "a"}} | requirement("In", "hall"), id="both"),
    ],
)
@pytest.mark.parametrize(
    "labels",
    [
        pytest.param({}, id="no-labels"),
        pytest.param({"team": "a"}, id="team"),
        pytest.param({"team": "a", "room": "hall"}, id="hall"),
        pytest.param({"team": "b", "room": "lab"}, id="other-team"),
    ],
)
def test_a_selector_selects_as_that_of_nodes_does(admission, selector, labels):
    params = policy({"selector": selector})
    reason, _ = admission.refusal(None, OURS, params=params, namespace=namespace("a", **labels))
    assert (reason == "") is LabelSelector.model_validate(selector).selects(labels)


def test_a_name_is_enough_even_if_the_selector_selects_others(admission):
    params = policy({**NAMES, "selector": {"matchLabels": {"team": "a"}}})
    for allowed in (namespace("lab"), namespace("x", team="a")):
        assert admission.refusal(None, OURS, params=params, namespace=allowed) == ("", "")
    assert admission.refusal(None, OURS, params=params, namespace=namespace("x"))[0] == "Forbidden"


def test_each_policy_of_the_cluster_is_a_parameter_and_older_claims_can_be_deleted(render):
    objects = render(ON)
    binding = the(objects, "ValidatingAdmissionPolicyBinding", NAME)["spec"]
    assert binding["paramRef"] == {"selector": {}, "parameterNotFoundAction": "Allow"}
    assert binding["validationActions"] == ["Deny"]
    spec = the(objects, "ValidatingAdmissionPolicy", NAME)["spec"]
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert rule["operations"] == ["CREATE"]
    assert spec["failurePolicy"] == "Fail"


@pytest.mark.parametrize(
    ("hostdev", "enforced"),
    [
        pytest.param({}, False, id="by-default"),
        pytest.param({"restrictNamespaces": True}, True, id="on"),
        pytest.param({"restrictNamespaces": True, "enabled": False}, False, id="no-hostdev"),
    ],
)
def test_the_operator_knows_whether_namespaces_are_enforced(render, tmp_path, hostdev, enforced):
    objects = render({"hostdev": hostdev, "simulated": {"enabled": True}})
    names = {each["metadata"]["name"] for each in objects if "Admission" in each["kind"]}
    assert (NAME in names) is enforced
    config = read_config(written(objects, tmp_path, "operator"))
    assert config.restrict_namespaces is enforced
