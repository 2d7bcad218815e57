"""
A Python driver in its own container, on a real kubelet: its security context lets it open hardware
that the node plugin cannot open.

The container has the node plugin's image, and the driver's module from a ConfigMap. A second module
is a backend that sends arbitrary content in the contract's messages, while two other drivers run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from e2e.foreign import (
    APART,
    BACKENDS,
    BLINKER_CLASS,
    FOREIGN,
    LOCAL_CLASS,
    Yard,
    daemon_set,
    with_set,
)
from e2e.kit import cdi_files, device_class, from_template, pod, restarts, template, wait_for
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
VANDAL = """
import asyncio
import itertools

import grpc
import grpc.aio
from drakit_proto.backend.v1 import backend_pb2 as pb
from drakit_proto.backend.v1 import backend_pb2_grpc as pb_grpc

GOOD = pb.Device(name="good", attributes={"model": pb.Attribute(string="one")})
LONG = "x" * 100_000
LISTS = [
    pb.WatchDevicesResponse(devices=[GOOD]),
    pb.WatchDevicesResponse(devices=[pb.Device(name="d", pool=f"p{n}") for n in range(2500)]),
    pb.WatchDevicesResponse(
        devices=[pb.Device(name="all", capacity={"n": pb.Capacity(value="9")})],
        fallback=pb.Fallback(devices=[pb.Device(name=f"all-{n}") for n in range(9)]),
    ),
    pb.WatchDevicesResponse(devices=[GOOD], withdrawn=["all", "nothing", LONG]),
    pb.WatchDevicesResponse(devices=[
        GOOD,
        GOOD,
        pb.Device(),
        pb.Device(name="../up", pool="..", extra="{"),
        pb.Device(name=LONG, attributes={LONG: pb.Attribute(string=LONG), "none": pb.Attribute()}),
        pb.Device(name="sum", capacity={"n": pb.Capacity(value="1e999"), "m": pb.Capacity()}),
        pb.Device(name="set", consumes={"absent": pb.CounterAmounts(counters={"n": "-1"})}),
        pb.Device(name="tainted", taints=[pb.Taint(key="drakit.dev/gone", effect=99)] * 40),
    ]),
    pb.WatchDevicesResponse(counter_sets=[pb.CounterSet(name="s", counters={"n": "many"})] * 3),
    pb.WatchDevicesResponse(devices=[pb.Device(name=f"d{n}") for n in range(20_000)]),
    pb.WatchDevicesResponse(
        rejected=[pb.RejectedDevice(device=LONG, reason=chr(27) + "[2J")],
        policies=[pb.PolicyOutcome(policy=LONG, matched=2**32 - 1)] * 30,
    ),
    pb.WatchDevicesResponse(),
]


class Vandal(pb_grpc.BackendServicer):
    async def GetInfo(self, request, context):
        return pb.GetInfoResponse(driver_name="apart.example.com", version="1")

    async def WatchDevices(self, request, context):
        for number, devices in enumerate(itertools.cycle(LISTS)):
            yield devices
            await asyncio.sleep(0.4)
            if number % 40 == 39:
                raise ValueError("this stream ends")

    async def WatchHealth(self, request, context):
        for number in itertools.count():
            status = number % 3
            names = ["good", "absent", LONG]
            yield pb.WatchHealthResponse(
                devices=[pb.DeviceHealth(name=n, health=pb.Health(status=status)) for n in names]
            )
            await asyncio.sleep(0.05)


async def main():
    server = grpc.aio.server()
    pb_grpc.add_BackendServicer_to_server(Vandal(), server)
    server.add_insecure_port("unix:/run/drakit/driver.sock")
    await server.start()
    await server.wait_for_termination()


asyncio.run(main())
"""
PODS = 8
OPEN = """
import os, sys
try:
    os.close(os.open(sys.argv[1], os.O_RDONLY))
    print("opened")
except OSError as error:
    print(error.strerror)
"""


@contextmanager
def placed(yard: Yard, source: str, *command: str) -> Generator[None]:
    """Run a program for the entry `apart`: a Python module, in a container with the node plugin's
    image."""
    plugin = yard.plugin()
    assert plugin is not None
    (container,) = plugin["spec"]["containers"]
    body = daemon_set(NAME, container["image"], command, {"/run/drakit": f"{BACKENDS}/{NAME}"})
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
        "data": {"apart.py": source},
    }
    yard.cluster.apply(json.dumps(config))
    yard.cluster.apply(json.dumps(device_class(APART, APART)))
    with with_set(yard, body):
        yield
    yard.cluster.kubectl("-n", FOREIGN.namespace, "delete", "configmap", NAME)
    yard.cluster.kubectl("delete", "deviceclass", APART)


@pytest.fixture
def driver(yard: Yard) -> Iterator[None]:
    """The driver's DaemonSet."""
    command = ("/opt/drakit/bin/drakit-driver", "--driver=apart:Fuse", "--directory=/run/drakit")
    with placed(yard, MODULE, *command):
        yield


def opened(yard: Yard, name: str, path: str) -> str:
    """Return the result of a program that opens a path in a pod's container."""
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
        *("-n", FOREIGN.namespace, "exec", own["metadata"]["name"], "--"),
        *("python3", "-c", "print(open('/proc/1/status').read())"),
    ).stdout
    (resident,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    print(f"drakit-driver: VmRSS {int(resident) / 1024:.1f} MiB")
    yard.delete("pod", "user")
    wait_for("its CDI file to go", lambda: not cdi_files(yard.cluster, yard.node, driver=APART))


def start_seconds(yard: Yard, prefix: str) -> list[float]:
    """Start pods one by one, half of them for each of two drivers."""
    seconds: list[float] = []
    for number in range(PODS):
        name = f"{prefix}{number}"
        device_class_name = (LOCAL_CLASS, BLINKER_CLASS)[number % 2]
        yard.apply(template(name, ("device", device_class_name)))
        began = time.monotonic()
        yard.apply(pod(name, ("d", from_template(name)), command=["sh", "-c", STAY]))
        yard.wait_phase(name, "Running")
        seconds.append(time.monotonic() - began)
        yard.delete("pod", name)
        wait_for("its device to be free", lambda: not yard.held())
    return seconds


def test_pods_of_other_drivers_start_as_usual_beside_a_driver_that_sends_anything(yard):
    def plugin_restarts() -> int:
        plugin = yard.plugin()
        assert plugin is not None
        return restarts(plugin)

    before = plugin_restarts()
    usual = start_seconds(yard, "usual")
    with placed(yard, VANDAL, "/opt/drakit/bin/python3", "-m", "apart"):
        wait_for("its devices to be published", lambda: yard.devices(APART), seconds=90)
        beside = start_seconds(yard, "beside")
        vandal = yard.program(NAME)
        assert vandal is not None
        assert restarts(vandal) == 0, "the driver itself must run during the whole test"
    rounded = [[round(each, 1) for each in one] for one in (usual, beside)]
    print(f"seconds to start a pod: usual {rounded[0]}, beside it {rounded[1]}")
    assert plugin_restarts() == before
    # The kubelet repeats a failed call after 10 s or more.
    assert statistics.median(beside) < 2 * statistics.median(usual) + 1
    assert max(beside) < max(usual) + 8
