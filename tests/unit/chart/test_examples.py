"""The examples: they fit the chart's defaults, the drivers, and themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[3] / "examples"
SIMULATED = "simulated.drakit.dev"


def files(folder: Path) -> list[Any]:
    return [pytest.param(file, id=file.stem) for file in sorted(folder.glob("*.yaml"))]


def objects_of(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def specs(file: Path) -> Iterator[dict[str, Any]]:
    """The requests of the claims in a file."""
    for body in objects_of(file):
        if body["kind"].startswith("ResourceClaim"):
            yield body["spec"].get("spec", body["spec"])["devices"]


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
