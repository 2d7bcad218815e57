"""The chart renders backends and device plugins: configuration, directories, classes."""

from __future__ import annotations

from typing import Any

import jsonschema
import pydantic
import pytest

from drakit_nodeplugin.allowed import AllowedBackend, AllowedPlugin
from drakit_nodeplugin.config import Backends, DevicePlugins, load_config
from drakit_nodeplugin.endpoints.host_paths import MOUNTED
from tests.unit.chart.reading import pod_spec, written

HOME = "/var/lib/kubelet/plugins/drakit.dev"
ALONE: dict[str, Any] = {"hostdev": {"enabled": False}, "operator": {"enabled": False}}
NAMES: dict[str, dict[str, Any]] = {
    "backends": {"driver": "gpu.example.com"},
    "devicePlugins": {"resources": ["vendor.example/thing"]},
}
"""The required key of an entry."""

ENTRIES = {"backends": "allowed", "devicePlugins": "plugins"}
"""The key of the entries."""


def classes(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        body["metadata"]["name"]: body["spec"] for body in objects if body["kind"] == "DeviceClass"
    }


def writable(objects: list[dict[str, Any]]) -> set[str]:
    """The directories of the host that the plugin can write to, keyed by their paths there."""
    spec = pod_spec(objects, "DaemonSet", "drakit-nodeplugin")
    mounts = {m["name"]: m for m in spec["containers"][0]["volumeMounts"]}
    found = {
        volume["hostPath"]["path"]: mounts[volume["name"]]
        for volume in spec["volumes"]
        if "hostPath" in volume and not mounts[volume["name"]].get("readOnly")
    }
    assert all(mount["mountPath"] == path for path, mount in found.items())
    return set(found)


@pytest.mark.parametrize("kind", ["backends", "devicePlugins"])
def test_the_keys_and_defaults_are_those_of_the_node_plugin(values, schema, kind):
    settings = {"backends": Backends, "devicePlugins": DevicePlugins}[kind]
    known = {field.alias for field in settings.model_fields.values()}
    # Classes are the chart's business.
    assert set(values[kind]) - {"extendedResources"} == known
    assert set(values[kind]) == set(schema["properties"][kind]["properties"])
    given = {key: values[kind][key] for key in known if values[kind][key] != ""}
    assert settings.model_validate(given) == settings()


@pytest.mark.parametrize("kind", ["backends", "devicePlugins"])
def test_either_of_them_alone_is_something_to_run(render, tmp_path, kind):
    objects = render({**ALONE, kind: {"enabled": True}})
    config = load_config(written(objects, tmp_path, "nodeplugin"))
    assert config.drivers == ()
    enabled = (config.backends.enabled, config.device_plugins.enabled)
    assert enabled == (kind == "backends", kind == "devicePlugins")
    assert config.backends.allowed == config.device_plugins.plugins == {}


def test_the_default_directories_are_those_that_the_plugin_would_take(render, tmp_path):
    objects = render(
        {
            "backends": {"enabled": True},
            "devicePlugins": {"enabled": True},
            "nodeplugin": {"kubeletRoot": "/data/kubelet"},
        }
    )
    config = load_config(written(objects, tmp_path, "nodeplugin"))
    bare = config.model_copy(update={"backends": Backends(), "device_plugins": DevicePlugins()})
    assert config.backends_directory == bare.backends_directory
    assert config.device_plugins_directory == bare.device_plugins_directory
    assert writable(objects) == writable(render({"nodeplugin": {"kubeletRoot": "/data/kubelet"}}))


def test_other_directories_are_mounted_at_their_own_paths(render, tmp_path):
    objects = render(
        {
            "backends": {"enabled": True, "directory": "/srv/backends"},
            "devicePlugins": {"enabled": True, "directory": "/srv/plugins", "driverName": "dp.x"},
        }
    )
    config = load_config(written(objects, tmp_path, "nodeplugin"))
    assert str(config.backends_directory) == "/srv/backends"
    assert str(config.device_plugins_directory) == "/srv/plugins"
    assert config.device_plugins.driver_name == "dp.x"
    assert writable(objects) - writable(render()) == {"/srv/backends", "/srv/plugins"}


FULL_ENTRY: dict[str, Any] = {
    "owner": {"uid": 1000, "gid": 1000},
    "devices": ["/dev/gpu[0-9]*", "/dev/gpus/*"],
    "mounts": {"/opt/gpu": "ro", "/run/gpu": "rw"},
    "hooks": ["/usr/bin/gpu-hook"],
    "netDevices": ["gpu*"],
    "additionalGids": [44],
    "intelRdt": True,
    "cdiDevices": ["gpu.example.com/card", "gpu.example.com/link=port*"],
    "env": ["GPU", "NVIDIA_*"],
}


