"""The rendered chart: what the daemons read, what they may do, and what they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from drakit.layout import home_directory
from drakit_drivers.hostdev import HostDevicePolicySpec, HostDevicesConfig
from drakit_drivers.simulated import SimulatedConfig
from drakit_drivers.simulated.inventory import all_devices
from drakit_nodeplugin.config import load_config
from drakit_operator.config import read_config
from tests.unit.chart.reading import pod_spec, the, written

PROBES = ("startup", "liveness", "readiness")
READING = {"get", "list", "watch"}
SERIAL: dict[str, Any] = {"match": [{"subsystem": "tty", "paths": ["/dev/ttyUSB*"]}]}


def test_the_node_plugin_reads_its_configuration(render, tmp_path):
    objects = render(
        {
            "hostdev": {"policies": {"kvm": {"enabled": True}, "serial": SERIAL}},
            "nodeplugin": {"bootIDFile": "/run/boot_id", "kubeletRoot": "/data/kubelet"},
        }
    )
    config = load_config(written(objects, tmp_path, "nodeplugin"))
    assert str(config.kubelet_root) == "/data/kubelet"
    assert str(config.boot_id_file) == "/host/boot_id"
    (entry,) = config.drivers
    hostdev = HostDevicesConfig.model_validate(entry.config)
    assert not hostdev.policies
    specs = policies_of(objects)
    assert set(specs) == {"kvm", "serial"}
    assert HostDevicePolicySpec.model_validate(specs["kvm"]).sharing.users == 32
    mounts = pod_spec(objects, "DaemonSet", "drakit-nodeplugin")["containers"][0]["volumeMounts"]
    seen = {mount["mountPath"] for mount in mounts}
    used = {hostdev.dev_root, hostdev.udev_root, hostdev.mountinfo, config.boot_id_file}
    assert {str(path) for path in used} | {"/data/kubelet/plugins/drakit.dev"} <= seen


def test_further_drivers_stand_beside_hostdev(render, tmp_path):
    camera = {"driver": "camera:Camera", "config": {"model": "x"}}
    objects = render({"nodeplugin": {"drivers": [camera]}})
    config = load_config(written(objects, tmp_path, "nodeplugin"))
    assert [entry.driver for entry in config.drivers] == ["hostdev", "camera:Camera"]
    assert config.drivers[1].config == {"model": "x"}


def test_simulated_devices_stand_beside_those_of_the_host(render, tmp_path):
    simulated = {"enabled": True, "config": {"driverName": "fpga.test", "gpu": {"count": 5}}}
    objects = render({"simulated": simulated, "nodeplugin": {"kubeletRoot": "/data/kubelet"}})
    hostdev, entry = load_config(written(objects, tmp_path, "nodeplugin")).drivers
    assert (hostdev.driver, entry.driver) == ("hostdev", "simulated")
    config = SimulatedConfig.model_validate(entry.config)
    assert (config.driver_name, config.gpu.count, config.nic.count) == ("fpga.test", 5, 1)
    # A directory that the plugin makes, on a volume that it has.
    assert str(config.control) == "/data/kubelet/plugins/drakit.dev/drivers/fpga.test/control.json"


def test_without_a_word_nothing_is_simulated(render, tmp_path):
    objects = render()
    (entry,) = load_config(written(objects, tmp_path, "nodeplugin")).drivers
    assert entry.driver == "hostdev"
    assert not [body for body in objects if "simulated" in body["metadata"]["name"]]


def test_the_operator_reads_its_configuration(render, tmp_path):
    objects = render(
        {"operator": {"config": {"resyncPeriod": "10s", "election": {"leaseName": "l"}}}}
    )
    config = read_config(written(objects, tmp_path, "operator"))
    assert config.resync_period == 10
    assert config.election.lease_name == "l"


@pytest.mark.parametrize(
    ("component", "kind", "read"),
    [("nodeplugin", "DaemonSet", load_config), ("operator", "Deployment", read_config)],
)
def test_probes_and_metrics_have_ports_of_their_own(render, tmp_path, component, kind, read):
    objects = render()
    listen = read(written(objects, tmp_path, component)).listen
    served = {"probes": listen.probes, "metrics": listen.metrics}
    (container,) = pod_spec(objects, kind, f"drakit-{component}")["containers"]
    ports = {port["name"]: f":{port['containerPort']}" for port in container["ports"]}
    assert ports == served
    probed = {container[f"{name}Probe"]["httpGet"]["port"] for name in PROBES}
    assert probed == {"probes"}


@pytest.mark.parametrize("holders", ["namespace", "all"])
def test_one_value_sets_which_holders_events_name(render, tmp_path, holders):
    objects = render({"events": {"nameHolders": holders}})
    assert read_config(written(objects, tmp_path, "operator")).events.name_holders == holders
    assert load_config(written(objects, tmp_path, "nodeplugin")).events.name_holders == holders


def test_the_kubelets_directories_are_mounted_at_their_own_paths(render):
    objects = render({"nodeplugin": {"kubeletRoot": "/data/kubelet", "cdiDirectory": "/data/cdi"}})
    spec = pod_spec(objects, "DaemonSet", "drakit-nodeplugin")
    sources = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in spec["volumes"]}
    same = {
        mount["mountPath"]
        for mount in spec["containers"][0]["volumeMounts"]
        if sources[mount["name"]] == mount["mountPath"]
    }
    assert same == {
        "/data/kubelet/plugins/drakit.dev",
        "/data/kubelet/plugins_registry",
        "/data/kubelet/pod-resources",
        "/data/cdi",
    }


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, id="default"),
        pytest.param(
            {"backends": {"enabled": True}, "devicePlugins": {"enabled": True}},
            id="backends-and-device-plugins",
        ),
        pytest.param({"nodeplugin": {"kubeletRoot": "/data/kubelet"}}, id="other-root"),
    ],
)
def test_no_mount_contains_the_volumes_of_others(render, tmp_path, values):
    """CSI's global mounts are in the kubelet's plugins directory, pods' volumes in pods."""
    objects = render(values)
    config = load_config(written(objects, tmp_path, "nodeplugin"))
    volumes = pod_spec(objects, "DaemonSet", "drakit-nodeplugin")["volumes"]
    mounted = {Path(v["hostPath"]["path"]) for v in volumes if "hostPath" in v}
    for others in ("pods", "plugins/kubernetes.io/csi", "plugins/csi.example.com"):
        path = config.kubelet_root / others
        assert not [each for each in mounted if path.is_relative_to(each)]
    assert home_directory(config.kubelet_root) in mounted


