"""
One run of the suite: cluster, drakit, specs, and the files with the result.

A run has three parts. In the first part, specs that need no driver run while drakit is installed.
In the other parts, drakit is the driver of the specs: those of a cluster, and those of a node,
which stop and start the node's kubelet. The latter run on the node and need systemd, so only kind
supports that part.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.api import CONTROL_PLANE, Cluster, ClusterError, Options
from e2e.cluster.gates import gates_of_tests, runtime_config_of_tests
from e2e.cluster.local.binaries import minor_of
from e2e.images import build_images
from e2e.kit import restarts
from e2e.release import NAMESPACE, Release, install

from .events import Written, as_lines, watched, written
from .images import suite_images
from .program import Programs
from .report import DRIVER_LABEL, Spec, specs
from .table import not_applicable

QUIET_LEVELS = ("", "debug", "info")
"""The levels of log lines that need no attention."""

GATES = ("DRAResourcePoolStatus", "DRAWorkloadResourceClaims", "GenericWorkload")
"""The gates of the suite's specs that are disabled by default in all releases."""

MINOR_GATES = {
    "1.37": (
        "DRADeviceCompatibilityGroups",
        "DRAOptionalNodeOperations",
        "DRAPartitionableDevicesType",
    ),
}

SCHEDULING_VERSIONS = {"1.36": "v1alpha2", "1.37": "v1beta1"}
"""The version of scheduling.k8s.io whose PodGroups the specs create."""

NODES = 2

PROCESSES = 4
"""Number of specs that run at the same time. They mostly wait, for example 30 s until the kubelet
deletes the slices of a driver that has ended."""

SUITE_SECONDS = 3600
WATCH_STOP_SECONDS = 10

REPORT, LOG, PLUGINS = "report.json", "suite.log", "plugins"
"""The files of a part, and the folder with the logs of the drivers' pods."""

NODE_FOLDER = "/opt/drakit-suite"
"""The folder of the specs that run on a node."""

UNDER_TEST = Release(name="suite", namespace="drakit-suite")
"""The release whose DaemonSet, which runs on no node, is the template for the drivers' pods."""

ON_NO_NODE = {"drakit.dev/suite": "none"}

