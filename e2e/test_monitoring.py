"""
Prometheus scrapes a cluster of two nodes: each query of the dashboard returns data, and alerts
fire.

Its configuration is the page's, with short intervals. The rules are the chart's, with shorter
times: `promtool` tests the times themselves (tests/unit/docs/test_alerts.py).
"""

from __future__ import annotations

import json
import math
import re
import textwrap
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.api import Cluster
from e2e.images.prometheus import BUILD_SECONDS, IMAGE, prometheus_image
from e2e.kit import (
    DRIVER,
    NAMESPACE,
    claim,
    device_class,
    devices_of,
    from_claim,
    pod,
    ready,
    wait_for,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,  # Prometheus is built from source, and alerts wait for minutes
    pytest.mark.feature("monitoring"),
    pytest.mark.timeout(BUILD_SECONDS),  # the first test builds Prometheus
]

ROOT = Path(__file__).parents[1]
FILES = ROOT / "charts" / "drakit" / "files"
PAGE = (ROOT / "docs/admin/monitor.md").read_text()

PROMETHEUS = "e2e-prometheus"
"""The namespace of Prometheus, and the name of its objects."""

DASHBOARD = json.loads((FILES / "drakit.json").read_text())
QUERIES = {
    f"{panel['title']}: {target['expr']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
}
VARIABLES = {"$node": ".*", "$driver": ".*", "$__rate_interval": "2m"}


def scrape_config() -> dict[str, Any]:
    """Return the configuration of the page."""
    (text,) = re.findall(r'^ *```yaml title="scrape.yaml"\n(.*?)^ *```', PAGE, re.M | re.S)
    return yaml.safe_load(textwrap.dedent(text))


