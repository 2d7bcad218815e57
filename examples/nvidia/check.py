"""
Checks the driver on a machine with NVIDIA GPUs, without Kubernetes, and prints the results.

It lists the devices as the driver yields them, looks for their CDI devices in the files of NVIDIA's
toolkit, and runs the conformance kit on the driver. It does not change the machine.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # missing if PYTHONSAFEPATH is set

from gpus import Gpus, GpusConfig  # noqa: E402

from drakit import Capacity, Device, DriverError, Inventory  # noqa: E402

CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))


async def read(config: GpusConfig) -> Inventory:
    """Return the driver's first inventory."""
    driver = Gpus(config, SimpleNamespace(name="this-machine", labels={}))
    stream = driver.devices()
    try:
        return await anext(stream)
    finally:
        await stream.aclose()
        driver.close()


def print_device(device: Device) -> None:
    print(f"\n{device.name}")
    for name, value in device.attributes.items():
        print(f"  {name}: {getattr(value, 'text', value)}")
    for name, amount in device.capacity.items():
        value = (
            f"{amount.value}, {amount.default} a share" if isinstance(amount, Capacity) else amount
        )
        print(f"  {name}: {value}")
    print(f"  location: NUMA node {device.topology.numa_node}, {device.topology.pcie_root}")
    for counters, used in device.consumes.items():
        print(f"  consumes of {counters}: {', '.join(used)}")
    for taint in device.taints:
        print(f"  taint: {taint.key}={taint.value}:{taint.effect}")
    if device.health:
        print(f"  health: {device.health.status} {device.health.message}")
    print(f"  CDI devices: {', '.join(device.edits.cdi_devices)}")


def cdi_problems(inventory: Inventory) -> list[str]:
    """Return the CDI devices that containers need, but that no file on this machine contains."""
    found: set[str] = set()
    for path in (path for folder in CDI_FOLDERS for path in folder.glob("*.[jy]*")):
        spec: Any = yaml.safe_load(path.read_text())
        found |= {f"{spec['kind']}={device['name']}" for device in spec["devices"]}
    needed = {name for device in inventory.devices for name in device.edits.cdi_devices}
    return [
        f"no CDI file has {name}; run nvidia-ctk cdi generate" for name in sorted(needed - found)
    ]


def conformance(time_slices: int) -> list[str]:
    """Run the conformance kit on the driver, with a real node plugin, a fake kubelet and a fake API
    server."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(f"timeSlices: {time_slices}\n")
        file.flush()
        program = Path(sys.executable).with_name("drakit")
        path = os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [program, "conformance", "gpus:Gpus", "--config", file.name],
            env={**os.environ, "PYTHONPATH": path},
            check=False,
        )
    return ["the driver violates the rules above"] if done.returncode else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time-slices", type=int, default=1, metavar="N", help="as in the values")
    slices: int = parser.parse_args().time_slices
    try:
        inventory = asyncio.run(read(GpusConfig(time_slices=slices)))
    except DriverError as error:
        print(error)
        return 1
    for device in inventory.devices:
        print_device(device)
    sick = [each for each in inventory.devices if each.health and each.health.status != "healthy"]
    print("\nconformance:", flush=True)
    problems = [
        *(f"{device.name} is not healthy" for device in sick),
        *(f"{each.device} is not published: {each.message}" for each in inventory.rejected),
        *cdi_problems(inventory),
        *conformance(slices),
    ]
    types = Counter(str(device.attributes["type"]) for device in inventory.devices)
    print("\nsummary:", ", ".join(f"{count} of type {kind}" for kind, count in types.items()))
    print("\n".join(f"problem: {each}" for each in problems) or "no problems")
    return 1 if problems or not inventory.devices else 0


if __name__ == "__main__":
    sys.exit(main())
