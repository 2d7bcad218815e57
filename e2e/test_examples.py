"""
The example drivers that open their hardware, each in a separate container on real kubelets.

examples/sensor reads virtual consoles: the device node of a pseudo-terminal works only in /dev/pts,
so no runtime can create it for a container. examples/nvidia has a fake NVML, and a CDI file with
the names of NVIDIA's toolkit. Charts, pods, values and drivers are those of the examples. Only the
names of images and the hardware differ.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.api import Cluster
from e2e.images.build import TAG
from e2e.images.vendor import driver_image
from e2e.kit import TEST_IMAGE, plugin_pod, slices, taints, wait_for
from e2e.release import Release, install, uninstall

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.feature("vendors")]

ROOT = Path(__file__).parents[1]
EXAMPLE, NVIDIA = ROOT / "examples" / "sensor", ROOT / "examples" / "nvidia"
FAKE_NVML = ROOT / "tests" / "fakes" / "nvml" / "pynvml.py"
DRIVER, GPUS = "sensors.example.com", "gpu.nvidia.com"
RELEASE = Release(name="examples", namespace="examples-drakit")
IMAGE, GPUS_IMAGE = f"localhost/drakit-sensors:{TAG}", f"localhost/drakit-gpus:{TAG}"
LINKS = "/run/sensors.test"
"""The directory of the links on a node; all nodes of a local cluster have the same /dev."""

CONSOLES = (56, 57, 58, 59)
UNHEALTHY = "drakit.dev/unhealthy:NoSchedule"


class Sensor:
    """A virtual console that repeatedly gets a reading as input."""

    def __init__(self, number: int) -> None:
        self.path, self.reading = f"/dev/tty{number}", f"{number}.5"
        self._silent = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        while not self._silent.wait(0.2):
            # When a program with this console as its controlling terminal ends, it hangs up the
            # console.
            with suppress(OSError), open(self.path, "wb", buffering=0, opener=_open) as port:
                for byte in f"{self.reading}\n".encode():
                    fcntl.ioctl(port, termios.TIOCSTI, bytes([byte]))

    def fall_silent(self) -> None:
        self._silent.set()
        self._thread.join()


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOCTTY)


def objects(name: str, example: Path = EXAMPLE) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((example / name).read_text()))


def entry_of(example: Path) -> dict[str, Any]:
    return yaml.safe_load((example / "values.yaml").read_text())["backends"]["allowed"]


@pytest.fixture(scope="module")
def drakit(cluster: Cluster, images: list[Path]) -> Iterator[Cluster]:
    """A release that allows the examples, with the paths of the sensors in this test."""
    allowed = entry_of(EXAMPLE) | entry_of(NVIDIA)
    allowed["sensors"]["devices"] = ["/dev/tty5[6-9]"]
    values = {
        "hostdev": {"enabled": False},
        "operator": {"enabled": False},
        "backends": {"enabled": True, "allowed": allowed},
    }
    install(cluster, RELEASE, values=values, build=images[0].parent.name)
    yield cluster
    uninstall(cluster, RELEASE)


@contextmanager
def applied(cluster: Cluster, bodies: list[dict[str, Any]]) -> Iterator[None]:
    items = json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})
    cluster.apply(items)
    yield
    cluster.kubectl("delete", "-f", "-", "--ignore-not-found", input=items)


def rendered(cluster: Cluster, example: Path, name: str) -> list[dict[str, Any]]:
    """Render the example's chart in a namespace that is created as in its README."""
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    done = cluster.helm("template", name, str(example / "chart"), "--namespace", name)
    return [space, *yaml.safe_load_all(done.stdout)]


