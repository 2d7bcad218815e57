"""The rendered chart: what the daemons read, what they may do, and what they are given."""

from __future__ import annotations

from operator import attrgetter
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
from e2e.closed_list import Write, documented
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
    used = {hostdev.dev_root, hostdev.udev_root / "data", hostdev.mountinfo, config.boot_id_file}
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
    # A probe before the process listens is a Warning at each start.
    assert container["startupProbe"]["initialDelaySeconds"] == 2


@pytest.mark.parametrize("holders", ["namespace", "all"])
def test_one_value_sets_which_holders_events_name(render, tmp_path, holders):
    own = {"operator": {"config": {"resyncPeriod": "10s"}}}
    objects = render({"events": {"nameHolders": holders}, **own})
    operator = read_config(written(objects, tmp_path, "operator"))
    assert (operator.events.name_holders, operator.resync_period) == (holders, 10)
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
    """`readOnly` by itself leaves nested mounts such as /dev/shm writable."""
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


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        pytest.param(
            {"staleClaims": {"gracePeriod": "5s", "period": "1s"}},
            "stale_claims",
            {"period": 1, "grace_period": 5, "unconfirmed_grace_period": 3600},
            id="stale-claims",
        ),
        pytest.param(
            {"opaqueParameters": {"maxValues": 9999999}},
            "opaque_parameters",
            {"max_bytes": 131072, "max_values": 9999999},
            id="opaque-parameters",
        ),
        pytest.param(
            {"devices": {"endpointStopGracePeriod": "20s"}},
            "devices",
            {"endpoint_stop_grace_period": 20, "start_grace_period": 30},
            id="devices",
        ),
        pytest.param(
            {"devices": {"health": {"recoveryPeriod": "3s"}}},
            "devices.health",
            {"recovery_period": 3, "timeout": 30},
            id="health-of-devices",
        ),
    ],
)
def test_values_replace_the_defaults_one_by_one(render, tmp_path, values, path, expected):
    config = load_config(written(render({"nodeplugin": values}), tmp_path, "nodeplugin"))
    found = attrgetter(path)(config)
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize("hostdev", [False, True])
@pytest.mark.parametrize("maintenance", [False, True])
@pytest.mark.parametrize("taints", [False, True])
def test_the_operator_may_write_what_its_page_lists(render, hostdev, maintenance, taints):
    objects = render(
        {
            "hostdev": {"enabled": hostdev},
            "simulated": {"enabled": True},
            "maintenance": {"enabled": maintenance},
            "operator": {"driverTaints": {"enabled": taints}},
        }
    )
    switches = {
        "hostdev.enabled": hostdev,
        "maintenance.enabled": maintenance,
        "operator.driverTaints.enabled": taints,
    }
    enabled = {name for name, is_on in switches.items() if is_on}
    roles = [the(objects, kind, "drakit-operator") for kind in ("ClusterRole", "Role")]
    assert {
        Write(verb, resource)
        for rule in (rule for role in roles for rule in role["rules"])
        for resource in rule.get("resources", ())
        for verb in set(rule["verbs"]) - READING
    } == {write for write, values in documented().items() if not values or values & enabled}


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
    assert entry.driver == "hostdev"
    assert HostDevicesConfig.model_validate(entry.config).policies == {}
    assert not [body for body in objects if body["kind"] == "DeviceClass"]


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        pytest.param({}, False, id="default"),
        pytest.param({"allowDangerous": True}, True, id="allowed"),
    ],
)
def test_the_values_decide_whether_policies_can_publish_dangerous_devices(
    render, tmp_path, values, allowed
):
    wants = {"match": [{"subsystem": "mem"}], "allow": {"dangerous": "Always"}}
    objects = render({"hostdev": {**values, "policies": {"mem": wants}}})
    (entry,) = load_config(written(objects, tmp_path, "nodeplugin")).drivers
    assert HostDevicesConfig.model_validate(entry.config).allow_dangerous is allowed
    # The node decides: the object is the same.
    assert policies_of(objects)["mem"]["allow"] == {"dangerous": "Always"}


def test_the_operator_makes_the_classes_of_policies_and_the_chart_none(render):
    overrides = {"policies": {"serial": SERIAL, "tun": {"enabled": True}}}
    objects = render({"hostdev": overrides})
    assert not [body for body in objects if body["kind"] == "DeviceClass"]
    assert set(policies_of(objects)) == {"serial", "tun"}
    assert not any("deviceClass" in spec for spec in policies_of(objects).values())


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
            f'device.driver == "fpga.test" && '
            f'"type" in device.attributes["fpga.test"] && '
            f'device.attributes["fpga.test"].type == "{kind}"'
        )
        for kind in ("gpu", "partition", "nic", "cpu")
    }
    types = {device.attributes["type"] for device in all_devices(SimulatedConfig()).devices}
    assert {name.partition(".")[0] for name in classes} == types
    config = {"gpu": {"partitions": []}, "nic": {"count": 0}}
    objects = render({"simulated": {"enabled": True, "config": config}})
    names = {body["metadata"]["name"] for body in objects if body["kind"] == "DeviceClass"}
    assert names == {"gpu.simulated.drakit.dev", "cpu.simulated.drakit.dev"}


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


def test_classes_can_be_left_to_the_admin(render):
    simulated = {"enabled": True, "deviceClasses": False}
    named = SERIAL | {"deviceClass": {"extendedResourceName": "example.com/serial"}}
    hostdev = {"deviceClasses": False, "policies": {"serial": named}}
    objects = render({"hostdev": hostdev, "simulated": simulated})
    assert not [body for body in objects if body["kind"] == "DeviceClass"]
    assert policies_of(objects)["serial"]["deviceClass"] == {
        "create": "Never",
        "extendedResourceName": "example.com/serial",
    }


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
