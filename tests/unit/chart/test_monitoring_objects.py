"""The objects that collect and show metrics: off by default, and the same as the files in docs."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.unit.chart.reading import the
from tests.unit.docs.listings import ROOT

ALERTS = yaml.safe_load((ROOT / "docs/dashboards/drakit-alerts.yaml").read_text())
DASHBOARD = json.loads((ROOT / "docs/dashboards/drakit.json").read_text())

KINDS = {"podMonitor": "PodMonitor", "prometheusRule": "PrometheusRule"}
WORKLOADS = [("DaemonSet", "drakit-nodeplugin"), ("Deployment", "drakit-operator")]


def enabled(section: str, **values) -> dict:
    return {"metrics": {section: {"enabled": True, **values}}}


def test_nothing_is_installed_by_default(render):
    found = {(body["kind"], body["metadata"]["name"]) for body in render()}
    assert not {kind for kind, _ in found} & {*KINDS.values()}
    assert ("ConfigMap", "drakit-dashboard") not in found


@pytest.mark.parametrize("section", KINDS)
def test_an_object_has_the_labels_that_a_prometheus_selects(render, section):
    body = the(render(enabled(section, labels={"release": "mine"})), KINDS[section], "drakit")
    assert body["metadata"]["namespace"] == "drakit-system"
    assert body["metadata"]["labels"]["release"] == "mine"
    assert body["metadata"]["labels"]["app.kubernetes.io/part-of"] == "drakit"


@pytest.mark.parametrize(("kind", "name"), WORKLOADS)
def test_the_pod_monitor_selects_each_component_of_its_release(render, kind, name):
    objects = render(enabled("podMonitor", interval="15s"))
    monitor = the(objects, "PodMonitor", "drakit")["spec"]
    template = the(objects, kind, name)["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == "drakit"
    (endpoint,) = monitor["podMetricsEndpoints"]
    (container,) = template["spec"]["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]
    assert endpoint["interval"] == "15s"
    assert [rule["targetLabel"] for rule in endpoint["relabelings"]] == ["node"]
    others = render(enabled("podMonitor"), release="drakit-two")
    labels = the(others, kind, name.replace("drakit", "drakit-two"))["spec"]["template"]["metadata"]
    assert not monitor["selector"]["matchLabels"].items() <= labels["labels"].items()


def test_the_rule_object_has_the_rules_of_the_file(render):
    body = the(render(enabled("prometheusRule")), "PrometheusRule", "drakit")
    assert body["spec"] == ALERTS


def test_an_alert_can_be_omitted(render):
    values = enabled("prometheusRule", disabled={"DrakitPodsWait": True, "DrakitSlicesFail": False})
    ((rules,),) = [
        [group["rules"] for group in body["spec"]["groups"]]
        for body in render(values)
        if body["kind"] == "PrometheusRule"
    ]
    expected = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert rules == [rule for rule in expected if rule["alert"] != "DrakitPodsWait"]


def test_the_config_map_has_the_dashboard_and_the_label_of_the_sidecar(render):
    objects = render(enabled("dashboard", annotations={"grafana_folder": "Devices"}))
    body = the(objects, "ConfigMap", "drakit-dashboard")
    assert {name: json.loads(text) for name, text in body["data"].items()} == {
        "drakit.json": DASHBOARD
    }
    assert body["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert body["metadata"]["annotations"] == {"grafana_folder": "Devices"}


def test_the_node_plugin_names_the_devices_of_pods_only_if_asked_to(render):
    def settings(values: dict) -> dict:
        data = the(render(values), "ConfigMap", "drakit-nodeplugin")["data"]
        return yaml.safe_load(data["nodeplugin.yaml"])

    assert "metrics" not in settings({})
    assert settings({"metrics": {"podDevices": True}})["metrics"] == {"podDevices": True}