@pytest.mark.parametrize("kind", ["backends", "devicePlugins"])
@pytest.mark.parametrize("rights", [{}, FULL_ENTRY], ids=["no-rights", "all-rights"])
def test_entries_reach_the_node_plugin(render, tmp_path, kind, rights):
    if rights and kind == "backends":
        resource = {"group": "gpu.example.com", "version": "v1", "plural": "gpupolicies"}
        rights = {**rights, "policies": resource}
    model = {"backends": AllowedBackend, "devicePlugins": AllowedPlugin}[kind]
    entry = {**NAMES[kind], **rights}
    objects = render({**ALONE, kind: {"enabled": True, ENTRIES[kind]: {"gpu": entry}}})
    config = load_config(written(objects, tmp_path, "nodeplugin"))
    found = config.backends.allowed if kind == "backends" else config.device_plugins.plugins
    assert found == {"gpu": model.model_validate(entry)}
    if rights:
        assert {*entry} == {field.alias for field in model.model_fields.values()}


@pytest.mark.parametrize("kind", ["backends", "devicePlugins"])
def test_device_nodes_are_compared_with_those_of_the_host(render, kind):
    objects = render({**ALONE, kind: {"enabled": True}})
    spec = pod_spec(objects, "DaemonSet", "drakit-nodeplugin")
    mounts = spec["containers"][0]["volumeMounts"]
    seen = {m["mountPath"] for m in mounts if m["mountPath"].startswith("/host/")}
    assert seen == {str(MOUNTED)}


def test_what_is_not_enabled_leaves_nothing_behind(render, tmp_path):
    objects = render(
        {
            "backends": {"directory": "/srv/backends"},
            "devicePlugins": {
                "directory": "/srv/plugins",
                "plugins": {"things": {"resources": ["vendor.example/a"]}},
            },
        }
    )
    assert writable(objects) == writable(render())
    assert classes(objects).keys() == classes(render()).keys()
    config = load_config(written(objects, tmp_path, "nodeplugin"))
    assert not config.backends.enabled
    assert not config.device_plugins.enabled


def test_each_resource_has_a_class(render, tmp_path):
    entries = {
        "things": {"resources": ["vendor.example/thing", "vendor.example/mig-1g.5GB_x2"]},
        "fpga": {"resources": [{"name": "other.example/fpga", "deviceClass": "fpga"}]},
    }
    plugins = {"enabled": True, "driverName": "dp.x", "plugins": entries}
    objects = render({**ALONE, "devicePlugins": plugins})
    config = load_config(written(objects, tmp_path, "nodeplugin"))
    assert {name: each.resources for name, each in config.device_plugins.plugins.items()} == {
        "things": ("vendor.example/thing", "vendor.example/mig-1g.5GB_x2"),
        "fpga": ("other.example/fpga",),
    }
    found = classes(objects)
    assert {name: spec["extendedResourceName"] for name, spec in found.items()} == {
        "thing.vendor.example": "vendor.example/thing",
        "mig-1g-5gb-x2.vendor.example": "vendor.example/mig-1g.5GB_x2",
        "fpga": "other.example/fpga",
    }
    (selector,) = found["fpga"]["selectors"]
    assert selector["cel"]["expression"] == (
        'device.driver == "dp.x" && '
        '"resource" in device.attributes["dp.x"] && '
        'device.attributes["dp.x"].resource == "other.example/fpga"'
    )


def test_classes_can_be_for_claims_alone(render):
    entries = {"a": {"resources": ["vendor.example/a"]}}
    plugins = {"enabled": True, "plugins": entries, "extendedResources": False}
    (spec,) = classes(render({**ALONE, "devicePlugins": plugins})).values()
    assert "extendedResourceName" not in spec


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param({}, "nothing to run", id="nothing-to-run"),
        pytest.param(
            {"devicePlugins": {"enabled": True, "directory": "/var/lib/kubelet/device-plugins"}},
            "is the kubelet's own",
            id="the-kubelets-own-directory",
        ),
        pytest.param(
            {
                "backends": {"enabled": True, "directory": "/srv/one"},
                "devicePlugins": {"enabled": True, "directory": "/srv/one"},
            },
            "set them to different directories",
            id="one-directory-for-both",
        ),
        pytest.param(
            {
                "backends": {
                    "enabled": True,
                    "allowed": {name: {"driver": "gpu.example.com"} for name in ("a", "b")},
                }
            },
            "two entries have the driver gpu.example.com",
            id="one-driver-in-two-directories",
        ),
        pytest.param(
            {
                "devicePlugins": {
                    "enabled": True,
                    "plugins": {
                        name: {"resources": [f"vendor.example/{name}", "vendor.example/thing"]}
                        for name in ("a", "b")
                    },
                }
            },
            "two entries have the resource vendor.example/thing",
            id="one-resource-in-two-directories",
        ),
        pytest.param(
            {
                "devicePlugins": {
                    "enabled": True,
                    "plugins": {
                        name: {"resources": [f"vendor.example/{name}{n}" for n in range(129)]}
                        for name in ("a", "b")
                    },
                }
            },
            "devicePlugins.plugins has 258 resources, and a node plugin serves at most 256",
            id="too-many-resources",
        ),
        *(
            pytest.param(
                {kind: {"enabled": True, "directory": directory}},
                f"{kind}.directory cannot be {directory}",
                id=f"{kind}-{name}",
            )
            for kind, name, directory in (
                ("backends", "in-the-home", HOME),
                ("devicePlugins", "in-the-data-of-a-driver", f"{HOME}/drivers/gpu.example.com"),
                ("backends", "among-the-cdi-files", "/var/run/cdi"),
                ("devicePlugins", "among-the-cdi-files", "/var/run/cdi"),
            )
        ),
    ],
)
def test_what_cannot_work_is_refused(refusal, changes, told):
    image = {"repository": "registry.example.com/drakit"}
    assert told in refusal({**ALONE, "image": image, **changes})