def test_what_is_mounted_below_the_hosts_devices_is_read_only_as_well(render):
    """`readOnly` alone leaves /dev/shm and its like writable."""
    mounts = pod_spec(render(), "DaemonSet", "drakit-nodeplugin")["containers"][0]["volumeMounts"]
    (dev,) = [mount for mount in mounts if mount["name"] == "dev"]
    assert (dev["readOnly"], dev["recursiveReadOnly"]) == (True, "IfPossible")
    # The API rejects any other propagation together with recursiveReadOnly.
    assert dev.get("mountPropagation", "None") == "None"


def test_the_podresources_socket_is_in_a_directory_that_is_mounted(render, tmp_path):
    objects = render({"nodeplugin": {"kubeletRoot": "/data/kubelet"}})
    config = load_config(written(objects, tmp_path, "nodeplugin"))
    mounts = pod_spec(objects, "DaemonSet", "drakit-nodeplugin")["containers"][0]["volumeMounts"]
    (mount,) = [m for m in mounts if m["mountPath"] == str(config.podresources.parent)]
    assert mount["readOnly"] is True


def test_the_plugin_knows_its_own_pod(render):
    (container,) = pod_spec(render(), "DaemonSet", "drakit-nodeplugin")["containers"]
    fields = {
        variable["name"]: variable["valueFrom"]["fieldRef"]["fieldPath"]
        for variable in container["env"]
    }
    assert {name: fields[name] for name in ("POD_NAMESPACE", "POD_NAME")} == {
        "POD_NAMESPACE": "metadata.namespace",
        "POD_NAME": "metadata.name",
    }