def short_rules() -> dict[str, Any]:
    """Return the rules of the chart, with seconds instead of minutes."""
    rules = yaml.safe_load((FILES / "drakit-alerts.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "3s"
            rule["expr"] = re.sub(r"> (300|1800)\b", "> 5", rule["expr"])
    return rules


def objects() -> list[dict[str, Any]]:
    """Return a pod with Prometheus that may list pods."""
    named = {"name": PROMETHEUS}
    config = {
        "global": {"scrape_interval": "3s", "evaluation_interval": "2s"},
        "rule_files": ["/config/rules.yaml"],
        **scrape_config(),
    }
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    subject = {"kind": "ServiceAccount", "name": PROMETHEUS, "namespace": PROMETHEUS}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": PROMETHEUS}
    spec = {
        "serviceAccountName": PROMETHEUS,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsUser": 65534, "runAsGroup": 65534, "fsGroup": 65534},
        "containers": [
            {
                "name": "prometheus",
                "image": IMAGE,
                "imagePullPolicy": "Never",
                "args": ["--config.file=/config/prometheus.yaml", "--storage.tsdb.path=/data"],
                "readinessProbe": {"httpGet": {"path": "/-/ready", "port": 9090}},
                "volumeMounts": [
                    {"name": "config", "mountPath": "/config"},
                    {"name": "data", "mountPath": "/data"},
                ],
            }
        ],
        "volumes": [
            {"name": "config", "configMap": named},
            {"name": "data", "emptyDir": {}},
        ],
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": named},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": named,
            "rules": [rule],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": named,
            "roleRef": role,
            "subjects": [subject],
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": named,
            "data": {
                "prometheus.yaml": yaml.safe_dump(config),
                "rules.yaml": yaml.safe_dump(short_rules()),
            },
        },
        {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": spec},
    ]


class Prometheus:
    """Queries through the API server's proxy."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the value of each series."""
        words = urllib.parse.urlencode({"query": expression})
        path = f"/api/v1/namespaces/{PROMETHEUS}/pods/{PROMETHEUS}:9090/proxy/api/v1/query?{words}"
        found = json.loads(self.cluster.kubectl("get", "--raw", path).stdout)
        assert found["status"] == "success", found
        return [(each["metric"], float(each["value"][1])) for each in found["data"]["result"]]

    def firing(self) -> set[tuple[str, str]]:
        """Return the name of each firing alert, with the value of its relevant label."""
        return {
            (labels["alertname"], labels.get("device_class") or labels.get("driver", ""))
            for labels, _ in self.query('ALERTS{alertstate="firing"}')
        }


@pytest.fixture(scope="module")
def prometheus(release: Cluster) -> Iterator[Prometheus]:
    release.load_image(prometheus_image())
    release.kubectl("create", "namespace", PROMETHEUS)
    listing = {"apiVersion": "v1", "kind": "List", "items": objects()}
    release.kubectl("-n", PROMETHEUS, "apply", "-f", "-", input=json.dumps(listing))
    release.kubectl(
        *("-n", PROMETHEUS, "wait", f"pod/{PROMETHEUS}", "--for=condition=Ready"),
        "--timeout=120s",
        timeout=150,
    )
    yield Prometheus(release)
    for kind in ("clusterrole", "clusterrolebinding"):
        release.kubectl("delete", kind, PROMETHEUS)
    release.kubectl("delete", "namespace", PROMETHEUS, "--wait=false")


def zram_pod(name: str, device_class_name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a claim of a device, and a pod that uses it."""
    return claim(name, ("disk", device_class_name)), pod(name, ("disk", from_claim(name)))


def test_prometheus_scrapes_every_pod_with_the_labels_of_the_rules(release, prometheus):
    def scraped() -> list[dict[str, str]]:
        up = prometheus.query('up{job="drakit"} == 1')
        return [labels for labels, _ in up] if len(up) >= 4 else []

    found = wait_for("both operators and both node plugins to be scraped", scraped)
    pods = release.get("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/part-of=drakit")["items"]
    assert {(each["namespace"], each["pod"], each["node"]) for each in found} == {
        (NAMESPACE, body["metadata"]["name"], body["spec"]["nodeName"])
        for body in pods
        if ready(body)
    }
    # Every variable of the dashboard has values.
    plugins = prometheus.query('drakit_driver_registered{job="drakit"}')
    assert {labels["node"] for labels, _ in plugins} == set(release.nodes[:2])
    assert {labels["driver"] for labels, _ in plugins} == {DRIVER}


def test_every_query_of_the_dashboard_returns_data(release, prometheus, space):
    space.apply(*zram_pod("first", "zram.test"), *zram_pod("second", "zram-second.test"))
    for name in ("first", "second"):
        space.wait_phase(name, "Running")

    def without_data() -> list[str]:
        missing: list[str] = []
        for title, query in QUERIES.items():
            expression = query
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            found = prometheus.query(expression)
            if not any(not math.isnan(number) for _, number in found):
                missing.append(title)
        return missing

    end = time.monotonic() + 90
    while (missing := without_data()) and time.monotonic() < end:
        time.sleep(3)
    assert missing == []


def test_the_metrics_show_the_device_of_a_pod_and_the_steps_of_its_prepare(
    release, prometheus, space
):
    space.apply(*zram_pod("shown", "zram.test"))
    space.wait_phase("shown", "Running")
    (device,) = devices_of(space.claim_of("shown", "disk"))

    def shown() -> list[dict[str, str]]:
        pods = f'drakit_pod_devices{{job="drakit",pod_namespace="{space.name}"}} == 1'
        return [labels for labels, _ in prometheus.query(pods)]

    (labels,) = wait_for("the device of the pod to be in Prometheus", shown)
    assert (labels["pod_name"], labels["device"]) == ("shown", device)
    assert (labels["node"], labels["driver"]) == (release.nodes[0], DRIVER)
    # Both come from one scrape, so their sums agree.
    steps = "sum by (pod) (drakit_claim_prepare_step_duration_seconds_sum{job='drakit'})"
    total = (
        "sum by (pod) (drakit_claim_operation_duration_seconds_sum"
        "{job='drakit',operation='prepare'})"
    )
    differences = prometheus.query(f"abs({steps} - {total}) / {total}")
    assert differences
    assert max(value for _, value in differences) < 0.01
    space.delete("pod", "shown")
    wait_for("the device of the pod to be gone", lambda: not shown())


@pytest.fixture
def missing_class(release) -> Iterator[str]:
    """A class without devices."""
    name = "nothing.test"
    release.apply(json.dumps(device_class(name, DRIVER, "false")))
    yield name
    release.kubectl("delete", "deviceclass", name)


def test_pods_that_wait_are_alerts(release, prometheus, space, missing_class):
    def firing() -> set[tuple[str, str]]:
        names = ("DrakitNoFreeDevice", "DrakitPodsWait")
        return {each for each in prometheus.firing() if each[0] in names}

    def expect(*alerts: tuple[str, str]) -> None:
        wait_for(f"{alerts} to fire alone", lambda: firing() == set(alerts), seconds=120)

    expect()
    of_second = [zram_pod(f"second-{number}", "zram-second.test") for number in range(3)]
    space.apply(*(body for bodies in of_second for body in bodies))
    expect(("DrakitNoFreeDevice", "zram-second.test"))
    big = claim("big", {"name": "disk", "exactly": {"deviceClassName": "zram.test", "count": 9}})
    space.apply(big, pod("big", ("disk", from_claim("big"))), *zram_pod("none", missing_class))
    expect(
        ("DrakitNoFreeDevice", "zram-second.test"),
        ("DrakitNoFreeDevice", missing_class),
        ("DrakitPodsWait", "zram.test"),
    )
    space.kubectl("delete", "pods,resourceclaims", "--all", "--wait=false")
    expect()


@pytest.fixture
def patch_plugin(release) -> Iterator[Any]:
    """Restrict the node plugin to nodes, and undo that at the end."""

    def patch(selector: dict[str, str] | None) -> None:
        change = {"spec": {"template": {"spec": {"nodeSelector": selector}}}}
        release.kubectl(
            *("-n", NAMESPACE, "patch", "daemonset", "drakit-nodeplugin", "--type=merge"),
            *("--patch", json.dumps(change)),
        )

    yield patch
    patch(None)
    release.kubectl(
        *("-n", NAMESPACE, "rollout", "status", "daemonset/drakit-nodeplugin"),
        "--timeout=120s",
        timeout=150,
    )


def test_a_node_without_a_node_plugin_is_an_alert(release, prometheus, space, patch_plugin):
    def fires() -> bool:
        return ("DrakitNodeWithoutPlugin", DRIVER) in prometheus.firing()

    wait_for("the alert not to fire", lambda: not fires())
    patch_plugin({"kubernetes.io/hostname": release.nodes[0]})
    # The kubelet deletes the slices after 30 s, and the operator waits for another minute.
    wait_for("the alert about the second node to fire", fires, seconds=180)
    nodes = f'drakit_operator_driver_nodes{{job="drakit",driver="{DRIVER}",state="%s"}}'
    difference = f"sum({nodes % 'desired'}) - sum({nodes % 'registered'})"
    ((_, missing),) = prometheus.query(difference)
    assert missing == 1
    patch_plugin(None)
    wait_for("the alert to end", lambda: not fires(), seconds=120)
