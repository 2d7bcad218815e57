"""The examples: they fit the chart's defaults, the drivers, and themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from drakit import Device
from drakit_drivers.simulated import SimulatedConfig, SimulatedParameters
from drakit_drivers.simulated.inventory import all_devices
from drakit_explain.cel.library import Library
from drakit_formats.resource.device import device_body
from drakit_nodeplugin.devices.taints import UNHEALTHY

FOLDER = Path(__file__).resolve().parents[3] / "examples"
SIMULATED = "simulated.drakit.dev"


def files(folder: Path) -> list[Any]:
    return [pytest.param(file, id=file.stem) for file in sorted(folder.glob("*.yaml"))]


EMPTY = {
    "driver": SIMULATED,
    "allowMultipleAllocations": False,
    "attributes": {},
    "capacity": {},
}
"""Fields that the API leaves out of a device."""


def objects_of(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def specs(file: Path) -> Iterator[dict[str, Any]]:
    """The requests of the claims in a file."""
    for body in objects_of(file):
        if body["kind"].startswith("ResourceClaim"):
            yield body["spec"].get("spec", body["spec"])["devices"]


def devices_for(request: dict[str, Any]) -> list[Device]:
    """The simulated devices that a request selects."""
    kind = request["deviceClassName"].removesuffix(f".{SIMULATED}")
    devices = [
        device
        for device in all_devices(SimulatedConfig()).devices
        if device.attributes["type"] == kind
    ]
    for selector in request.get("selectors", []):
        bodies = [{**EMPTY, **device_body(device)} for device in devices]
        outcomes = Library().select(selector["cel"]["expression"], bodies)
        assert not any(outcome.error for outcome in outcomes)
        devices = [
            device
            for device, outcome in zip(devices, outcomes, strict=True)
            if outcome.selected or outcome.unknown
        ]
    return devices


@pytest.mark.parametrize("file", [*files(FOLDER), *files(FOLDER / "simulated")])
def test_an_example(file, values):
    classes = {f"{policy}.drakit.dev" for policy in values["hostdev"]["policies"]}
    classes |= {f"{kind}.{SIMULATED}" for kind in ("gpu", "partition", "nic", "cpu")}
    objects = objects_of(file)
    claims = [body for body in objects if body["kind"].startswith("ResourceClaim")]
    pods = [body["spec"] for body in objects if body["kind"] == "Pod"]
    assert claims
    assert pods
    for spec in specs(file):
        for request in spec["requests"]:
            assert request["exactly"]["deviceClassName"] in classes
    for pod in pods:
        sources = {
            source.get("resourceClaimName") or source["resourceClaimTemplateName"]
            for source in pod["resourceClaims"]
        }
        assert sources <= {claim["metadata"]["name"] for claim in claims}
        for container in pod["containers"]:
            used = {claim["name"] for claim in container["resources"]["claims"]}
            assert used == {source["name"] for source in pod["resourceClaims"]}


@pytest.mark.parametrize("file", files(FOLDER / "simulated"))
def test_what_a_simulated_example_asks_for_is_there(file):
    for spec in specs(file):
        found = {request["name"]: devices_for(request["exactly"]) for request in spec["requests"]}
        assert all(found.values())
        for request in spec["requests"]:
            wanted = request["exactly"].get("capacity", {}).get("requests", {})
            assert all(wanted.keys() <= device.capacity.keys() for device in found[request["name"]])
        for constraint in spec.get("constraints", []):
            named = set(constraint["requests"])
            assert named <= found.keys()
            values = [
                {_attribute(device, constraint["matchAttribute"]) for device in found[name]}
                for name in named
            ]
            assert set.intersection(*values) - {None}


@pytest.mark.parametrize("file", files(FOLDER / "simulated"))
def test_parameters_and_tolerations_of_a_simulated_example_are_understood(file):
    for spec in specs(file):
        for config in spec.get("config", []):
            assert config["opaque"]["driver"] == SIMULATED
            SimulatedParameters.model_validate(config["opaque"]["parameters"])
        for request in spec["requests"]:
            for toleration in request["exactly"].get("tolerations", []):
                assert toleration["key"] == UNHEALTHY


def _attribute(device: Device, name: str) -> object:
    if name == "resource.kubernetes.io/pcieRoot":
        return device.topology.pcie_root
    return device.attributes.get(name.removeprefix(f"{SIMULATED}/"))
