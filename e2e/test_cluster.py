"""
Tests of the clusters themselves: that they are real, that faults have their effect, and that
nothing is left behind.

These tests cover only the test infrastructure; drakit is not installed.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from e2e.archive import write_image
from e2e.cluster.api import CONTROL_PLANE, Capability, Cluster, Component, Options, wait_until
from e2e.cluster.choice import cluster as choose_cluster
from e2e.cluster.local.control_plane import discovery_cache

pytestmark = [pytest.mark.e2e, pytest.mark.feature("cluster")]

IMAGE = "localhost/drakit-busybox:dev"
POD = "rig"

# It calls the API server through the service's address with its ServiceAccount's token, and prints
# `reached` or `cut` each time. Without TLS, the server responds with an error, which shows that it
# was reached.
SCRIPT = """
echo "hello from $(hostname)"
test -s /var/run/secrets/kubernetes.io/serviceaccount/token && echo "has a token"
while :; do
  if printf 'GET / HTTP/1.0\\r\\n\\r\\n' | timeout 2 nc 10.96.0.1 443 | grep -q HTTP
  then echo reached; else echo cut; fi
  sleep 0.5
done
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "busybox.tar"
    commands = ("sh", "hostname", "test", "echo", "printf", "timeout", "nc", "grep", "sleep")
    write_image(
        path,
        name=IMAGE,
        files={"/bin/busybox": (Path("/bin/busybox"), 0o755)},
        links={f"/bin/{command}": "busybox" for command in commands},
        env={"PATH": "/bin"},
    )
    return path


def manifest(node: str) -> str:
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", SCRIPT],
    }
    spec = {
        "nodeName": node,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    metadata = {"name": POD, "namespace": "default"}
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


@pytest.fixture(scope="module")
def pod(cluster: Cluster, image: Path) -> Iterator[str]:
    """A pod on the last node that keeps calling the API server."""
    cluster.load_image(image)
    cluster.apply(manifest(cluster.nodes[-1]))
    cluster.kubectl("wait", "--for=condition=Ready", f"pod/{POD}", "--timeout=60s", timeout=70)
    yield POD
    cluster.kubectl("delete", "pod", POD, "--grace-period=0", "--force")


def said(cluster: Cluster) -> list[str]:
    return cluster.kubectl("logs", POD).stdout.splitlines()


def wait_said(cluster: Cluster, word: str, *, timeout_seconds: float = 30) -> None:
    """Wait until the pod prints a word, from now on."""

    def says() -> bool:
        # While the API server is unavailable, there are no logs to read.
        found = cluster.kubectl("logs", POD, "--since=2s", check=False)
        return found.returncode == 0 and found.stdout.split()[-1:] == [word]

    wait_until(f"the pod says {word}", says, timeout_seconds=timeout_seconds)


# ------------------------------------------------------------ a real cluster


@pytest.mark.needs(Capability.CONTROL_PLANE_ALONE)
def test_kubectl_caches_resources_in_the_folder_that_a_new_cluster_removes(cluster: Cluster):
    cluster.kubectl("get", "nodes")
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    port = urlsplit(config["clusters"][0]["cluster"]["server"]).port
    assert port is not None
    assert discovery_cache(port).is_dir()


def test_every_node_is_ready_and_runs_the_same_kubernetes(cluster: Cluster):
    cluster.wait_for_nodes()
    versions = {
        node["status"]["nodeInfo"]["kubeletVersion"] for node in cluster.get("nodes")["items"]
    }
    server = json.loads(cluster.kubectl("get", "--raw", "/version").stdout)["gitVersion"]
    assert versions == {server}


def test_a_pod_runs_prints_and_reaches_the_api_server(cluster: Cluster, pod: str):
    wait_said(cluster, "reached")
    assert said(cluster)[:2] == [f"hello from {pod}", "has a token"]


@pytest.mark.needs(Capability.REBOOT)
def test_a_node_has_a_file_system_of_its_own(cluster: Cluster):
    node = cluster.nodes[0]
    cluster.exec_on_node(node, ["touch", "/var/run/cdi/probe", "/etc/cdi/probe"])
    try:
        for folder in ("/var/run/cdi", "/etc/cdi"):
            assert (cluster.node_path(node, folder) / "probe").exists()
            assert not Path(folder, "probe").exists()
        for other in cluster.nodes[1:]:
            assert not (cluster.node_path(other, "/var/run/cdi") / "probe").exists()
    finally:
        cluster.exec_on_node(node, ["rm", "-f", "/var/run/cdi/probe", "/etc/cdi/probe"])


# ------------------------------------------------------------ faults


@pytest.mark.needs(Capability.CUT)
@pytest.mark.disruptive
def test_a_node_is_cut_from_the_api_server_and_healed(cluster: Cluster, pod: str):
    node = cluster.nodes[-1]
    cluster.cut_node(node)
    try:
        # The kubelet does not reach the API server, either.
        failed = cluster.kubectl("logs", pod, "--request-timeout=3s", check=False)
        assert failed.returncode != 0
    finally:
        cluster.heal_node(node)
    wait_said(cluster, "reached", timeout_seconds=60)


@pytest.mark.needs(Capability.STOP_API_SERVER)
@pytest.mark.disruptive
def test_the_api_server_is_stopped_and_comes_back_with_its_objects(cluster: Cluster, pod: str):
    cluster.stop_api_server()
    try:
        assert cluster.kubectl("get", "pods", check=False).returncode != 0
    finally:
        cluster.start_api_server()
    assert cluster.get("pod", pod)["status"]["phase"] == "Running"
    wait_said(cluster, "reached")


@pytest.mark.needs(Capability.FREEZE)
@pytest.mark.disruptive
def test_a_frozen_scheduler_binds_nothing_until_it_thaws(cluster: Cluster, image: Path):
    cluster.load_image(image)
    spec = {"containers": [{"name": "main", "image": IMAGE, "imagePullPolicy": "Never"}]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "frozen"}, "spec": spec}

    def bound() -> bool:
        return "nodeName" in cluster.get("pod", "frozen")["spec"]

    cluster.freeze(CONTROL_PLANE, Component.SCHEDULER)
    try:
        cluster.apply(json.dumps(body))
        with pytest.raises(Exception, match="the pod is bound"):
            wait_until("the pod is bound", bound, timeout_seconds=2)
    finally:
        cluster.thaw(CONTROL_PLANE, Component.SCHEDULER)
    wait_until("the pod is bound", bound, timeout_seconds=60)
    cluster.kubectl("delete", "pod", "frozen", "--grace-period=0", "--force")


