"""Default values and their schema: what the drivers and daemons themselves accept, no more."""

from __future__ import annotations

import copy

import jsonschema
import pytest

from drakit_drivers.hostdev import HostDevicePolicySpec, HostDevicesConfig
from drakit_drivers.simulated import SimulatedConfig
from drakit_nodeplugin.config import DeviceHealthSettings, Devices, OpaqueParameters, StaleClaims


def test_the_defaults_satisfy_the_schema(values, schema):
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema)


def test_the_schema_requires_every_object_of_the_values(values, schema):
    objects = {key for key, value in values.items() if isinstance(value, dict)}
    assert set(schema["required"]) == objects


@pytest.mark.parametrize(
    "path",
    [
        *("", "image", "image.digest", "logging", "networkPolicy", "openShift", "openShift.scc"),
        *("metrics", "metrics.podMonitor", "metrics.prometheusRule", "metrics.dashboard"),
        *("hostdev", "hostdev.policies.kvm", "operator", "events", "simulated"),
        *(f"simulated.config{profile}" for profile in ("", ".gpu", ".nic", ".cpu")),
        *("nodeplugin", "nodeplugin.staleClaims", "nodeplugin.opaqueParameters"),
        *("nodeplugin.devices", "nodeplugin.devices.health"),
    ],
)
def test_an_unknown_key_is_refused(values, schema, path):
    changed = copy.deepcopy(values)
    place = changed
    for part in filter(None, path.split(".")):
        place = place[part]
    place["misspelt"] = "value"
    with pytest.raises(jsonschema.ValidationError, match="misspelt"):
        jsonschema.validate(changed, schema)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        pytest.param("nodeplugin", "kubeletRoot", "var/lib/kubelet", id="relative-kubelet-root"),
        pytest.param("nodeplugin", "cdiDirectory", "", id="no-cdi-directory"),
        pytest.param("nodeplugin", "kubeletRoot", "/var/lib/kubelet/", id="trailing-slash"),
        pytest.param("nodeplugin", "kubeletRoot", "/var//lib/kubelet", id="doubled-slash"),
        pytest.param("nodeplugin", "cdiDirectory", "/var/../cdi", id="directory-that-goes-back"),
        pytest.param("nodeplugin", "kubeletStateDirectory", "state", id="relative-state-directory"),
        pytest.param("nodeplugin", "staleClaims", {"period": 60}, id="period-without-unit"),
        pytest.param("nodeplugin", "opaqueParameters", {"maxBytes": 0}, id="no-parameters-at-all"),
        pytest.param("nodeplugin", "devices", {"startGracePeriod": 5}, id="grace-without-unit"),
        pytest.param("nodeplugin", "devices", {"startGracePeriod": "0s"}, id="no-grace-at-all"),
        pytest.param(
            *("nodeplugin", "devices", {"health": {"timeout": "0h0m0s"}}), id="no-time-for-health"
        ),
        pytest.param("nodeplugin", "volumes", [{"hostPath": {}}], id="volume-without-a-name"),
        pytest.param("nodeplugin", "volumeMounts", [{"name": "a"}], id="mount-without-a-path"),
        pytest.param(
            *("nodeplugin", "volumeMounts", [{"name": "a", "mountPath": "srv"}]),
            id="mount-at-a-relative-path",
        ),
        pytest.param("nodeplugin", "capabilities", ["SYS_ADMIN"], id="capabilities"),
        pytest.param("hostdev", "allowDisks", True, id="disks"),
        pytest.param("hostdev", "allowDangerous", "no", id="text-that-is-no-boolean"),
        pytest.param("image", "pullPolicy", "Sometimes", id="unknown-pull-policy"),
        pytest.param("image", "digest", {"nodeplugin": "sha256:12"}, id="short-digest"),
        pytest.param("image", "digest", {"operator": "1" * 64}, id="digest-without-algorithm"),
        pytest.param("networkPolicy", "metricsFrom", {}, id="peers-that-are-no-list"),
        pytest.param(
            *("networkPolicy", "egress", {"enabled": True, "apiServer": ["192.0.2.1/32"]}),
            id="addresses-without-ports",
        ),
        pytest.param(
            *("operator", "appArmorProfile", {"localhostProfile": "drakit"}),
            id="profile-without-a-type",
        ),
        pytest.param("operator", "hostUsers", "no", id="text-for-user-namespaces"),
        pytest.param("test", "deviceClass", "No Name", id="malformed-class"),
        pytest.param("openShift", "scc", {"nodeplugin": "No Name"}, id="malformed-scc"),
        pytest.param("hostdev", "rescanInterval", 10, id="duration-without-unit"),
        pytest.param("logging", "level", "LOUD", id="unknown-log-level"),
        pytest.param("events", "nameHolders", "none", id="unknown-holders"),
        pytest.param("operator", "replicas", -1, id="fewer-than-no-replicas"),
    ],
)
def test_a_value_that_cannot_be_is_refused(values, schema, section, key, value):
    changed = copy.deepcopy(values)
    changed[section][key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, schema)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("staleClaims", StaleClaims),
        ("opaqueParameters", OpaqueParameters),
        ("devices", Devices),
        ("devices.health", DeviceHealthSettings),
    ],
)
def test_settings_have_the_keys_and_defaults_of_the_node_plugin(values, schema, path, kind):
    given, known = values["nodeplugin"], schema["properties"]["nodeplugin"]
    for part in path.split("."):
        given, known = given[part], known["properties"][part]
    expected = {field.alias for field in kind.model_fields.values()}
    assert set(known["properties"]) == set(given) == expected
    assert kind.model_validate(given) == kind()


def test_policies_have_the_keys_that_hostdev_knows(schema):
    known = {field.alias for field in HostDevicePolicySpec.model_fields.values()}
    assert set(schema["definitions"]["policy"]["properties"]) == known | {"enabled"}


def test_simulated_has_the_keys_and_defaults_of_the_driver(values, schema):
    given, known = values["simulated"]["config"], schema["definitions"]["simulated"]["properties"]
    # Where commands lie is the chart's business.
    expected = {field.alias for field in SimulatedConfig.model_fields.values()} - {"controlFile"}
    assert set(known) == set(given) == expected
    for profile in ("gpu", "nic", "cpu"):
        kind = type(getattr(SimulatedConfig(), profile))
        expected = {field.alias for field in kind.model_fields.values()}
        assert set(known[profile]["properties"]) == set(given[profile]) == expected
    assert SimulatedConfig.model_validate(given) == SimulatedConfig()


def test_a_plain_install_publishes_nothing(values):
    assert not any(policy["enabled"] for policy in values["hostdev"]["policies"].values())


def test_predefined_policies_are_one_value_away(values):
    predefined = values["hostdev"]["policies"]
    specs = {
        name: {key: value for key, value in policy.items() if key != "enabled"}
        for name, policy in predefined.items()
    }
    config = HostDevicesConfig.model_validate({"policies": specs})
    assert set(config.policies) == {"kvm", "tun", "fuse"}
    # 112 devices are placed in a slice of devices without taints.
    assert sum(policy.sharing.users or 0 for policy in config.policies.values()) <= 112


def test_without_images_the_chart_names_the_value_and_the_remedy(refusal):
    told = refusal({})
    assert "image.repository is empty" in told
    assert "set image.repository to" in told
