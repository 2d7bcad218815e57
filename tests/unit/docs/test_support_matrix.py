"""docs/support-matrix.md and docs/reference/feature-gates.md: versions and gates as in the code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from drakit_formats.resource.device import Feature
from tests.unit.docs.listings import ROOT

MATRIX = (ROOT / "docs/support-matrix.md").read_text()
GATES = (ROOT / "docs/reference/feature-gates.md").read_text()
BINARIES = ROOT / "e2e/cluster/binaries"

CELL = {(True, "GA"): "on (GA)", (True, "Beta"): "on (beta)"} | {
    (False, "Beta"): "off (beta)",
    (False, "Alpha"): "off (alpha)",
}


def pinned(module: str, package: str) -> str:
    """The version of a package in a Go module of the test clusters."""
    text = (BINARIES / module / "go.mod").read_text()
    (version,) = re.findall(rf"^\t(?:require )?{re.escape(package)} v(\S+)", text, re.M)
    return version


def version_of(module: str) -> tuple[int, ...]:
    """Major and minor version, also of a module in Go's cache, such as ``kubernetes@v1.36.3``."""
    return tuple(map(int, module.rpartition("@v")[2].split(".")[:2]))


def row(text: str, beginning: str) -> list[str]:
    (found,) = re.findall(rf"^\| {re.escape(beginning)} \|(.*)\|$", text, re.M)
    return [cell.strip() for cell in found.split("|")]


@pytest.mark.parametrize(
    ("beginning", "module", "package"),
    [
        ("1.36", "kubernetes", "k8s.io/kubernetes"),
        ("containerd 2.4", "tools", "github.com/containerd/containerd/v2"),
        ("Helm 4", "tools", "helm.sh/helm/v4"),
    ],
)
def test_the_tested_versions_are_those_of_the_test_clusters(beginning, module, package):
    state, notes = row(MATRIX, beginning)
    assert state == "Tested"
    assert re.match(rf"{re.escape(pinned(module, package))}(?!\w)", notes)


def test_each_gate_that_drakit_reports_is_on_the_page():
    for gate in filter(None, (feature.gate for feature in Feature)):
        assert re.search(rf"^\| {gate} \|", GATES, re.M), gate


def test_the_defaults_are_those_of_kubernetes():
    version = pinned("kubernetes", "k8s.io/kubernetes")
    try:
        folder = Path(
            subprocess.run(
                ["go", "env", "GOMODCACHE"], capture_output=True, text=True, check=True
            ).stdout.strip()
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("Go is not installed")
    head, *rows = re.findall(r"^\| .* \|$", GATES.partition("## Features")[0], re.M)
    versions = [cell.strip() for cell in head.strip("|").split("|")][1:]
    sources = {
        version_of(path.parts[-4]): path
        for path in folder.glob("k8s.io/kubernetes@v1.*/pkg/features/kube_features.go")
    }
    # A later version knows the defaults of earlier ones.
    newest = max((each for each in sources if each <= version_of(versions[-1])), default=None)
    if newest is None:
        pytest.skip(f"Kubernetes {version} is not in Go's module cache")
    text = sources[newest].read_text()
    assert len(rows) >= 10
    for line in rows:
        gate, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        body = re.search(rf"^\t{gate}: \{{\n(.*?)^\t\}}", text, re.M | re.S)
        assert body, gate
        steps = [
            ((int(major), int(minor)), CELL[enabled == "true", stage])
            for major, minor, enabled, stage in re.findall(
                # Without those that need another --min-compatibility-version than the default one.
                r'MustParse\("(\d+)\.(\d+)"\), Default: (\w+), PreRelease: featuregate\.(\w+)'
                r"(?!.*MinCompat)",
                body[1],
            )
        ]
        for shown, cell in zip(versions, cells, strict=True):
            wanted = tuple(map(int, shown.split(".")))
            if wanted > newest:
                continue
            before = [value for since, value in steps if since <= wanted]
            assert cell == (before[-1] if before else "-"), f"{gate} in {shown}"
