"""docs/support-matrix.md and docs/reference/feature-gates.md: versions and gates as in the code."""

from __future__ import annotations

import json
import re

import pytest

from drakit_formats.resource.device import Feature
from e2e.cluster.local.binaries import SOURCES, kubernetes_version, required_version
from tests.oracle.gates import GATES as GATES_FILE
from tests.oracle.gates import NEWEST
from tests.unit.docs.listings import ROOT

MATRIX = (ROOT / "docs/support-matrix.md").read_text()
GATES = (ROOT / "docs/reference/feature-gates.md").read_text()

CELL = {(True, "GA"): "on (GA)", (True, "Beta"): "on (beta)"} | {
    (False, "Beta"): "off (beta)",
    (False, "Alpha"): "off (alpha)",
}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def row(text: str, beginning: str) -> list[str]:
    (found,) = re.findall(rf"^\| {re.escape(beginning)} \|(.*)\|$", text, re.M)
    return [cell.strip() for cell in found.split("|")]


@pytest.mark.parametrize(
    ("beginning", "module", "package"),
    [
        ("1.37", "kubernetes", "k8s.io/kubernetes"),
        ("containerd 2.4", "tools", "github.com/containerd/containerd/v2"),
        ("containerd 1.7", "containerd-1.7", "github.com/containerd/containerd"),
        ("runc 1.4", "runc-1.4", "github.com/opencontainers/runc"),
        ("Helm 4", "tools", "helm.sh/helm/v4"),
    ],
)
def test_the_tested_versions_are_those_of_the_test_clusters(beginning, module, package):
    state, notes = row(MATRIX, beginning)
    assert state == "Tested"
    version = required_version(SOURCES / module / "go.mod", package).removeprefix("v")
    assert re.match(rf"{re.escape(version)}(?!\w)", notes)


def test_each_gate_that_drakit_reports_is_on_the_page():
    for gate in filter(None, (feature.gate for feature in Feature)):
        assert re.search(rf"^\| {gate} \|", GATES, re.M), gate


def test_the_defaults_are_those_of_kubernetes():
    known = json.loads(GATES_FILE.read_text())
    assert known["kubernetes"] == kubernetes_version(NEWEST), "run `make kubernetes-tables`"
    head, *rows = re.findall(r"^\| .* \|$", GATES.partition("## Features")[0], re.M)
    versions = [cell.strip() for cell in head.strip("|").split("|")][1:]
    assert versions[-1] == NEWEST
    assert len(rows) >= 10
    for line in rows:
        gate, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        steps = known["gates"][gate]
        for shown, cell in zip(versions, cells, strict=True):
            before = [
                CELL[default, stage]
                for since, default, stage in steps
                if numbers(since) <= numbers(shown)
            ]
            assert cell == (before[-1] if before else "-"), f"{gate} in {shown}"
