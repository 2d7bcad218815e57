"""Probes of both daemons, while slow clients on the pod network occupy their ports."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.cluster.api import Cluster
from e2e.kit import NAMESPACE, OPERATOR, holds_for, plugin_pod, ready, restarts

pytestmark = [pytest.mark.e2e, pytest.mark.feature("release")]

PORTS = {"probes": 8081, "metrics": 8080}
ATTACK_SECONDS = 18
"""Longer than the kubelet needs to mark a pod unready: three probes, three seconds apart."""

SLOW_CLIENTS = r"""
trap '' PIPE
for port in {ports}; do for i in $(seq 50); do
  (while :; do
    {{ exec 3<>/dev/tcp/{address}/$port; }} 2>/dev/null || {{ sleep 0.2; continue; }}
    printf G >&3; sleep 1.5; printf E >&3; sleep 1.5
  done 2>/dev/null) &
done; done
sleep {seconds}; kill $(jobs -p); true
"""


@contextmanager
def slow_clients(cluster: Cluster, body: dict[str, Any]) -> Generator[None]:
    """Open fifty connections to each port of a pod, which send a byte every 1.5 s."""
    node, address = body["spec"]["nodeName"], body["status"]["podIP"]
    ports = " ".join(map(str, PORTS.values()))
    script = SLOW_CLIENTS.format(address=address, ports=ports, seconds=ATTACK_SECONDS)
    thread = threading.Thread(target=cluster.exec_on_node, args=(node, ["bash", "-c", script]))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def operator_pod(cluster: Cluster) -> dict[str, Any]:
    return cluster.get("pods", "-n", NAMESPACE, "-l", OPERATOR)["items"][0]


@pytest.mark.slow
@pytest.mark.parametrize("component", ["nodeplugin", "operator"])
def test_slow_clients_on_the_pod_network_fail_no_probe_and_no_scrape(release, component):
    def look() -> dict[str, Any]:
        found = (
            plugin_pod(release, release.nodes[0])
            if component == "nodeplugin"
            else operator_pod(release)
        )
        assert found is not None
        return found

    before = look()
    name = before["metadata"]["name"]
    scrape = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}:{PORTS['metrics']}/proxy/metrics"
    assert ready(before)
    with slow_clients(release, before):
        holds_for("the pod is ready", lambda: ready(look()), seconds=ATTACK_SECONDS - 3)
        assert "drakit_" in release.kubectl("get", "--raw", scrape).stdout
    after = look()
    assert (after["metadata"]["uid"], restarts(after)) == (
        before["metadata"]["uid"],
        restarts(before),
    )
