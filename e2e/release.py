"""
Releases of drakit's chart in a cluster: installed and removed with helm, as by a user.

`values.yaml`, next to this file, contains the differences from a user's cluster.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.api import Cluster, ClusterError, CommandError

CHART = Path(__file__).resolve().parent.parent / "charts" / "drakit"
VALUES = Path(__file__).with_name("values.yaml")

KERNELS_BOOT_ID = "/proc/sys/kernel/random/boot_id"
WAIT_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Release:
    """A release of the chart. Several releases may run node plugins on one node."""

    name: str
    namespace: str


DRAKIT = Release(name="drakit", namespace="drakit-system")
NAMESPACE = DRAKIT.namespace


def install(
    cluster: Cluster,
    release: Release = DRAKIT,
    *,
    values: Mapping[str, Any] | None = None,
    wait: bool = True,
    build: str = "",
    chart: Path = CHART,
    arguments: Sequence[str] = (),
) -> None:
    """
    Install a release, or upgrade an installed release to these values.

    :param values: values of the chart. They take precedence over those of `values.yaml`.
    :param wait: whether to wait until all its pods are ready.
    :param build: a name for the images' content; if it changes, pods are replaced, even though the
        images' tag is the same.
    :param chart: the chart; another chart uses the values of its own checkout.
    :param arguments: further arguments for helm.
    """
    # Even without --wait, helm waits for hooks.
    waiting = [f"--timeout={WAIT_SECONDS}s", *(["--wait"] if wait else [])]
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs = Path(scratch, "cluster.yaml"), Path(scratch, "values.yaml")
        ours.write_text(json.dumps(cluster_values(cluster, build)))
        theirs.write_text(json.dumps(values or {}))
        common = chart.parents[1] / VALUES.relative_to(CHART.parents[1])
        files = [f"--values={path}" for path in (common, ours, theirs)]
        try:
            cluster.helm(
                *("upgrade", "--install", release.name, str(chart)),
                *(f"--namespace={release.namespace}", "--create-namespace", *files, *waiting),
                *arguments,
                timeout=WAIT_SECONDS + 60,
            )
        except CommandError as error:
            output = error.output.strip()
            raise ClusterError(
                f"helm could not install {release.name}: {output}\n"
                f"{_why_not_ready(cluster, release)}"
            ) from error


def uninstall(cluster: Cluster, release: Release = DRAKIT) -> str:
    """Remove a release and wait until its pods are gone. Return helm's output. A missing release is
    not an error."""
    done = cluster.helm(
        *("uninstall", release.name, f"--namespace={release.namespace}", "--ignore-not-found"),
        *("--wait", f"--timeout={WAIT_SECONDS}s"),
        timeout=WAIT_SECONDS + 60,
    )
    cluster.kubectl(
        *("wait", "pods", f"--namespace={release.namespace}", "-l", _selector(release)),
        *("--for=delete", f"--timeout={WAIT_SECONDS}s"),
        timeout=WAIT_SECONDS + 10,
    )
    return done.stdout + done.stderr


def _selector(release: Release) -> str:
    return f"app.kubernetes.io/instance={release.name}"


def cluster_values(cluster: Cluster, build: str) -> dict[str, Any]:
    """Return the chart's values that this cluster needs, in addition to those of `values.yaml`."""
    values: dict[str, dict[str, Any]] = {"nodeplugin": {}, "operator": {}}
    if cluster.boot_id_file() != KERNELS_BOOT_ID:
        values["nodeplugin"]["bootIDFile"] = cluster.boot_id_file()
    nodes = cluster.nodes
    if len(cluster.get("nodes")["items"]) > len(nodes):
        # In this cluster, the control plane is a separate node. It has no images, and tests count
        # slices.
        values["nodeplugin"]["affinity"] = only_on(nodes)
    if build:
        for component in values.values():
            component["podAnnotations"] = {"drakit.dev/build": build}
    return values


def only_on(nodes: Sequence[str]) -> dict[str, Any]:
    """Return the affinity to the nodes with these names."""
    name = {"key": "metadata.name", "operator": "In"}
    terms = [{"matchFields": [{**name, "values": [node]}]} for node in nodes]
    required = {"nodeSelectorTerms": terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _why_not_ready(cluster: Cluster, release: Release) -> str:
    """Return the logs of the release's pods, for the error of a failed install."""
    commands = (
        ("get", "pods", "-o", "wide"),
        ("get", "events", "--sort-by=.lastTimestamp"),
        ("logs", "-l", _selector(release), "--tail=5", "--prefix"),
    )
    answers = [
        cluster.kubectl(*command, f"--namespace={release.namespace}", check=False)
        for command in commands
    ]
    return "\n".join(answer.stdout.strip() or answer.stderr.strip() for answer in answers)
