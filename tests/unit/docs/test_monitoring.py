"""The queries of docs/dashboards select metrics, labels and values that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import yaml

from drakit_nodeplugin.metrics import Metrics as NodePluginMetrics
from drakit_nodeplugin.reasons import NodeReason
from drakit_operator.metrics import Metrics as OperatorMetrics
from tests.unit.docs.listings import ROOT
from tools.reference.metrics import VALUES as CLOSED

DASHBOARD = json.loads((ROOT / "docs/dashboards/drakit.json").read_text())
ALERTS = yaml.safe_load((ROOT / "docs/dashboards/drakit-alerts.yaml").read_text())
PAGE = (ROOT / "docs/admin/monitor.md").read_text()

TARGET = {"job", "instance", "namespace", "pod", "node"}
"""Labels that the scrape configurations of the page add; `instance` is Prometheus' own."""

FUNCTIONS = {
    *("absent", "count", "histogram_quantile", "increase", "label_values", "max", "min", "rate"),
    *("sum", "and", "by", "or", "unless", "offset", "vector"),
}

SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",), "gauge": ("",)}


def metrics() -> dict[str, set[str]]:
    """The series of both daemons, and their labels."""
    found = {"up": set(TARGET)}
    for registry in (NodePluginMetrics().registry, OperatorMetrics().registry):
        for collector in set(registry._collector_to_names):
            (family,) = collector.describe()
            labels = set(getattr(collector, "_labelnames", ()))
            for suffix in SUFFIXES[family.type]:
                also = {"le"} if suffix == "_bucket" else set()
                found[family.name + suffix] = labels | also | TARGET
    return found


METRICS = metrics()
VALUES = {**CLOSED, ("drakit_endpoint_diagnostics_total", "reason"): get_args(NodeReason)}
"""Values of labels by metric; a label without them has any."""


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def queries() -> list[Any]:
    found = [(f"{p['title']}-{t['refId']}", t["expr"]) for p in panels() for t in p["targets"]]
    found += [(rule["alert"], rule["expr"]) for rule in rules()]
    variables = DASHBOARD["templating"]["list"]
    found += [(v["name"], v["definition"]) for v in variables if v["type"] == "query"]
    return [pytest.param(expression, id=name) for name, expression in found]


def matchers(text: str) -> list[tuple[str, str]]:
    return re.findall(r'(\w+)=~?"([^"]*)"', text)


@pytest.mark.parametrize("expression", queries())
def test_a_query_selects_series_that_exist(expression):
    selectors = re.findall(r"\b([a-z_]+)\{([^}]*)\}", expression)
    assert selectors
    allowed: set[str] = set()
    for name, text in selectors:
        assert name in METRICS, name
        allowed |= METRICS[name]
        given = matchers(text)
        assert ("job", "drakit") in given, "other programs may have metrics of this name"
        for label, value in given:
            assert label in METRICS[name], (name, label)
            values = VALUES.get((re.sub(r"_(bucket|count|sum)$", "", name), label))
            if values:
                assert set(value.split("|")) <= set(values), (name, label)
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        assert set(labels.split(", ")) <= allowed
    # Nothing but functions is left, so no metric is without a selector.
    rest = re.sub(r'\{[^}]*\}|by \([^)]*\)|"[^"]*"|\[[^]]*\]|\$\w+', "", expression)
    words = set(re.findall(r"[a-z_]{2,}", rest)) - {name for name, _ in selectors}
    assert words <= FUNCTIONS | {"node", "driver"}


def labels_of(expression: str) -> set[str]:
    """The labels of a query's result."""
    grouped = re.findall(r"by \(([^)]*)\)", expression)
    if grouped:
        return {*grouped[0].split(", ")} - {"le"}
    if expression.startswith("absent"):
        return {"job"}
    return METRICS[re.findall(r"\b([a-z_]+)\{", expression)[0]]


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["alert"]) for rule in rules()])
def test_an_alert_names_labels_that_its_query_has(rule):
    texts = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", texts)) <= labels_of(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_a_legend_names_labels_that_its_query_has():
    for panel in panels():
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= labels_of(target["expr"]), panel["title"]


def test_every_metric_is_on_the_dashboard():
    text = json.dumps([t["expr"] for panel in panels() for t in panel["targets"]])
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in METRICS}
    assert {name for name in families if name not in text} == set()


def test_the_page_lists_every_alert():
    assert re.findall(r"^\| `(Drakit\w+)` \|", PAGE, re.M) == [rule["alert"] for rule in rules()]


def test_the_log_messages_to_search_for_exist():
    texts = PAGE + json.dumps(ALERTS)
    searched = [*re.findall(r"""[Ss]earch [^.]*?for ['"`\\]*([a-z ]+)""", texts), "probe fails"]
    code = "\n".join(
        p.read_text() for f in ("nodeplugin", "daemon") for p in (ROOT / f).rglob("*.py")
    )
    assert {"rejected", "slices not published"} <= set(searched)
    for message in searched:
        assert re.search(rf'"[^"\n]*{message}[^"\n]*"', code), message