def test_a_kubelet_without_podresources_does_not_keep_the_pod_from_starting(render):
    spec = pod_spec(render(), "DaemonSet", "drakit-nodeplugin")
    (volume,) = [v for v in spec["volumes"] if v["name"] == "pod-resources"]
    assert volume["hostPath"]["type"] == "DirectoryOrCreate"


def test_the_kubelets_state_is_mounted_only_where_the_values_set_it(render, tmp_path):
    values = {"nodeplugin": {"kubeletStateDirectory": "/data/kubelet"}}
    objects = render(values)
    spec = pod_spec(objects, "DaemonSet", "drakit-nodeplugin")
    (volume,) = [v for v in spec["volumes"] if v["name"] == "kubelet-state"]
    assert volume["hostPath"]["path"] == "/data/kubelet"
    (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "kubelet-state"]
    assert mount["readOnly"] is True
    assert mount["mountPropagation"] == "HostToContainer"
    config = load_config(written(objects, tmp_path, "nodeplugin"))
    assert str(config.kubelet_state_file) == f"{mount['mountPath']}/dra_manager_state"


def test_stale_claims_are_collected_when_the_values_enable_it(render, tmp_path):
    stale = {"gracePeriod": "5s", "period": "1s"}
    objects = render({"nodeplugin": {"staleClaims": stale}})
    config = load_config(written(objects, tmp_path, "nodeplugin")).stale_claims
    assert (config.period, config.grace_period, config.unconfirmed_grace_period) == (1, 5, 3600)


def test_the_values_limit_opaque_parameters(render, tmp_path):
    objects = render({"nodeplugin": {"opaqueParameters": {"maxValues": 9999999}}})
    config = load_config(written(objects, tmp_path, "nodeplugin")).opaque_parameters
    assert (config.max_bytes, config.max_values) == (131072, 9999999)


def test_what_becomes_of_devices_follows_the_values(render, tmp_path):
    devices = {"endpointStopGracePeriod": "20s", "health": {"recoveryPeriod": "3s"}}
    objects = render({"nodeplugin": {"devices": devices}})
    config = load_config(written(objects, tmp_path, "nodeplugin")).devices
    assert (config.endpoint_stop_grace_period, config.start_grace_period) == (20, 30)
    assert (config.health.recovery_period, config.health.timeout) == (3, 30)


def test_what_the_plugin_sees_of_the_host_beside_them_is_read_only(render):
    spec = pod_spec(render(), "DaemonSet", "drakit-nodeplugin")
    writable = {
        mount["mountPath"]
        for mount in spec["containers"][0]["volumeMounts"]
        if not mount.get("readOnly")
    }
    assert writable == {
        "/var/lib/kubelet/plugins/drakit.dev",
        "/var/lib/kubelet/plugins_registry",
        "/var/run/cdi",
    }


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("DaemonSet", "drakit-nodeplugin", id="nodeplugin"),
        pytest.param("Deployment", "drakit-operator", id="operator"),
    ],
)
def test_no_container_has_more_power_than_it_needs(render, kind, name):
    spec = pod_spec(render(), kind, name)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    context = container["securityContext"]
    assert not context.get("privileged")
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}


def test_the_operator_is_not_root(render):
    context = pod_spec(render(), "Deployment", "drakit-operator")["securityContext"]
    assert context["runAsNonRoot"] is True


def test_the_operator_changes_nothing_but_a_closed_list(render):
    rules = the(render(), "ClusterRole", "drakit-operator")["rules"]
    writes = [rule["resources"] for rule in rules if set(rule["verbs"]) - READING]
    assert writes == [["hostdevicepolicies/status"], ["deviceclasses"], ["events"]]