BAD_RIGHTS: dict[str, Any] = {
    name: {"gpu": {"driver": "gpu.example.com", **entry}}
    for name, entry in {
        "unknown-key": {"device": []},
        "owner-by-name": {"owner": {"uid": "root"}},
        "device-outside-dev": {"devices": ["/opt/gpu0"]},
        "relative-device": {"devices": ["gpu0"]},
        "device-that-goes-back": {"devices": ["/dev/../opt/gpu0"]},
        "wildcard-for-directories": {"devices": ["/dev/**"]},
        "mounts-as-a-list": {"mounts": ["/opt"]},
        "mount-without-access": {"mounts": {"/opt": "r"}},
        "relative-mount": {"mounts": {"opt": "ro"}},
        "mount-that-goes-back": {"mounts": {"/opt/..": "ro"}},
        "mount-with-a-slash": {"mounts": {"/opt/": "ro"}},
        "relative-hook": {"hooks": ["gpu-hook"]},
        "no-cdi-kind": {"cdiDevices": ["card"]},
        "devices-of-claims": {"cdiDevices": ["gpu.example.com/claim"]},
        "devices-of-claims-by-name": {"cdiDevices": ["tpu.example.com/claim=*"]},
        "every-variable": {"env": ["*"]},
        "variable-with-a-value": {"env": ["A=b"]},
        "wildcard-within-a-variable": {"env": ["A*B"]},
        "resources-of-a-backend": {"resources": ["vendor.example/thing"]},
        "no-driver": {"driver": "Gpu"},
    }.items()
}
BAD_LISTS: dict[str, Any] = {
    **BAD_RIGHTS,
    "null": None,
    "no-entry": {"gpu": None},
    "entry-without-a-driver": {"gpu": {}},
    "name-of-a-driver": {"gpu.example.com": {"driver": "gpu.example.com"}},
    "name-in-capitals": {"GPU": {"driver": "gpu.example.com"}},
    "name-that-goes-back": {"..": {"driver": "gpu.example.com"}},
    "name-that-is-too-long": {"g" * 21: {"driver": "gpu.example.com"}},
}
"""Lists that neither the chart nor the node plugin accepts."""


@pytest.mark.parametrize("allowed", BAD_LISTS.values(), ids=BAD_LISTS)
def test_the_node_plugin_refuses_lists_as_the_chart_does(allowed):
    with pytest.raises(pydantic.ValidationError):
        Backends.model_validate({"allowed": allowed})


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param("backends", {"misspelt": 1}, id="unknown-key-of-backends"),
        pytest.param("devicePlugins", {"misspelt": 1}, id="unknown-key-of-device-plugins"),
        pytest.param("backends", {"directory": "backends"}, id="relative-directory"),
        pytest.param("backends", {"directory": "/srv/../backends"}, id="directory-that-goes-back"),
        pytest.param("backends", {"directory": "/srv/backends/"}, id="directory-with-a-slash"),
        pytest.param("backends", {"directory": "/" + "s" * 61}, id="no-room-for-a-sockets-name"),
        pytest.param("devicePlugins", {"driverName": "Drakit"}, id="name-that-is-no-drivers"),
        *(
            pytest.param("devicePlugins", {"plugins": {"things": entry}}, id=name)
            for name, entry in {
                "no-resources": {},
                "an-empty-list-of-resources": {"resources": []},
                "resource-without-a-domain": {"resources": ["thing"]},
                "resource-that-no-attribute-can-hold": {
                    "resources": [f"vendor.example/{'t' * 50}"]
                },
                "resource-without-a-class": {"resources": [{"name": "vendor.example/thing"}]},
                "driver-of-a-device-plugin": {
                    "resources": ["vendor.example/thing"],
                    "driver": "gpu.example.com",
                },
            }.items()
        ),
        *(
            pytest.param("backends", {"allowed": allowed}, id=f"backends-{name}")
            for name, allowed in BAD_LISTS.items()
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused(values, schema, kind, changes):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, kind: {**values[kind], **changes}}, schema)
