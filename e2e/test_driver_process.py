"""
A Python driver in its own container, on a real kubelet: its security context lets it open hardware
that the node plugin cannot open.

The container has the node plugin's image, and the driver's module from a ConfigMap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e.foreign import APART, BACKENDS, FOREIGN, Yard, daemon_set, with_set
from e2e.kit import cdi_files, device_class, from_template, pod, template, wait_for
from e2e.simulated import STAY

pytestmark = [pytest.mark.e2e, pytest.mark.feature("backends"), pytest.mark.slow]

NAME = "apart"
MODULE = """
import asyncio
from collections.abc import AsyncIterator

from drakit import Device, Driver, DriverConfig, Edits


class Fuse(Driver[DriverConfig]):
    name = "apart.example.com"

    async def devices(self) -> AsyncIterator[list[Device]]:
        while True:
            with open("/dev/fuse", "rb", buffering=0):  # if the hardware cannot be read, it raises
                pass
            yield [Device(name="fuse", edits=Edits.of_device_nodes("/dev/fuse"))]
            await asyncio.sleep(2)
"""
OPEN = """
import os, sys
try:
    os.close(os.open(sys.argv[1], os.O_RDONLY))
    print("opened")
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture
def driver(yard: Yard) -> Iterator[None]:
    """The driver's DaemonSet."""
    plugin = yard.plugin()
    assert plugin is not None
    (container,) = plugin["spec"]["containers"]
    body = daemon_set(
        NAME,
        container["image"],
        [
            "/opt/drakit/bin/drakit-driver",
            "--driver=apart:Fuse",
            "--directory=/run/drakit",
        ],
        {"/run/drakit": f"{BACKENDS}/{NAME}"},
    )
    spec = body["spec"]["template"]["spec"]
    (main,) = spec["containers"]
    main["securityContext"] = {"privileged": True}
    main["env"] = [
        {"name": "PYTHONPATH", "value": "/driver"},
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ]
    main["volumeMounts"].append({"name": "module", "mountPath": "/driver"})
    spec["volumes"].append({"name": "module", "configMap": {"name": NAME}})
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": NAME, "namespace": FOREIGN.namespace},
        "data": {"apart.py": MODULE},
    }
    yard.cluster.apply(json.dumps(config))
    yard.cluster.apply(json.dumps(device_class(APART, APART)))
    with with_set(yard, body):
        yield
    yard.cluster.kubectl("-n", FOREIGN.namespace, "delete", "configmap", NAME)
    yard.cluster.kubectl("delete", "deviceclass", APART)


def opened(yard: Yard, name: str, path: str) -> str:
    """What a program gets that opens a path in a pod's container."""
    exec_in = ("-n", FOREIGN.namespace, "exec", name, "--")
    return yard.cluster.kubectl(
        *exec_in, "/opt/drakit/bin/python3", "-c", OPEN, path
    ).stdout.strip()


def test_a_driver_in_its_container_opens_what_the_node_plugin_cannot(yard, driver):
    wait_for("its device to be published", lambda: "fuse" in yard.devices(APART), seconds=90)
    plugin, own = yard.plugin(), yard.program(NAME)
    assert plugin is not None
    assert own is not None
    assert opened(yard, plugin["metadata"]["name"], "/host/dev/fuse") == "Operation not permitted"
    assert opened(yard, own["metadata"]["name"], "/dev/fuse") == "opened"

    yard.apply(
        template("user", ("fuse", APART)),
        pod("user", ("f", from_template("user")), command=["sh", "-c", STAY]),
    )
    yard.wait_phase("user", "Running")
    assert yard.inside("user", "exec 3<>/dev/fuse && echo opened") == ["opened"]
    status = yard.cluster.kubectl(
        *("-n", FOREIGN.namespace, "exec", own["metadata"]["name"], "--"), "cat", "/proc/1/status"
    ).stdout
    (resident,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    print(f"drakit-driver: VmRSS {int(resident) / 1024:.1f} MiB")
    yard.delete("pod", "user")
    wait_for("its CDI file to go", lambda: not cdi_files(yard.cluster, yard.node, driver=APART))
