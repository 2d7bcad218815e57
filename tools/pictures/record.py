"""
Records the content of the terminal pictures on a real cluster: `make pictures-record`.

The cluster is that of `make cluster-up`, with loaded images (`make cluster-images`). The program
installs drakit, runs the commands, and writes each screen to `docs/pictures`. Then it removes
drakit.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.api import Cluster, wait_until
from e2e.cluster.choice import cluster as this_cluster
from e2e.images.go import cel_program
from e2e.release import NAMESPACE, install, uninstall
from tools.pictures.terminals import FOLDER

VALUES = {
    "hostdev": {"policies": {"fuse": {"enabled": True, "sharing": {"users": 2}}}},
    "simulated": {"enabled": True},
}
OPENED = "exec 3<>$HOSTDEV_FUSE && echo opened $HOSTDEV_FUSE; sleep 3600"


class Screen:
    """A terminal: runs kubectl commands, and stores their output."""

    def __init__(self, cluster: Cluster, title: str) -> None:
        self._cluster = cluster
        self._lines = [title, ""]

    def run(self, command: str, *, code: int = 0) -> None:
        done = self._cluster.kubectl(*shlex.split(command)[1:], timeout=120, check=code == 0)
        if done.returncode != code:
            raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        output = done.stdout
        self._lines += [f"$ {command}", *(line.rstrip() for line in output.splitlines()), ""]

    def write(self, name: str) -> None:
        (FOLDER / f"{name}.txt").write_text("\n".join(self._lines).rstrip() + "\n")
        print(f"docs/pictures/{name}.txt")


def main() -> None:
    # `kubectl drakit` is a program next to our Python, with Kubernetes' allocator.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["DRAKIT_CEL"] = str(cel_program())
    cluster = this_cluster()
    with _installed(cluster):
        with _pods(cluster, _pod("fuse", "fuse.drakit.dev", OPENED)):
            _wait(cluster, "fuse")
            screen = Screen(cluster, "A pod with a device of its node")
            screen.run(
                "kubectl get resourceslices --field-selector spec.driver=hostdev.drakit.dev"
                " -o custom-columns=NODE:.spec.nodeName,DRIVER:.spec.driver,"
                "DEVICES:.spec.devices[*].name"
            )
            screen.run("kubectl get pods,resourceclaims")
            screen.run("kubectl logs fuse")
            screen.write("terminal-claim")
            screen = Screen(cluster, "The checkpoint of a node")
            screen.run(
                f"kubectl -n {NAMESPACE} exec ds/drakit-nodeplugin --"
                " drakit node checkpoint show --driver hostdev.drakit.dev"
            )
            screen.run(
                f"kubectl -n {NAMESPACE} exec ds/drakit-nodeplugin -- drakit node checkpoint verify"
            )
            screen.write("terminal-checkpoint")
        gpus = "gpu.simulated.drakit.dev"
        with _pods(cluster, _pod("holder", gpus, "sleep 3600", every=True)):
            _wait(cluster, "holder")
            cluster.kubectl("delete", "events", "--all")  # of an earlier recording
            with _pods(cluster, _pod("train", gpus, "sleep 3600")):
                wait_until(
                    "the operator explains the pod",
                    lambda: _explained(cluster, "train"),
                    timeout_seconds=60,
                )
                screen = Screen(cluster, "Why a pod waits")
                screen.run("kubectl get pods,resourceclaims")
                screen.run("kubectl events --for pod/train")
                screen.write("terminal-waiting")
                screen = Screen(cluster, "kubectl drakit explain")
                screen.run("kubectl drakit explain pod/train", code=1)
                screen.write("terminal-explain")
                screen = Screen(cluster, "kubectl drakit devices")
                screen.run("kubectl drakit devices")
                screen.write("terminal-devices")
                screen = Screen(cluster, "kubectl drakit doctor")
                with _without_nodes(cluster):
                    screen.run("kubectl drakit doctor", code=1)
                screen.write("terminal-doctor")


@contextmanager
def _installed(cluster: Cluster) -> Iterator[None]:
    install(cluster, values=VALUES)
    try:
        yield
    finally:
        uninstall(cluster)


@contextmanager
def _pods(cluster: Cluster, objects: list[dict[str, object]]) -> Iterator[None]:
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    cluster.apply(text)
    try:
        yield
    finally:
        cluster.kubectl("delete", "--wait=true", "-f", "-", input=text)


@contextmanager
def _without_nodes(cluster: Cluster) -> Iterator[None]:
    """Revoke the operator's permission to read nodes, which is a problem for the doctor."""
    role = "clusterrole/drakit-operator"
    rules = json.loads(cluster.kubectl("get", role, "-o", "json").stdout)["rules"]
    fewer = [
        {**each, "resources": [one for one in each["resources"] if one != "nodes"]}
        if "resources" in each  # a rule for /version has URLs instead
        else each
        for each in rules
    ]

    def patch(rules: object) -> None:
        cluster.kubectl("patch", role, "--type=merge", "-p", json.dumps({"rules": rules}))

    patch(fewer)
    try:
        wait_until("the doctor reports it", lambda: _denied(cluster), timeout_seconds=30)
        yield
    finally:
        patch(rules)


def _denied(cluster: Cluster) -> bool:
    return "is not allowed to list nodes" in cluster.kubectl("drakit", "doctor", check=False).stdout


def _wait(cluster: Cluster, name: str) -> None:
    cluster.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=60s", timeout=70)


def _explained(cluster: Cluster, pod: str) -> bool:
    return "DevicesAllocated" in cluster.kubectl("events", "--for", f"pod/{pod}").stdout


def _pod(name: str, device_class: str, script: str, every: bool = False) -> list[dict[str, object]]:
    """Return the pod and its claim template, as in the quick start."""
    exactly: dict[str, object] = {"deviceClassName": device_class}
    if every:
        exactly["allocationMode"] = "All"
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {
            "spec": {
                "devices": {"requests": [{"name": device_class.split(".")[0], "exactly": exactly}]}
            }
        },
    }
    container = {
        "name": "main",
        "image": "busybox:1.37",
        "command": ["sh", "-c", script],
        "resources": {"claims": [{"name": "device"}]},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
            "resourceClaims": [{"name": "device", "resourceClaimTemplateName": name}],
        },
    }
    return [template, pod]


if __name__ == "__main__":
    main()