def test_the_operator_may_change_only_classes_that_a_policy_owns(render):
    policy = the(render(), "ValidatingAdmissionPolicy", "drakit-operator")["spec"]
    (rule,) = policy["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (
        ["deviceclasses"],
        ["CREATE", "UPDATE", "DELETE"],
    )
    binding = the(render(), "ValidatingAdmissionPolicyBinding", "drakit-operator")["spec"]
    assert (binding["policyName"], binding["validationActions"]) == ("drakit-operator", ["Deny"])


@pytest.mark.parametrize(
    ("config", "lease"),
    [
        pytest.param({}, "drakit-operator", id="default"),
        pytest.param({"election": {"leaseName": "other"}}, "other", id="named"),
        pytest.param({"election": {"retryPeriod": "2s"}}, "drakit-operator", id="other-key"),
    ],
)
def test_the_operator_may_change_no_lease_but_its_own(render, config, lease):
    rules = the(render({"operator": {"config": config}}), "Role", "drakit-operator")["rules"]
    anywhere = {verb for rule in rules if "resourceNames" not in rule for verb in rule["verbs"]}
    assert anywhere == {"create"}  # RBAC cannot hold a creation to a name
    named = {(*rule["resourceNames"], *rule["verbs"]) for rule in rules if "resourceNames" in rule}
    assert named == {(lease, "get", "update")}


def test_a_plain_install_has_hostdev_without_policies_and_no_class(render, tmp_path):
    objects = render()
    (entry,) = load_config(written(objects, tmp_path, "nodeplugin")).drivers
    assert HostDevicesConfig.model_validate(entry.config).policies == {}
    assert not [body for body in objects if body["kind"] == "DeviceClass"]


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        pytest.param({}, False, id="default"),
        pytest.param({"allowDangerous": True}, True, id="allowed"),
        pytest.param({"allowDangerous": False}, False, id="refused"),
    ],
)
def test_the_values_decide_whether_policies_can_publish_dangerous_devices(
    render, tmp_path, values, allowed
):
    wants = {"match": [{"subsystem": "mem"}], "allow": {"dangerous": True}}
    objects = render({"hostdev": {**values, "policies": {"mem": wants}}})
    (entry,) = load_config(written(objects, tmp_path, "nodeplugin")).drivers
    assert HostDevicesConfig.model_validate(entry.config).allow_dangerous is allowed
    # The node decides: the object is the same.
    assert policies_of(objects)["mem"]["allow"] == {"dangerous": True}


def test_the_operator_makes_the_classes_of_policies_and_the_chart_none(render):
    overrides = {"policies": {"serial": SERIAL, "tun": {"enabled": True}}}
    objects = render({"hostdev": overrides})
    assert not [body for body in objects if body["kind"] == "DeviceClass"]
    assert set(policies_of(objects)) == {"serial", "tun"}
    assert not any("deviceClass" in spec for spec in policies_of(objects).values())


def test_the_policies_of_the_values_can_have_no_classes(render):
    named = SERIAL | {"deviceClass": {"extendedResourceName": "example.com/serial"}}
    objects = render({"hostdev": {"deviceClasses": False, "policies": {"serial": named}}})
    assert policies_of(objects)["serial"]["deviceClass"] == {
        "create": False,
        "extendedResourceName": "example.com/serial",
    }


def policies_of(objects):
    return yaml.safe_load(the(objects, "ConfigMap", "drakit-setup")["data"]["policies.yaml"])


def test_each_kind_of_simulated_device_has_its_class(render):
    simulated = {"enabled": True, "config": {"driverName": "fpga.test"}}
    classes = {
        body["metadata"]["name"]: body["spec"]["selectors"][0]["cel"]["expression"]
        for body in render({"hostdev": {"enabled": False}, "simulated": simulated})
        if body["kind"] == "DeviceClass"
    }
    assert classes == {
        f"{kind}.fpga.test": (
            f'device.driver == "fpga.test" && device.attributes["fpga.test"].type == "{kind}"'
        )
        for kind in ("gpu", "partition", "nic", "cpu")
    }
    types = {device.attributes["type"] for device in all_devices(SimulatedConfig()).devices}
    assert {name.partition(".")[0] for name in classes} == types


