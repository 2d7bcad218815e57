"""The node plugin's settings: derived values, and invalid values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from drakit_nodeplugin.config import ConfigError, NodePluginConfig, load_config

A = {"driver": "a.b"}
V = {"resources": ["vendor.example/thing"]}


@pytest.fixture
def load(tmp_path):
    def load(values: dict[str, Any] | None = None, **overrides: Any) -> NodePluginConfig:
        file = tmp_path / "nodeplugin.yaml"
        file.write_text(yaml.safe_dump({"drivers": [{"driver": "hostdev"}]} | (values or {})))
        return load_config(file, **overrides)

    return load


@pytest.mark.parametrize(
    ("values", "socket"),
    [
        pytest.param({}, "/var/lib/kubelet/pod-resources/kubelet.sock", id="default"),
        pytest.param(
            {"kubeletRoot": "/data/kubelet"},
            "/data/kubelet/pod-resources/kubelet.sock",
            id="beside-the-kubelets-other-sockets",
        ),
        pytest.param(
            {"kubeletRoot": "/data/kubelet", "podResourcesSocket": "/run/kubelet.sock"},
            "/run/kubelet.sock",
            id="given",
        ),
    ],
)
def test_the_podresources_socket_follows_the_kubelets_root(load, values, socket):
    assert load(values).podresources == Path(socket)


def test_it_follows_the_command_line_too(load):
    config = load(kubeletRoot=Path("/data/kubelet"))
    assert config.podresources == Path("/data/kubelet/pod-resources/kubelet.sock")


REFUSED = {
    "grace-longer-than-without-confirmation": (
        {"staleClaims": {"gracePeriod": "2h"}},
        "staleClaims: unconfirmedGracePeriod must not be shorter than gracePeriod",
    ),
    "too-few-bytes": ({"opaqueParameters": {"maxBytes": 1000}}, "opaqueParameters.maxBytes"),
    "too-long-a-drain": ({"drainTimeout": "45s"}, "less than or equal to 44s"),
    "no-pause": ({"staleClaims": {"period": "0s"}}, "staleClaims.period"),
    "no-duration": ({"staleClaims": {"period": "1x"}}, "staleClaims.period"),
    "unknown-key": ({"staleClaims": {"grace": "1m"}}, "staleClaims.grace"),
    "read-only-below-writable": (
        {"backends": {"allowed": {"a": {**A, "mounts": {"/opt": "rw", "/opt/a/b": "ro"}}}}},
        "backends.allowed.a: mounts: /opt/a/b cannot be ro inside /opt, which is rw",
    ),
    "relative-device": (
        {"backends": {"allowed": {"a": {**A, "devices": ["/dev/a", "gpu"]}}}},
        r"backends.allowed.a.devices\[1\]: must be an absolute path",
    ),
    "no-driver": (
        {"backends": {"allowed": {"a": {"driver": "a_b"}}}},
        "backends.allowed.a.driver: must be a driver's name",
    ),
    "no-resource": (
        {"devicePlugins": {"plugins": {"a": {"resources": ["a.b"]}}}},
        r"devicePlugins.plugins.a.resources\[0\]: must be a resource's name",
    ),
    "one-driver-in-two-directories": (
        {"backends": {"allowed": {"a": A, "b": A}}},
        "backends.allowed: driver a.b is in the entries a and b",
    ),
    "one-resource-in-two-directories": (
        {
            "devicePlugins": {
                "plugins": {"a": {"resources": ["v/x", "v/y"]}, "b": {"resources": ["v/y"]}}
            }
        },
        "devicePlugins.plugins: resource v/y is in the entries a and b",
    ),
    "name-of-a-directory-that-is-too-long": (
        {"backends": {"allowed": {"a" * 21: A}}},
        "must be at most 20 lower-case letters, digits and dashes",
    ),
    "no-room-for-the-names-of-sockets": (
        {"backends": {"allowed": {"a": A}, "directory": f"/{'s' * 81}"}},
        "backends.directory: .* leaves fewer than 24 of the 107 bytes of a socket's path",
    ),
    "no-room-below-the-kubelets-root": (
        {"kubeletRoot": f"/{'s' * 60}", "devicePlugins": {"plugins": {"a" * 20: V}}},
        "devicePlugins.directory: .* leaves fewer than 24 of the 107 bytes",
    ),
    "relative-socket": (
        {"podResourcesSocket": "kubelet.sock"},
        "podResourcesSocket: must be an absolute path",
    ),
    "relative-state-file": (
        {"kubeletStateFile": "state"},
        "kubeletStateFile: must be an absolute path",
    ),
    **{
        name: (
            {"kubeletRoot": path},
            "kubeletRoot: must be an absolute path without '..', repeated slashes",
        )
        for name, path in {
            "trailing-slash": "/var/lib/kubelet/",
            "doubled-slash": "/var//lib/kubelet",
            "two-slashes-first": "//var/lib/kubelet",
            "path-that-goes-back": "/var/lib/../kubelet",
        }.items()
    },
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_a_setting_that_cannot_be_is_refused(load, values, message):
    with pytest.raises(ConfigError, match=message):
        load(values)


def backends(count: int) -> dict[str, Any]:
    allowed = {f"gpu-{number}": {"driver": f"gpu-{number}.test"} for number in range(count)}
    return {"backends": {"enabled": True, "allowed": allowed}}


def resources(count: int) -> dict[str, Any]:
    """Half of the resources in each of two entries."""
    names = [f"vendor.example/thing-{number}" for number in range(count)]
    plugins = {"a": {"resources": names[::2]}, "b": {"resources": names[1::2]}}
    return {"devicePlugins": {"enabled": True, "plugins": plugins}}


@pytest.mark.parametrize(
    ("values", "limit", "message"),
    [
        pytest.param(
            backends,
            64,
            "backends.allowed has 65 backends, and a node plugin serves at most 64; remove",
            id="backends",
        ),
        pytest.param(
            resources,
            256,
            "devicePlugins.plugins has 257 resources, and a node plugin serves at most 256; remove",
            id="resources",
        ),
    ],
)
def test_more_entries_than_a_node_can_serve_are_refused(load, values, limit, message):
    load(values(limit))
    with pytest.raises(ConfigError, match=message):
        load(values(limit + 1))
