"""The examples: they fit the chart's defaults, and themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

EXAMPLES = sorted(Path(__file__).resolve().parents[3].joinpath("examples").glob("*.yaml"))


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in EXAMPLES])
def test_an_example(file, values):
    classes = {f"{policy['name']}.drakit.dev" for policy in values["hostdev"]["policies"]}
    objects = list(yaml.safe_load_all(file.read_text()))
    claims = [body for body in objects if body["kind"].startswith("ResourceClaim")]
    pods = [body["spec"] for body in objects if body["kind"] == "Pod"]
    assert claims
    assert pods
    for claim in claims:
        spec = claim["spec"].get("spec", claim["spec"])
        for request in spec["devices"]["requests"]:
            assert request["exactly"]["deviceClassName"] in classes
    for pod in pods:
        sources = {
            source.get("resourceClaimName") or source["resourceClaimTemplateName"]
            for source in pod["resourceClaims"]
        }
        assert sources <= {claim["metadata"]["name"] for claim in claims}
        (container,) = pod["containers"]
        used = {claim["name"] for claim in container["resources"]["claims"]}
        assert used == {source["name"] for source in pod["resourceClaims"]}
