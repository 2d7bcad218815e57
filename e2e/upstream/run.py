"""
One run of the suite: cluster, drakit, specs, and the files with the result.

It must not know how a cluster is run, nor judge what was found.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.api import (
    DEFAULT_GATES,
    DEFAULT_RUNTIME_CONFIG,
    Cluster,
    ClusterError,
    Options,
)
from e2e.images import build_images
from e2e.kit import restarts
from e2e.release import NAMESPACE, install

from .events import Written, as_lines, watched, written
from .images import suite_images
from .program import Programs
from .recording import recorded
from .report import DRIVER_LABEL, Spec, specs

CALM = ("", "debug", "info")
"""The levels of log lines that need nobody."""

GATES = {**DEFAULT_GATES, "DRAResourcePoolStatus": True}
RUNTIME_CONFIG = {**DEFAULT_RUNTIME_CONFIG, "resource.k8s.io/v1alpha3": True}
NODES = 2

NO_DRIVER = f"!{DRIVER_LABEL}"
"""Ginkgo's filter for the specs that need no driver on a node."""

SUITE_SECONDS = 3600


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run found."""

    specs: Sequence[Spec]
    events: Sequence[Written]
    complaints: Sequence[str]
    """Restarts of drakit's pods, and warnings and errors of the operator's log."""


def prepared(cluster: Cluster, programs: Programs, *, kept: bool = False) -> None:
    """Start the cluster, load the images, and install drakit."""
    cluster.prepare()
    images = [*build_images(), *suite_images(programs, Path(cluster.program("pause")))]
    options = Options(nodes=NODES, gates=GATES, runtime_config=RUNTIME_CONFIG, kept=kept)
    cluster.start(options)
    _check_version(cluster, programs)
    for archive in images:
        cluster.load_image(archive)
    install(cluster)


def _check_version(cluster: Cluster, programs: Programs) -> None:
    """Raise ClusterError unless the cluster has the suite's minor release."""
    server = json.loads(cluster.kubectl("get", "--raw", "/version").stdout)["gitVersion"]
    if server.split(".")[:2] != programs.version.split(".")[:2]:
        raise ClusterError(f"cluster {cluster.name} runs {server}, the suite is {programs.version}")


def run_suite(
    cluster: Cluster, programs: Programs, folder: Path, *, labels: str, focus: str = ""
) -> Outcome:
    """Run specs, and leave report.json, junit.xml, suite.log and the Events in a folder."""
    folder = folder.resolve()  # the suite runs in it
    folder.mkdir(parents=True, exist_ok=True)
    report, changes = folder / "report.json", folder / "all-events.json"
    report.unlink(missing_ok=True)
    argv = [
        *(str(programs.suite), f"-kubeconfig={cluster.kubeconfig}", "-provider=skeleton"),
        *(f"-ginkgo.label-filter={labels}", "-ginkgo.no-color", "-ginkgo.v"),
        *(f"-ginkgo.json-report={report}", f"-ginkgo.junit-report={folder / 'junit.xml'}"),
        *(f"-ginkgo.timeout={SUITE_SECONDS}s", "-test.timeout=0"),
        *([f"-ginkgo.focus={focus}"] if focus else []),
    ]
    with recorded(cluster, changes), (folder / "suite.log").open("wb") as log:
        # Failed specs are in the report; only a suite that did not run is an error here.
        subprocess.run(
            argv, stdout=log, stderr=log, check=False, timeout=SUITE_SECONDS + 60, cwd=folder
        )
    if not report.exists():
        raise ClusterError(f"the suite wrote no report: see {log.name}")
    found = specs(json.loads(report.read_text()))
    events = written(watched(changes.read_text()), found)
    (folder / "drakit-events.jsonl").write_text(as_lines(events))
    operator_log = _operator_log(cluster)
    (folder / "operator.log").write_text(operator_log)
    found_wrong = [*restarted(cluster), *complaints(operator_log)]
    return Outcome(specs=found, events=events, complaints=found_wrong)


def restarted(cluster: Cluster) -> list[str]:
    """A sentence for each pod of drakit that was restarted."""
    pods = cluster.get("pods", "-n", NAMESPACE)["items"]
    counts = {pod["metadata"]["name"]: restarts(pod) for pod in pods}
    return [f"pod {name} restarted {count} times" for name, count in counts.items() if count]


def _operator_log(cluster: Cluster) -> str:
    selector = "app.kubernetes.io/component=operator"
    return cluster.kubectl("-n", NAMESPACE, "logs", "-l", selector, "--tail=-1").stdout


def complaints(log: str) -> list[str]:
    """Return the lines of a JSON log that are warnings or errors."""
    return [
        line
        for line in log.splitlines()
        if line.startswith("{") and json.loads(line).get("level", "").lower() not in CALM
    ]
