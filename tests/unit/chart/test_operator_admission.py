"""The operator's admission policy: the DeviceClasses that its token may write."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml

from drakit_explain.maintenance import rule_of
from drakit_explain.model import (
    DeviceID,
    DeviceSelection,
    DriverFacts,
    MaintenanceFacts,
    PolicyFacts,
)
from drakit_explain.reports import MAINTENANCE, OUTDATED
from drakit_operator.announcing import CONTROLLER
from drakit_operator.policies.status import desired_class
from tests.unit.chart.class_writes import EXTENDED, OTHER_FIELDS, PREFIX, WRITES, Write
from tests.unit.chart.reading import AdmissionPolicy, the
from tests.unit.docs.listings import listing

NAME = "drakit-operator"
EVENTS = "drakit-operator-events"
REPORTS = "drakit-operator-reports"
DRIVERS = "drakit-operator-drivers"
RULES = "drakit-operator-maintenance"
DEVICE = DeviceID("d", "n1", "cam")
OWNER = DriverFacts(name="d", uid="d")
TAINTS = {"operator": {"driverTaints": {"enabled": True}}}
ALLOWING = {"hostdev": {"extendedResourcePrefixes": {PREFIX: True}}}
SERIAL = {
    "match": [{"subsystem": "tty", "paths": ["/dev/ttyUSB*"]}],
    "deviceClass": {"extendedResourceName": "lab.test/serial"},
}


def class_with(resource: str) -> dict[str, Any]:
    facts = PolicyFacts(
        name="a", uid="u", generation=1, class_name="a.test", extended_resource=resource
    )
    made = desired_class(facts, api_version="resource.k8s.io/v1")
    assert made is not None
    return made


@pytest.mark.parametrize("write", [pytest.param(each, id=each.name) for each in WRITES])
def test_the_operator_can_write_what_it_writes_and_nothing_else(render, write: Write):
    old, new = write.bodies("serial.test", policy="serial-1", uid="u")
    reason, message = AdmissionPolicy(render(ALLOWING), NAME).refusal(old, new)
    if write.sentence:
        assert write.sentence in message
        # The operator reports an invalid class in the status of the policy.
        assert reason == ("Invalid" if write.sentence == EXTENDED else "Forbidden")
    else:
        assert message == ""


def test_a_field_of_a_later_kubernetes_is_refused(render):
    old, new = Write(name="").bodies("serial.test", policy="serial", uid="u")
    assert old is None
    assert new is not None
    new["spec"]["later"] = {}
    assert AdmissionPolicy(render(), NAME).refusal(old, new) == ("Forbidden", OTHER_FIELDS)


def test_events_need_the_operator_as_reporter(render):
    policy = AdmissionPolicy(render(), EVENTS)
    ours, others = {"reportingController": CONTROLLER}, {"reportingController": "kubelet"}
    assert policy.refusal(None, ours) == policy.refusal(ours, ours) == ("", "")
    for old, new in ((None, others), (None, {}), (others, others), (others, ours), (ours, others)):
        reason, message = policy.refusal(old, new)
        assert reason == "Forbidden"
        assert f"reportingController '{CONTROLLER}'" in message


FIX = MaintenanceFacts(
    name="fix", uid="u", generation=1, selection=DeviceSelection(), devices=(DEVICE,)
)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param({}, "", id="as-the-operator-writes-it"),
        *(
            pytest.param(
                {"deviceSelector": DEVICE._replace(**{name: ""})._asdict()},
                "that name driver, pool and device",
                id=f"no-{name}",
            )
            for name in DEVICE._fields
        ),
        pytest.param({"deviceSelector": {}}, "that name driver, pool and device", id="empty"),
        pytest.param({"deviceSelector": None}, "that name driver, pool and device", id="none"),
        pytest.param({"taint": {"key": "a/b", "effect": "NoSchedule"}}, "only write", id="key"),
        pytest.param(
            {"taint": {"key": MAINTENANCE, "effect": "NoExecute"}}, "only write", id="eviction"
        ),
        pytest.param({"ownerReferences": None}, "must be the only owner", id="no-owner"),
        pytest.param(
            {"ownerReferences": [{"kind": "Pod", "apiVersion": "v1", "controller": True}]},
            *("must be the only owner",),
            id="another-owner",
        ),
    ],
)
def test_the_operator_can_write_rules_for_one_device_each(render, change, sentence):
    policy = AdmissionPolicy(render({"maintenance": {"enabled": True}}), RULES)
    rule = rule_of(FIX, DEVICE, api_version="resource.k8s.io/v1")
    for name, value in change.items():
        part = rule["metadata"] if name == "ownerReferences" else rule["spec"]
        part.pop(name) if value is None else part.update({name: value})
    reason, message = policy.refusal(None, rule)
    assert sentence in message
    assert (reason == "Forbidden") is bool(sentence)


@pytest.mark.parametrize(
    ("values", "owner", "is_allowed"),
    [
        pytest.param({"maintenance": {"enabled": True}}, FIX, True, id="maintenance"),
        pytest.param({"maintenance": {"enabled": True}}, OWNER, False, id="only-maintenance"),
        pytest.param(TAINTS, OWNER, True, id="drivers"),
        pytest.param(TAINTS, FIX, False, id="only-drivers"),
        pytest.param({"maintenance": {"enabled": True}} | TAINTS, OWNER, True, id="both"),
    ],
)
def test_each_switch_allows_the_rules_of_one_kind(render, values, owner, is_allowed):
    policy = AdmissionPolicy(render(values), RULES)
    rule = rule_of(owner, DEVICE, api_version="resource.k8s.io/v1")
    assert (policy.refusal(None, rule)[0] == "") == is_allowed
    assert (policy.refusal(rule, None)[0] == "") == is_allowed
    for each in rule["metadata"]["ownerReferences"]:
        each["kind"] = "DeviceDriver" if owner is FIX else "DeviceMaintenance"
    assert policy.refusal(None, rule)[0] == "Forbidden"


def test_the_operator_can_delete_its_own_rules_only(render):
    policy = AdmissionPolicy(render({"maintenance": {"enabled": True}}), RULES)
    rule = rule_of(FIX, DEVICE, api_version="resource.k8s.io/v1")
    assert policy.refusal(rule, None) == ("", "")
    rule["spec"]["taint"]["key"] = "example.com/broken"
    assert policy.refusal(rule, None)[0] == "Forbidden"


FINE = {"type": "Registered", "status": "True", "reason": "Registered"}
OUTDATED_ONE = {"type": "Registered", "status": "Unknown", "reason": OUTDATED}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        pytest.param([FINE], {"conditions": [OUTDATED_ONE], "claims": {}}, "", id="marked"),
        pytest.param([OUTDATED_ONE], {"conditions": [OUTDATED_ONE], "claims": {}}, "", id="again"),
        pytest.param([FINE], {"conditions": [FINE], "claims": {}}, "", id="as-it-was"),
        pytest.param(
            [OUTDATED_ONE],
            {"conditions": [FINE], "claims": {}},
            "only to the status Unknown with the reason Outdated",
            id="invented",
        ),
        *(
            pytest.param([FINE], new, "only the conditions of a NodeDeviceReport", id=name)
            for name, new in {
                "field-changed": {"conditions": [FINE], "claims": {"stuck": 1}},
                "field-added": {"conditions": [FINE], "claims": {}, "policies": []},
                "field-removed": {"conditions": [FINE]},
                "deleted": None,
            }.items()
        ),
    ],
)
def test_conditions_of_a_report_can_only_be_marked_as_outdated(render, old, new, sentence):
    policy = AdmissionPolicy(render(), REPORTS)
    before = {"status": {"conditions": old, "claims": {}}}
    reason, message = policy.refusal(before, None if new is None else {"status": new})
    assert sentence in message
    assert (reason == "Forbidden") is bool(sentence)
    assert policy.refusal(None, before)[0] == "Forbidden"


OWN = {"metadata": {"labels": {"app.kubernetes.io/managed-by": "drakit-operator"}}}


@pytest.mark.parametrize(
    ("driver", "is_allowed"),
    [
        pytest.param(OWN, True, id="created-by-the-operator"),
        pytest.param({**OWN, "spec": {}}, True, id="an-empty-specification"),
        pytest.param({**OWN, "spec": {"version": "1"}}, False, id="specified-by-an-admin"),
        pytest.param({"metadata": {}}, False, id="without-labels"),
        pytest.param({"metadata": {"labels": {"app": "x"}}}, False, id="of-a-chart"),
        pytest.param(
            {"metadata": {**OWN["metadata"], "finalizers": ["x/y"]}}, False, id="with-a-finalizer"
        ),
    ],
)
def test_the_operator_creates_and_deletes_drivers_that_nobody_specifies(render, driver, is_allowed):
    policy = AdmissionPolicy(render(), DRIVERS)
    for old, new in ((None, driver), (driver, None)):
        reason, message = policy.refusal(old, new)
        assert (reason == "") == is_allowed
        assert is_allowed or "only DeviceDrivers without a specification" in message


@pytest.mark.parametrize(
    ("hostdev", "resource", "allowed"),
    [
        pytest.param({}, "", True, id="no-resource"),
        pytest.param({}, "lab.test/serial", False, id="no-value"),
        pytest.param(
            {"policies": {"a": SERIAL}}, "lab.test/serial", True, id="policy-of-the-values"
        ),
        pytest.param(
            {"policies": {"a": SERIAL}}, "lab.test/serial2", False, id="longer-than-in-the-policy"
        ),
        pytest.param(
            {"policies": {"a": {**SERIAL, "enabled": False}}},
            *("lab.test/serial", False),
            id="policy-that-is-off",
        ),
        pytest.param(
            {"policies": {"a": SERIAL}, "deviceClasses": False},
            *("lab.test/serial", False),
            id="policy-without-a-class",
        ),
        pytest.param(
            {"extendedResourcePrefixes": {"lab.test/": True}}, "lab.test/serial", True, id="domain"
        ),
        pytest.param(
            {"extendedResourcePrefixes": {"lab.test/": True}},
            *("lab.test.evil/serial", False),
            id="domain-that-begins-alike",
        ),
        pytest.param(
            {"extendedResourcePrefixes": {"a.test/": True, "lab.test/ser": True}},
            *("lab.test/serial", True),
            id="one-of-two-prefixes",
        ),
        pytest.param(
            {"extendedResourcePrefixes": {"lab.test/": False}},
            *("lab.test/serial", False),
            id="prefix-that-is-off",
        ),
    ],
)
def test_extended_resources_need_a_prefix_or_a_policy_in_the_values(
    render, hostdev, resource, allowed
):
    reason, message = AdmissionPolicy(render({"hostdev": hostdev}), NAME).refusal(
        None, class_with(resource)
    )
    if allowed:
        assert message == ""
    else:
        assert (reason, message) == ("Invalid", f"the extended resource '{resource}' {EXTENDED}")


def test_the_values_of_the_page_about_migration_allow_its_resource(render):
    values = yaml.safe_load(listing("docs/admin/migrate.md", "prefixes.yaml"))
    net_tun = class_with("smarter-devices/net_tun")
    assert AdmissionPolicy(render(values), NAME).refusal(None, net_tun) == ("", "")


@pytest.mark.parametrize(
    "prefix", ["", "lab.test", "/", "Lab.test/", "lab.test/a/b", 'lab.test/"', "lab.test/*"]
)
def test_a_prefix_ends_the_domain(values, schema, prefix):
    def check(**prefixes: bool) -> None:
        hostdev = values["hostdev"] | {"extendedResourcePrefixes": prefixes}
        jsonschema.validate(values | {"hostdev": hostdev}, schema)

    check(**{"lab.test/": True, "smarter-devices/tun": True})
    with pytest.raises(jsonschema.ValidationError, match="does not match"):
        check(**{prefix: True})


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        pytest.param({"mode": "Users", "users": 4}, {"mode": "Users", "users": 2}, "from 4 to 2"),
        pytest.param({"mode": "Capacity", "users": 4}, {"mode": "Exclusive"}, "from 4 to 1"),
        pytest.param({"mode": "Users", "users": 2}, {"mode": "Users", "users": 4}, ""),
        pytest.param({"mode": "Exclusive"}, {"mode": "Exclusive"}, ""),
    ],
    ids=["fewer", "none", "more", "same"],
)
def test_fewer_users_cause_a_warning_and_no_refusal(render, old, new, warning):
    objects, name = render(), f"{NAME}-sharing"
    _, text = AdmissionPolicy(objects, name).refusal(
        {"spec": {"sharing": old}}, {"spec": {"sharing": new}}
    )
    assert bool(text) == bool(warning)
    assert warning in text
    binding = the(objects, "ValidatingAdmissionPolicyBinding", name)["spec"]
    assert binding["validationActions"] == ["Warn"]
    assert the(objects, "ValidatingAdmissionPolicy", name)["spec"]["failurePolicy"] == "Ignore"