UNDER_TEST_VALUES: Mapping[str, Any] = {
    "operator": {"enabled": False},
    "hostdev": {"enabled": False},
    "backends": {
        "enabled": True,
        "directory": "/var/lib/kubelet/plugins/drakit-suite",
        "allowed": {
            "suite": {"driver": "suite.invalid", "env": ["admin_*", "claim_*", "user_*"]},
        },
    },
    "nodeplugin": {
        "nodeSelector": ON_NO_NODE,
        # A driver without a name, so the admission policy cannot limit the names of drivers.
        "drivers": [{"driver": "suite:Driver"}],
    },
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a run."""

    name: str
    labels: str
    """Ginkgo's filter."""

    drakit: bool
    """Whether drakit is the driver."""

    on_node: bool = False
    """Whether the specs run on a node with systemd."""


PARTS = (
    Part(name="control-plane", labels=f"!{DRIVER_LABEL}", drakit=False),
    Part(name="kubelet", labels=DRIVER_LABEL, drakit=True),
    Part(name="node", labels=DRIVER_LABEL, drakit=True, on_node=True),
)
KUBELET = PARTS[1]


def parts_of(cluster: Cluster) -> list[Part]:
    """Return the parts that can run on a cluster."""
    return [part for part in PARTS if not part.on_node or cluster.provider == "kind"]


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """The results of a run."""

    specs: Sequence[Spec]
    events: Sequence[Written]
    complaints: Sequence[str]
    """Problems of the drivers' pods, restarts of the other pods, and warnings and errors in the
    operator's log."""


def prepared(cluster: Cluster, programs: Programs, *, kept: bool = False) -> None:
    """Start the cluster, load the images, and install drakit."""
    cluster.prepare()
    images = [*build_images(), *suite_images(programs, Path(cluster.program("pause")))]
    options = Options(
        nodes=NODES,
        gates={
            **gates_of_tests(programs.minor),
            **dict.fromkeys((*GATES, *MINOR_GATES.get(programs.minor, ())), True),
        },
        runtime_config={
            **runtime_config_of_tests(programs.minor),
            "resource.k8s.io/v1alpha3": True,
            f"scheduling.k8s.io/{SCHEDULING_VERSIONS[programs.minor]}": True,
        },
        kept=kept,
    )
    cluster.start(options)
    _check_version(cluster, programs)
    for archive in images:
        cluster.load_image(archive)
    install(cluster)
    install(cluster, UNDER_TEST, values=UNDER_TEST_VALUES, wait=False)


def _check_version(cluster: Cluster, programs: Programs) -> None:
    """Raise ClusterError unless the cluster runs the suite's minor release."""
    server = json.loads(cluster.kubectl("get", "--raw", "/version").stdout)["gitVersion"]
    if minor_of(server) != programs.minor:
        raise ClusterError(f"cluster {cluster.name} runs {server}, the suite is {programs.version}")


QUICK = (
    "control plane.* retries pod scheduling after (creating|updating) device class",
    "must (retry NodePrepareResources|unprepare resources for force-deleted pod|manage Resource)",
    "must (map configs and devices to the right containers|consume and free up counters)",
    "supports external claim referenced by multiple containers of multiple pods",
    "kubelet.* (rolling|failed) update",
)
"""The specs in `make test`. Each uses another part of drakit."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of the node plugin, and the expected way to detect it."""

    name: str
    """The name of the program in `faults/`."""

    spec: str
    failure: str
    """A part of the failure's message."""


FAULTS = (
    Fault(
        name="forgotten_unprepare",
        spec="must unprepare resources for force-deleted pod",
        failure="prepared claims on host",
    ),
    Fault(
        name="stale_generation",
        spec="must consume and free up counters",
        failure="start pod: Timed out",
    ),
    Fault(
        name="wrong_claim",
        spec="kubelet.* on single node supports reusing resources",
        failure="start pod: Timed out",
    ),
)


def fault_program(fault: str) -> Path:
    """Return the program that runs the node plugin with a fault."""
    return Path(__file__).with_name("faults") / f"{fault}.py"


def run_part(
    cluster: Cluster,
    programs: Programs,
    part: Part,
    folder: Path,
    *,
    focus: str = "",
    fault: str = "",
) -> PartResult:
    """Run specs, and write report.json, suite.log, and drakit's Events and logs to a folder."""
    folder = folder.resolve()  # the suite runs in it
    shutil.rmtree(folder, ignore_errors=True)
    (folder / PLUGINS).mkdir(parents=True)
    changes = folder / "all-events.json"
    with recorded(cluster, changes):
        # The report contains failed specs. Only a suite that did not run is an error here.
        if part.on_node:
            _run_on_node(cluster, programs, folder, _filters(part, focus))
        else:
            _run_here(cluster, programs, part, folder, _filters(part, focus), fault=fault)
    if not (report := folder / REPORT).exists():
        raise ClusterError(f"the suite wrote no report: see {folder / LOG}")
    found = specs(json.loads(report.read_text()))
    events = written(watched(changes.read_text()), found)
    (folder / "drakit-events.jsonl").write_text(as_lines(events))
    operator_log = _operator_log(cluster)
    (folder / "operator.log").write_text(operator_log)
    problems = [path.read_text().strip() for path in sorted(folder.glob(f"{PLUGINS}/*.problem"))]
    found_wrong = [*problems, *restarted(cluster), *complaints(operator_log)]
    return PartResult(specs=found, events=events, complaints=found_wrong)


@contextmanager
def recorded(cluster: Cluster, path: Path) -> Generator[None]:
    """Write all changes to Events to a file, because Events are deleted with their namespaces. A
    watch that ends early is an error."""
    argv = [
        *(cluster.program("kubectl"), "get", "events.v1.events.k8s.io", "--all-namespaces"),
        *("--watch", "--output-watch-events", "--output=json"),
    ]
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    with path.open("wb") as output, subprocess.Popen(argv, stdout=output, env=env) as watch:
        try:
            yield
            if watch.poll() is not None:
                raise ClusterError(f"the watch of Events ended early, with code {watch.returncode}")
        finally:
            watch.terminate()
            watch.wait(WATCH_STOP_SECONDS)


def _filters(part: Part, focus: str) -> dict[str, str]:
    """Return Ginkgo's options that select the specs."""
    skip = "|".join(not_applicable())
    chosen = {"label-filter": part.labels, "skip": skip, "timeout": f"{SUITE_SECONDS}s"}
    return {**chosen, "focus": focus} if focus else chosen


def _run_here(
    cluster: Cluster,
    programs: Programs,
    part: Part,
    folder: Path,
    filters: Mapping[str, str],
    *,
    fault: str,
) -> None:
    argv = [
        *(str(programs.ginkgo), f"--procs={PROCESSES}", "--no-color", "-v", "--keep-going"),
        *(f"--{name}={value}" for name, value in filters.items()),
        *(f"--output-dir={folder}", f"--json-report={REPORT}"),
        str(programs.drakit_suite if part.drakit else programs.suite),
        *("--", f"-kubeconfig={cluster.kubeconfig}", "-provider=skeleton"),
    ]
    under_test = {"DRAKIT_NAMESPACE": UNDER_TEST.namespace, "DRAKIT_LOGS": str(folder / PLUGINS)}
    if fault:
        under_test["DRAKIT_FAULT"] = str(fault_program(fault))
    with (folder / LOG).open("wb") as log:
        subprocess.run(
            argv,
            stdout=log,
            stderr=log,
            check=False,
            timeout=SUITE_SECONDS + 60,
            cwd=folder,
            env={**os.environ, **under_test},
        )


def _run_on_node(
    cluster: Cluster, programs: Programs, folder: Path, filters: Mapping[str, str]
) -> None:
    # The specs expect no slices except those of their driver.
    install(cluster, values={"nodeplugin": {"nodeSelector": ON_NO_NODE}})
    node = cluster.nodes[0]
    there = cluster.node_path(node, NODE_FOLDER)
    shutil.rmtree(there, ignore_errors=True)
    (there / PLUGINS).mkdir(parents=True)
    shutil.copy(programs.node_suite, there)
    # The API server's address in the nodes' network.
    admin = cluster.exec_on_node(CONTROL_PLANE, ["cat", "/etc/kubernetes/admin.conf"]).stdout
    (there / "kubeconfig").write_text(admin)
    argv = [
        *("env", f"DRAKIT_NODE={node}", f"DRAKIT_NAMESPACE={UNDER_TEST.namespace}"),
        f"DRAKIT_LOGS={NODE_FOLDER}/{PLUGINS}",
        *(f"{NODE_FOLDER}/{programs.node_suite.name}", "--ginkgo.v", "--ginkgo.no-color"),
        *(f"--ginkgo.{name}={value}" for name, value in filters.items()),
        f"--ginkgo.json-report={NODE_FOLDER}/{REPORT}",
        *(f"-kubeconfig={NODE_FOLDER}/kubeconfig", "-provider=skeleton"),
    ]
    ended = cluster.exec_on_node(node, argv, timeout=SUITE_SECONDS + 60, check=False)
    (folder / LOG).write_text(ended.stdout + ended.stderr)
    if (there / REPORT).exists():
        shutil.copy(there / REPORT, folder)
    shutil.copytree(there / PLUGINS, folder / PLUGINS, dirs_exist_ok=True)
    shutil.rmtree(there)


def restarted(cluster: Cluster) -> list[str]:
    """Return a sentence for each pod of drakit that restarted."""
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
        if line.startswith("{") and json.loads(line).get("level", "").lower() not in QUIET_LEVELS
    ]