@pytest.mark.disruptive
def test_a_component_that_was_killed_is_started_again(cluster: Cluster):
    cluster.kill(CONTROL_PLANE, Component.CONTROLLER_MANAGER)
    cluster.start_component(CONTROL_PLANE, Component.CONTROLLER_MANAGER)
    # The controller manager creates a namespace's ServiceAccount.
    cluster.kubectl("create", "namespace", "rig-killed")
    wait_until(
        "the controller manager works again",
        lambda: (
            cluster.kubectl(
                "get", "serviceaccount", "default", "-n", "rig-killed", check=False
            ).returncode
            == 0
        ),
        timeout_seconds=60,
    )
    cluster.kubectl("delete", "namespace", "rig-killed", "--wait=false")


@pytest.mark.needs(Capability.REBOOT)
@pytest.mark.disruptive
def test_a_node_is_rebooted(cluster: Cluster, pod: str):
    node = cluster.nodes[-1]
    boot_id = cluster.node_path(node, cluster.boot_id_file()).read_text()
    restarts = cluster.get("pod", pod)["status"]["containerStatuses"][0]["restartCount"]
    cluster.exec_on_node(node, ["touch", "/run/volatile", "/etc/cdi/lasting"])
    cluster.reboot_node(node)
    assert cluster.node_path(node, cluster.boot_id_file()).read_text() != boot_id
    assert not cluster.node_path(node, "/run/volatile").exists()
    assert cluster.node_path(node, "/etc/cdi/lasting").exists()
    cluster.exec_on_node(node, ["rm", "/etc/cdi/lasting"])

    def restarted() -> bool:
        status = cluster.get("pod", pod)["status"]["containerStatuses"][0]
        return status["restartCount"] > restarts and status["ready"]

    wait_until("the pod's container runs again", restarted, timeout_seconds=90)
    wait_said(cluster, "reached")


# ------------------------------------------------------------ clusters start and stop


@pytest.mark.needs(Capability.CONTROL_PLANE_ALONE)
@pytest.mark.slow
@pytest.mark.disruptive
def test_a_start_repairs_what_a_failed_test_left_behind(cluster: Cluster):
    node = cluster.nodes[0]
    cluster.stop_api_server()
    cluster.freeze(CONTROL_PLANE, Component.SCHEDULER)
    cluster.kill(CONTROL_PLANE, Component.CONTROLLER_MANAGER)
    cluster.kill(node, Component.CONTAINERD)
    cluster.kill(node, Component.KUBELET)
    cluster.cut_node(node)
    # A cluster of the session belongs to the session, like this process.
    cluster.start(Options(nodes=len(cluster.nodes), gates=cluster.gates))
    cluster.kubectl("create", "namespace", "rig-mended")
    cluster.kubectl("delete", "namespace", "rig-mended")
    running = cluster.exec_on_node(node, ["ps", "-e", "-o", "comm="]).stdout.split()
    assert {"containerd", "kubelet"} <= set(running)
    rules = cluster.exec_on_node(node, ["iptables", "-t", "mangle", "-S"]).stdout
    assert "DROP" not in rules


@pytest.fixture
def other(cluster: Cluster) -> Iterator[Cluster]:
    """A second cluster in addition to the session's, which is not started."""
    chosen = choose_cluster(f"{cluster.name}-beside")
    yield chosen
    chosen.stop()
    assert chosen.leftovers() == []