def manifests(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the example's objects, with the cluster's image and another directory of sensors."""
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "sensors", "namespace": "sensors"},
        "data": {"sensors.yaml": f"directory: {LINKS}"},
    }
    namespace, daemon_set, device_class = rendered(cluster, EXAMPLE, "sensors")
    pod = daemon_set["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 1
    pod["volumes"] += [
        {"name": "config", "configMap": {"name": "sensors"}},
        {"name": "links", "hostPath": {"path": LINKS, "type": "DirectoryOrCreate"}},
    ]
    (container,) = pod["containers"]
    container |= {
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": ["--config=/etc/s/sensors.yaml"],
    }
    container["volumeMounts"] += [
        {"name": "config", "mountPath": "/etc/s"},
        {"name": "links", "mountPath": LINKS},
    ]
    return [namespace, config, daemon_set, device_class]


@pytest.fixture(scope="module")
def sensors(drakit: Cluster, images: list[Path]) -> Iterator[dict[str, dict[str, Sensor]]]:
    """Two sensors on each of two nodes, by node and device name."""
    if not all(Path(f"/dev/tty{number}").exists() for number in CONSOLES):
        pytest.skip("the sensors are virtual consoles, which this machine's kernel does not have")
    cluster = drakit
    cluster.load_image(driver_image(IMAGE, EXAMPLE, nodeplugin=images[0]))
    plugged: dict[str, dict[str, Sensor]] = {}
    numbers = iter(CONSOLES)
    for node in cluster.nodes[:2]:
        folder = cluster.node_path(node, LINKS)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        plugged[node] = {}
        for number in (next(numbers), next(numbers)):
            sensor = plugged[node][f"usb-acme-air-sensor-s{number}-if00"] = Sensor(number)
            (folder / f"usb-Acme_Air_Sensor_S{number}-if00").symlink_to(sensor.path)
    with applied(cluster, manifests(cluster)):
        yield plugged
    for sensor in (sensor for found in plugged.values() for sensor in found.values()):
        sensor.fall_silent()


def gpus_manifests(cluster: Cluster, node: str) -> list[dict[str, Any]]:
    """Return the example's objects, for a node without NVIDIA's runtime and its labels."""
    bodies = rendered(cluster, NVIDIA, "gpus")
    (daemon_set,) = [body for body in bodies if body["kind"] == "DaemonSet"]
    pod = daemon_set["spec"]["template"]["spec"]
    del pod["runtimeClassName"]
    pod["nodeSelector"] = {"kubernetes.io/hostname": node}
    pod["terminationGracePeriodSeconds"] = 1
    (container,) = pod["containers"]
    container |= {"image": GPUS_IMAGE, "imagePullPolicy": "Never"}
    return bodies


def toolkits_file(uuids: list[str]) -> dict[str, Any]:
    """Return a CDI file like that of `nvidia-ctk cdi generate --device-name-strategy=uuid`, with
    another device node and a variable for each device."""
    nodes = [{"path": f"/dev/nvidia{n}", "hostPath": "/dev/null"} for n in range(len(uuids))]
    devices = [
        {"name": uuid, "containerEdits": {"deviceNodes": [node], "env": [f"GIVEN_{n}={uuid}"]}}
        for n, (uuid, node) in enumerate(zip(uuids, nodes, strict=True))
    ]
    return {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": devices,
        "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]},
    }


GPU = "GPU-11111111-aaaa-4bbb-8ccc-000000000001"
MIGS = [f"MIG-33333333-aaaa-5bbb-8ccc-00000000000{n}" for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def gpus(drakit: Cluster, images: list[Path], tmp_path_factory) -> Iterator[str]:
    """A node with a GPU, and another node with three MIG instances."""
    folder = tmp_path_factory.mktemp("gpus")
    dockerfile = (NVIDIA / "Dockerfile").read_text()
    # The stage with pip would need a registry and an index.
    fake = re.sub(r"^FROM .* AS packages\n.*?(?=^FROM )", "", dockerfile, flags=re.M | re.S)
    copied = f"COPY {FAKE_NVML.name} /opt/driver/"
    fake = fake.replace("COPY --from=packages /opt/driver /opt/driver", copied)
    (folder / "Dockerfile").write_text(fake)
    for path in (NVIDIA / "gpus.py", FAKE_NVML):
        shutil.copy(path, folder)
    drakit.load_image(driver_image(GPUS_IMAGE, folder, nodeplugin=images[0]))
    node = drakit.nodes[0]
    file = drakit.node_path(node, "/etc/cdi") / "nvidia.json"
    file.write_text(json.dumps(toolkits_file([GPU, *MIGS])))
    with applied(drakit, gpus_manifests(drakit, node)):
        yield node
    file.unlink()


def published(cluster: Cluster, node: str, driver: str = DRIVER) -> set[str]:
    found = slices(cluster, node, driver=driver)
    return {device["name"] for body in found for device in body["spec"].get("devices") or []}


def test_pods_read_the_sensors_that_the_node_plugin_cannot_open(room, sensors):
    cluster = room.cluster
    for node, plugged in sensors.items():
        wait_for(f"the sensors of {node}", lambda: published(cluster, node) == set(plugged))  # noqa: B023

    template, pod = objects("pod.yaml")
    room.apply(template)
    (container,) = pod["spec"]["containers"]
    container["image"] = TEST_IMAGE
    for node in sensors:
        pod["metadata"]["name"] = f"on-{node}"
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
        room.apply(pod)
    for node, plugged in sensors.items():
        name = f"on-{node}"
        room.wait_phase(name, "Succeeded")
        (reading,) = room.logs(name).splitlines()
        (sensor,) = [each for each in plugged.values() if each.reading == reading]

        plugin = plugin_pod(cluster, node, release=RELEASE)
        assert plugin is not None
        script = f"import os; os.open({sensor.path!r}, os.O_NOCTTY)"
        done = cluster.kubectl(
            *("-n", RELEASE.namespace, "exec", plugin["metadata"]["name"], "--"),
            *("/opt/drakit/bin/python3", "-c", script),
            check=False,
        )
        assert done.returncode
        assert "PermissionError" in done.stderr or "FileNotFoundError" in done.stderr


def test_a_sensor_that_falls_silent_is_tainted(room, sensors):
    (name, sensor), _ = sensors[room.cluster.nodes[1]].items()
    sensor.fall_silent()
    wait_for(
        "the silent sensor alone to be tainted",
        lambda: {n: set(t) for n, t in taints(room.cluster, DRIVER).items()} == {name: {UNHEALTHY}},
        seconds=90,
    )


def test_pods_share_a_gpu_in_time_slices_and_have_instances_of_another_one(room, gpus):
    names = {GPU.lower(), "gpu-22222222-aaaa-4bbb-8ccc-000000000002", *map(str.lower, MIGS)}
    wait_for("the GPUs", lambda: published(room.cluster, gpus, GPUS) == names)
    *templates, sharing, instance = objects("pods.yaml", NVIDIA)
    room.apply(*templates)
    for pod, number in ((sharing, 0), (sharing, 1), (instance, 0), (instance, 1), (instance, 2)):
        (container,) = pod["spec"]["containers"]
        script = "env | sed -n s/^GIVEN_.=//p; ls /dev/nvidia*; sleep 3600"
        container |= {"image": TEST_IMAGE, "command": ["sh", "-c", script]}
        pod = pod | {"metadata": {"name": f"{pod['metadata']['name']}-{number}"}}
        pod["spec"]["terminationGracePeriodSeconds"] = 1
        room.apply(pod)
    for number in (0, 1):
        room.wait_phase(f"time-slice-{number}", "Running")
        room.wait_phase(f"instance-{number}", "Running")

    def log(name: str) -> list[str]:
        return wait_for("the log", lambda: "/dev/" in room.logs(name) and room.logs(name)).split()

    for number in (0, 1):
        assert log(f"time-slice-{number}") == [GPU, "/dev/nvidia0"]
    given = {log(f"instance-{number}")[0] for number in (0, 1)}
    assert given == set(MIGS[1:])  # instances of the profile 1g.5gb
    # There are only two instances of that profile.
    assert room.event("instance-2", "cannot allocate all claims")
    for pod in ("time-slice-0", "time-slice-1", "instance-0", "instance-1", "instance-2"):
        room.delete("pod", pod)  # delete it while its driver runs