@pytest.mark.parametrize(
    ("served", "version"),
    [
        pytest.param([], "v1", id="helm-knows-no-cluster"),
        pytest.param(["v1beta1"], "v1beta1", id="only-v1beta1"),
        pytest.param(["v1beta2", "v1beta1"], "v1beta2", id="no-v1"),
        pytest.param(["v1beta1", "v1", "v1beta2"], "v1", id="all"),
    ],
)
def test_classes_have_the_newest_version_that_the_cluster_serves(render, served, version):
    values = {
        "hostdev": {"policies": {"serial": SERIAL}},
        "simulated": {"enabled": True},
        "devicePlugins": {
            "enabled": True,
            "plugins": {"things": {"resources": ["vendor.example/thing"]}},
        },
    }
    api_versions = [f"resource.k8s.io/{each}/DeviceClass" for each in served]
    objects = render(values, api_versions=api_versions)
    found = {body["apiVersion"] for body in objects if body["kind"] == "DeviceClass"}
    assert found == {f"resource.k8s.io/{version}"}


def test_what_is_not_simulated_has_no_class(render):
    config = {"gpu": {"partitions": []}, "nic": {"count": 0}}
    objects = render({"simulated": {"enabled": True, "config": config}})
    names = {body["metadata"]["name"] for body in objects if body["kind"] == "DeviceClass"}
    assert {name for name in names if ".simulated." in name} == {
        "gpu.simulated.drakit.dev",
        "cpu.simulated.drakit.dev",
    }


def test_classes_can_be_left_to_the_admin(render):
    simulated = {"enabled": True, "deviceClasses": False}
    hostdev = {"deviceClasses": False, "policies": {"serial": SERIAL}}
    objects = render({"hostdev": hostdev, "simulated": simulated})
    assert not [body for body in objects if body["kind"] == "DeviceClass"]


def test_without_hostdev_the_host_is_not_mounted(render):
    objects = render({"hostdev": {"enabled": False}, "nodeplugin": {"drivers": [{"driver": "x"}]}})
    spec = pod_spec(objects, "DaemonSet", "drakit-nodeplugin")
    assert {volume["name"] for volume in spec["volumes"]} == {
        "config",
        "token",
        "drakit",
        "registry",
        "cdi",
        "pod-resources",
    }


def test_new_configuration_replaces_the_pods(render):
    def checksum(overrides: dict[str, Any]) -> str:
        template = the(render(overrides), "DaemonSet", "drakit-nodeplugin")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({"operator": {"replicas": 2}})
    assert checksum({}) != checksum({"hostdev": {"rescanInterval": "20s"}})


def test_every_rendered_document_has_our_labels(render):
    for body in render():
        assert body["metadata"]["labels"]["app.kubernetes.io/name"] == "drakit", yaml.dump(body)


def test_a_driver_gets_what_it_needs_of_the_host_besides(render):
    plain = pod_spec(render(), "DaemonSet", "drakit-nodeplugin")
    volume = {"name": "lamps", "hostPath": {"path": "/srv/lamps", "type": "Directory"}}
    mount = {"name": "lamps", "mountPath": "/srv/lamps", "readOnly": True}
    more = {"volumes": [volume], "volumeMounts": [mount]}
    spec = pod_spec(render({"nodeplugin": more}), "DaemonSet", "drakit-nodeplugin")
    (container,), (before,) = spec["containers"], plain["containers"]
    assert spec["volumes"] == [*plain["volumes"], volume]
    assert container["volumeMounts"] == [*before["volumeMounts"], mount]
    assert container["securityContext"] == before["securityContext"]


def test_a_release_can_keep_the_names_that_were_fixed_once(render):
    names = {(body["kind"], body["metadata"]["name"]) for body in render(release="drakit")}
    kept = render({"fullnameOverride": "drakit"}, release="prod")
    assert {(body["kind"], body["metadata"]["name"]) for body in kept} == names