def firewall() -> list[str]:
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    return [line for line in rules.splitlines() if line.startswith("-A")]


@pytest.mark.needs(Capability.CONTROL_PLANE_ALONE)
@pytest.mark.slow
def test_two_clusters_run_side_by_side_and_one_leaves_nothing(cluster: Cluster, other: Cluster):
    rules = firewall()
    other.start(Options(nodes=1))
    cluster.kubectl("create", "configmap", "rig-here")
    try:
        names = other.kubectl("get", "configmaps", "-o", "name").stdout
        assert "rig-here" not in names
        assert other.is_up()
        assert other.leftovers() != []
    finally:
        cluster.kubectl("delete", "configmap", "rig-here")
    other.stop()
    assert other.leftovers() == []
    assert firewall() == rules
    assert not other.is_up()
    assert cluster.is_up()
    cluster.wait_for_nodes()


def start_elsewhere(name: str, *, kept: bool) -> subprocess.Popen[str]:
    """Start a cluster from another process, which then waits."""
    script = (
        "from e2e.cluster.api import Options\n"
        "from e2e.cluster.choice import cluster\n"
        f"cluster({name!r}).start(Options(nodes=1, kept={kept}))\n"
        "print('started', flush=True); input()\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def kill(starter: subprocess.Popen[str]) -> None:
    with starter:
        os.kill(starter.pid, signal.SIGKILL)


@pytest.mark.needs(Capability.CONTROL_PLANE_ALONE)
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["control-plane", "node-1"])
def test_a_start_that_was_killed_in_the_middle_is_cleared_by_the_next(other: Cluster, moment: str):
    starter = start_elsewhere(other.name, kept=True)
    # The full error is in the cluster's folder, also for processes that only have its message.
    wait_until(
        f"{moment} is being made",
        lambda: any(f" {moment}" in sentence for sentence in other.leftovers()),
        timeout_seconds=60,
        interval_seconds=0.05,
    )
    kill(starter)
    assert other.leftovers() != []
    assert not other.is_up()
    other.start(Options(nodes=0))
    assert other.nodes == []
    assert other.is_up()


@pytest.mark.needs(Capability.CONTROL_PLANE_ALONE)
@pytest.mark.slow
def test_a_cluster_whose_owner_died_is_a_remain_also_for_others(other: Cluster):
    starter = start_elsewhere(other.name, kept=False)
    assert starter.stdout is not None
    wait_until("it has started", lambda: "started" in starter.stdout.readline(), timeout_seconds=90)
    assert other.is_up()
    with pytest.raises(Exception, match="uses cluster"):
        other.start(Options(nodes=1))
    kill(starter)
    assert not other.is_up()
    third = choose_cluster(f"{other.name}-third")
    try:
        third.start(Options(nodes=0))
        assert other.leftovers() == []
    finally:
        third.stop()


@pytest.mark.needs(Capability.CONTROL_PLANE_ALONE)
@pytest.mark.slow
def test_a_kept_cluster_outlives_its_starter(other: Cluster):
    starter = start_elsewhere(other.name, kept=True)
    assert starter.stdout is not None
    wait_until("it has started", lambda: "started" in starter.stdout.readline(), timeout_seconds=90)
    kill(starter)
    assert other.is_up()
    assert other.nodes == ["node-1"]


@pytest.mark.slow
@pytest.mark.needs(Capability.DISK, Capability.REBOOT)
def test_a_disk_of_a_node_is_small_and_survives_a_reboot(cluster: Cluster):
    node, path = cluster.nodes[0], "/var/lib/kubelet/rig-disk"
    cluster.give_disk(node, path, mib=8)
    (cluster.node_path(node, path) / "kept").write_text("kept")
    cluster.reboot_node(node)
    cluster.wait_for_nodes()
    assert (cluster.node_path(node, path) / "kept").read_text() == "kept"
    fill = ["dd", "if=/dev/zero", f"of={path}/full", "bs=1M", "count=16"]
    assert "No space left" in cluster.exec_on_node(node, fill, check=False).stderr


@pytest.mark.slow
@pytest.mark.needs(Capability.COMPACTION)
def test_a_watch_from_before_a_compaction_and_a_restart_must_list_again(cluster: Cluster):
    path = "/api/v1/nodes"
    listed = json.loads(cluster.kubectl("get", "--raw", path).stdout)
    version = listed["metadata"]["resourceVersion"]
    old = f"{path}?watch=1&timeoutSeconds=1&resourceVersion={version}"
    assert "Expired" not in cluster.kubectl("get", "--raw", old).stdout
    cluster.kubectl("annotate", "node", cluster.nodes[0], "rig=1", "--overwrite")
    cluster.stop_api_server()
    cluster.compact()
    cluster.start_api_server()
    found = cluster.kubectl("get", "--raw", old, check=False)
    assert "Expired" in found.stdout + found.stderr
    cluster.kubectl("annotate", "node", cluster.nodes[0], "rig-")
