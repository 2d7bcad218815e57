"""
drakit's release in a cluster: installed and removed with helm, as a user would.

What differs from a user's cluster stands in `values.yaml` beside this file. It must not know how
images are built, nor which provider runs the cluster.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from e2e.cluster.api import Cluster, ClusterError, CommandError

RELEASE = "drakit"
NAMESPACE = "drakit-system"
CHART = Path(__file__).resolve().parent.parent / "charts" / "drakit"
VALUES = Path(__file__).with_name("values.yaml")

KERNELS_BOOT_ID = "/proc/sys/kernel/random/boot_id"
WAIT_SECONDS = 120


def install(
    cluster: Cluster,
    *,
    values: Mapping[str, Any] | None = None,
    wait: bool = True,
    build: str = "",
) -> None:
    """
    Install drakit, or bring an installed one to these values.

    :param values: values of the chart, before those of `values.yaml`.
    :param wait: until every pod of it is ready.
    :param build: a name for the images' content: pods are replaced when it is another one, though
        the images' tag is the same.
    """
    waiting = ["--wait", f"--timeout={WAIT_SECONDS}s"] if wait else []
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs = Path(scratch, "cluster.yaml"), Path(scratch, "values.yaml")
        ours.write_text(json.dumps(_cluster_values(cluster, build)))
        theirs.write_text(json.dumps(values or {}))
        files = [f"--values={path}" for path in (VALUES, ours, theirs)]
        try:
            cluster.helm(
                *("upgrade", "--install", RELEASE, str(CHART)),
                *(f"--namespace={NAMESPACE}", "--create-namespace", *files, *waiting),
                timeout=WAIT_SECONDS + 60,
            )
        except CommandError as error:
            told = error.output.strip()
            raise ClusterError(
                f"helm could not install drakit: {told}\n{_why_not_ready(cluster)}"
            ) from error


def uninstall(cluster: Cluster) -> None:
    """Remove drakit and wait until its pods are gone; nothing to remove is no error."""
    cluster.helm(
        *("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--ignore-not-found"),
        *("--wait", f"--timeout={WAIT_SECONDS}s"),
        timeout=WAIT_SECONDS + 60,
    )
    cluster.kubectl(
        *("wait", "pods", f"--namespace={NAMESPACE}", "-l", "app.kubernetes.io/name=drakit"),
        *("--for=delete", f"--timeout={WAIT_SECONDS}s"),
        timeout=WAIT_SECONDS + 10,
    )


def _cluster_values(cluster: Cluster, build: str) -> dict[str, Any]:
    values: dict[str, dict[str, Any]] = {"nodeplugin": {}, "operator": {}}
    if cluster.boot_id_file() != KERNELS_BOOT_ID:
        values["nodeplugin"]["bootIDFile"] = cluster.boot_id_file()
    if build:
        for component in values.values():
            component["podAnnotations"] = {"drakit.dev/build": build}
    return values


def _why_not_ready(cluster: Cluster) -> str:
    """What the pods of the release say, for the error of an install that did not end well."""
    commands = (
        ("get", "pods", "-o", "wide"),
        ("get", "events", "--sort-by=.lastTimestamp"),
        ("logs", "-l", "app.kubernetes.io/name=drakit", "--tail=5", "--prefix"),
    )
    told = [
        cluster.kubectl(*command, f"--namespace={NAMESPACE}", check=False) for command in commands
    ]
    return "\n".join(answer.stdout.strip() or answer.stderr.strip() for answer in told)
