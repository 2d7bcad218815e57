"""All that name a version of drakit's custom resources name the one of the definitions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from drakit_drivers.hostdev import HostDevices
from drakit_formats import crds

ROOT = Path(__file__).resolve().parents[3]
DEFINITIONS = sorted((ROOT / "charts/drakit/crds").glob("*.yaml"))


@pytest.mark.parametrize("path", DEFINITIONS, ids=lambda path: path.stem)
def test_a_definition_has_one_version(path: Path):
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    (version,) = body["spec"]["versions"]
    assert (version["name"], version["served"], version["storage"]) == (crds.VERSION, True, True)
    assert body["metadata"]["name"] == f"{path.stem}.{crds.GROUP}"
    assert path.stem in (crds.DRIVERS, crds.MAINTENANCES, crds.POLICIES, crds.REPORTS)


def test_the_driver_reads_the_policies_of_the_definition():
    resource = HostDevices.policy_resource
    assert resource is not None
    assert f"{resource.group}/{resource.version}" == crds.API_VERSION
    assert resource.plural == crds.POLICIES


def test_documentation_and_examples_name_no_other_version():
    texts = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.yaml")]
    named = {
        found
        for path in texts
        for found in re.findall(r"drakit\.dev/v[0-9]\w*", path.read_text(encoding="utf-8"))
    }
    assert named == {crds.API_VERSION}
