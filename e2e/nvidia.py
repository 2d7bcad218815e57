"""
NVIDIA's device plugin in a cluster without NVIDIA's hardware: its own manifest, configured for a
Tegra.

On a Tegra, the plugin needs no library for its single device. The plugin detects a Tegra by a
certain file. The plugin's time slicing creates several IDs for the device.
"""

from __future__ import annotations

from typing import Any

import yaml

from e2e.images import nvidia

__all__ = ("GPU", "GPU_CLASS", "GPU_IDS", "NVIDIA_SET", "UUID", "nvidia_objects")

GPU, GPU_CLASS = "nvidia.com/gpu", "gpu.nvidia.com"
NVIDIA_SET = "nvidia-device-plugin-daemonset"
"""The DaemonSet's name in the manifest."""

UUID = "tegra"
"""The value of the variables that the plugin sets in a container, for any of the device's IDs."""

GPU_IDS = frozenset(f"{UUID}::{replica}" for replica in range(4))
"""IDs that truncation cannot turn into DNS labels."""

KUBELETS = "/var/lib/kubelet/device-plugins"
CONFIGURATION = "nvidia-device-plugin"
TEGRAS_FILE = "nv_tegra_release"

SHARING = {
    "version": "v1",
    "sharing": {
        "timeSlicing": {
            # Two replicas provide no more of a GPU than one, so the plugin rejects such a call.
            "failRequestsGreaterThanOne": True,
            "resources": [{"name": GPU, "replicas": len(GPU_IDS)}],
        }
    },
}


def nvidia_objects(*, namespace: str, directory: str) -> list[dict[str, Any]]:
    """
    Return the plugin's configuration and its DaemonSet.

    :param directory: the path on the host that the plugin sees as the kubelet's directory.
    """
    return [_configuration(namespace), _daemon_set(namespace, directory)]


def _configuration(namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": CONFIGURATION, "namespace": namespace},
        "data": {"config.yaml": yaml.safe_dump(SHARING), TEGRAS_FILE: "# R32 (release)\n"},
    }


def _daemon_set(namespace: str, directory: str) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load(nvidia.nvidia_manifest())
    assert body["metadata"]["name"] == NVIDIA_SET
    body["metadata"]["namespace"] = namespace
    spec = body["spec"]["template"]["spec"]
    (volume,) = spec["volumes"]
    assert volume["hostPath"] == {"path": KUBELETS}
    volume["hostPath"] = {"path": directory, "type": "DirectoryOrCreate"}
    spec["volumes"].append({"name": "told", "configMap": {"name": CONFIGURATION}})
    (container,) = spec["containers"]
    container |= {"image": nvidia.IMAGE, "imagePullPolicy": "Never"}
    container["env"].append({"name": "CONFIG_FILE", "value": "/told/config.yaml"})
    etc = f"/etc/{TEGRAS_FILE}"
    container["volumeMounts"] += [
        {"name": "told", "mountPath": "/told"},
        {"name": "told", "mountPath": etc, "subPath": TEGRAS_FILE},
    ]
    return body
