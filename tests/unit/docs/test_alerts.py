"""
Only the intended alert rule fires in each case, and none fires while nothing is wrong, according to
`promtool`.

Each case is a healthy cluster of two nodes in which few series differ. It ends shortly after the
time that the rule waits.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from e2e.images.prometheus import BUILD_SECONDS
from tests import programs
from tests.unit.docs.listings import ROOT

FILE = ROOT / "charts/drakit/files/drakit-alerts.yaml"
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load(FILE.read_text())["groups"]
    for rule in group["rules"]
}

NODES = ("node-1", "node-2")
DRIVERS = ("gpu.example.com", "hostdev.drakit.dev")
GPU, HOSTDEV = DRIVERS
NAMESPACE = {"namespace": "drakit-system"}

ALWAYS = 400
"""Samples of each series, two per minute."""


def selector(name: str, labels: Mapping[str, str]) -> str:
    text = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return f"{name}{{{text}}}"


def series(name: str, labels: Mapping[str, str]) -> str:
    return selector(name, {"job": "drakit", **labels})


def constant(value: float) -> str:
    return f"{value}x{ALWAYS}"


def rising(by: float) -> str:
    return f"0+{by}x{ALWAYS}"


def healthy() -> dict[str, str]:
    """The values of all series of a cluster in which nothing is wrong."""
    found: dict[str, str] = {}

    def add(name: str, value: str, **labels: str) -> None:
        found[series(name, labels)] = value

    operator = {**NAMESPACE, "pod": "operator-a", "node": "node-1"}
    standby = {**NAMESPACE, "pod": "operator-b", "node": "node-2"}
    for labels, leads in ((operator, 1), (standby, 0)):
        add("up", constant(1), **labels)
        add("drakit_operator_leader", constant(leads), **labels)
    for kind in ("pods", "resourceclaims.resource.k8s.io"):
        add("drakit_operator_kind_listed", constant(1), kind=kind, **operator)
    for state, number in (("ready", 4), ("outdated", 1), *((s, 0) for s in BAD_POOLS)):
        add("drakit_operator_pools", constant(number), state=state, **operator)
    for driver in DRIVERS:
        for state in ("desired", "registered", "publishing"):
            labels = {"driver": driver, "state": state, **operator}
            add("drakit_operator_driver_nodes", constant(2), **labels)
        for condition in ("Registered", "ClaimsReleased"):
            labels = {"driver": driver, "condition": condition, **operator}
            add("drakit_operator_driver_problems", constant(0), **labels)
    # The class `used` has no free device, and no pod waits for it; pods wait for `free` briefly.
    for name, free, allocated, wait in (("used", 0, 4, "0"), ("free", 2, 2, "0 30 60 0")):
        for state, number in (("free", free), ("allocated", allocated)):
            labels = {"device_class": name, "state": state, **operator}
            add("drakit_operator_class_devices", constant(number), **labels)
        values = " ".join([wait] * (ALWAYS // 4)) if " " in wait else constant(0)
        add("drakit_operator_longest_wait_seconds", values, device_class=name, **operator)
    for node in NODES:
        pod = {**NAMESPACE, "pod": f"nodeplugin-{node}", "node": node}
        add("up", constant(1), **pod)
        for driver in DRIVERS:
            labels = {"driver": driver, **pod}
            for name in ("registered", "running"):
                add(f"drakit_driver_{name}", constant(1), **labels)
            for name in ZEROS:
                add(name, constant(0), **labels)
            # Claims come and go all the time: at each scrape, one is being prepared.
            for state, number in (("prepared", 3), ("preparing", 1)):
                add("drakit_claims", constant(number), state=state, **labels)
            for state in ("free", "unhealthy"):
                number = 2 if state == "free" else 0
                add("drakit_devices", constant(number), pool=node, state=state, **labels)
            for bound, rate in (("0.01", 10), ("0.5", 10), ("2.5", 10), ("+Inf", 10)):
                add(TRANSACTIONS, rising(rate), le=bound, **labels)
            # A user's mistakes must not cause an alert.
            labels = {"operation": "prepare", "reason": "BadConfig", **labels}
            add("drakit_claim_errors_total", rising(1), **labels)
    return found


BAD_POOLS = ("node-missing", "conflicting", "invalid", "incomplete")
TRANSACTIONS = "drakit_checkpoint_transaction_duration_seconds_bucket"
ZEROS = (
    "drakit_claims_stuck",
    *("drakit_driver_blocked", "drakit_checkpoint_unusable", "drakit_checkpoint_damaged"),
    *("drakit_rejected_devices", "drakit_slices_failing", "drakit_slice_fields_dropped"),
)

OPERATOR = {**NAMESPACE, "pod": "operator-a", "node": "node-1"}
STANDBY = {**NAMESPACE, "pod": "operator-b", "node": "node-2"}
PLUGIN = {**NAMESPACE, "pod": "nodeplugin-node-2", "node": "node-2"}
OF_GPU = {"driver": GPU, **PLUGIN}
ON_NODE = {"driver": GPU, "node": "node-2"}
OF_DRIVER = {"driver": GPU, **NAMESPACE}


@dataclass(frozen=True, kw_only=True)
class Case:
    """The differences from a healthy cluster, and the labels of the alert that fires."""

    labels: Mapping[str, str]
    changed: Mapping[str, str] = field(default_factory=dict[str, str])
    without: str = ""
    """A regular expression of series that do not exist."""

    quiet: int | None = None
    """The last minute at which the alert does not fire yet; by default, shortly before its time."""


def case(
    name: str, value: str, of: Mapping[str, str], fires: Mapping[str, str], **more: Any
) -> Case:
    return Case(changed={series(name, of): value}, labels=fires, **more)


def flag(name: str, value: float = 1) -> Case:
    return case(name, constant(value), OF_GPU, {"job": "drakit", **OF_GPU})


SINCE_HALF_AN_HOUR = f"_x59 1x{ALWAYS - 60}"
"""A series that begins after 30 minutes."""

CASES = {
    "DrakitTargetMissing": Case(without=".*", labels={"job": "drakit"}),
    "DrakitTargetDown": case("up", constant(0), PLUGIN, {"job": "drakit", **PLUGIN}),
    "DrakitNodeWithoutPlugin": case(
        "drakit_operator_driver_nodes",
        constant(1),
        {"driver": GPU, "state": "registered", **OPERATOR},
        OF_DRIVER,
    ),
    "DrakitDriverNotRegistered": flag("drakit_driver_registered", 0),
    "DrakitDriverStopped": flag("drakit_driver_running", 0),
    "DrakitDriverBlocked": flag("drakit_driver_blocked"),
    "DrakitCheckpointUnusable": flag("drakit_checkpoint_unusable"),
    "DrakitCheckpointDamaged": case(
        "drakit_checkpoint_damaged",
        SINCE_HALF_AN_HOUR,
        OF_GPU,
        {"job": "drakit", **OF_GPU},
        quiet=28,
    ),
    "DrakitCheckpointSlow": Case(
        changed={
            series(TRANSACTIONS, {"le": bound, **OF_GPU}): rising(0) for bound in ("0.01", "0.5")
        },
        labels=ON_NODE,
    ),
    "DrakitClaimStuck": case("drakit_claims_stuck", constant(1), OF_GPU, ON_NODE),
    "DrakitClaimsFail": case(
        "drakit_claim_errors_total",
        rising(1),
        {"operation": "prepare", "reason": "DriverFailed", **OF_GPU},
        {"reason": "DriverFailed", **ON_NODE},
    ),
    "DrakitClaimsNotReleased": case(
        "drakit_operator_driver_problems",
        constant(1),
        {"driver": GPU, "condition": "ClaimsReleased", **OPERATOR},
        OF_DRIVER,
    ),
    "DrakitNoFreeDevice": case(
        "drakit_operator_longest_wait_seconds",
        rising(30),
        {"device_class": "used", **OPERATOR},
        {"device_class": "used", **NAMESPACE},
    ),
    "DrakitPodsWait": case(
        "drakit_operator_longest_wait_seconds",
        rising(30),
        {"device_class": "free", **OPERATOR},
        {"device_class": "free", **NAMESPACE},
        quiet=34,
    ),
    "DrakitDevicesUnhealthy": case(
        "drakit_devices", constant(1), {"pool": "node-2", "state": "unhealthy", **OF_GPU}, ON_NODE
    ),
    "DrakitDevicesRejected": flag("drakit_rejected_devices", 2),
    "DrakitSlicesFail": flag("drakit_slices_failing"),
    "DrakitFieldsDropped": flag("drakit_slice_fields_dropped"),
    "DrakitRegistrationRefused": case(
        "drakit_endpoint_diagnostics_total",
        SINCE_HALF_AN_HOUR,
        {"reason": "BackendRefused", **OF_GPU},
        {"job": "drakit", "reason": "BackendRefused", **OF_GPU},
        quiet=28,
    ),
    "DrakitOperatorWithoutLeader": case("drakit_operator_leader", constant(0), OPERATOR, NAMESPACE),
    "DrakitOperatorCannotList": case(
        "drakit_operator_kind_listed",
        constant(0),
        {"kind": "pods", **OPERATOR},
        {"kind": "pods", **NAMESPACE},
    ),
    "DrakitPoolsUnusable": case(
        "drakit_operator_pools",
        constant(1),
        {"state": "invalid", **OPERATOR},
        {"state": "invalid", **NAMESPACE},
    ),
}

MORE_CASES = {
    "the operator has no pod": (
        "DrakitOperatorWithoutLeader",
        Case(without=r"drakit_operator_|up\{.*operator-", labels={"job": "drakit"}),
    ),
    "a class that does not exist": (
        "DrakitPodsWait",
        case(
            "drakit_operator_longest_wait_seconds",
            rising(30),
            {"device_class": "(others)", **OPERATOR},
            {"device_class": "(others)", **NAMESPACE},
            quiet=34,
        ),
    ),
    "a counter that rises": (
        "DrakitRegistrationRefused",
        case(
            "drakit_endpoint_diagnostics_total",
            f"1x59 2x{ALWAYS - 60}",
            {"reason": "RegistrationRefused", **OF_GPU},
            {"job": "drakit", "reason": "RegistrationRefused", **OF_GPU},
            quiet=28,
        ),
    ),
}


def minutes(text: str) -> int:
    (number,) = re.fullmatch(r"(\d+)m", text).groups()  # type: ignore[union-attr]
    return int(number)


def firing(at: int, *alerts: Mapping[str, str]) -> dict[str, Any]:
    """Return a check that exactly these alerts fire at a minute."""
    samples = [{"labels": selector("ALERTS", labels), "value": 1} for labels in alerts]
    return {
        "expr": 'ALERTS{alertstate="firing"}',
        "eval_time": f"{at}m30s",
        "exp_samples": samples,
    }


def alert(name: str, labels: Mapping[str, str]) -> dict[str, str]:
    severity = RULES[name]["labels"]["severity"]
    return {"alertname": name, "alertstate": "firing", "severity": severity, **labels}


def case_of(title: str, name: str, of: Case) -> dict[str, Any]:
    lasting = minutes(RULES[name].get("for", "0m"))
    quiet = max(lasting - 1, 0) if of.quiet is None else of.quiet
    values = {k: v for k, v in healthy().items() if not of.without or not re.match(of.without, k)}
    return {
        "name": title,
        "interval": "30s",
        "input_series": [
            {"series": each, "values": value} for each, value in {**values, **of.changed}.items()
        ],
        "promql_expr_test": [
            firing(quiet),
            firing(max(lasting, quiet) + 6, alert(name, of.labels)),
        ],
    }


def nothing_wrong() -> dict[str, Any]:
    return {
        "name": "nothing is wrong",
        "interval": "30s",
        "input_series": [{"series": k, "values": v} for k, v in healthy().items()],
        "promql_expr_test": [firing(minute) for minute in (1, 20, 60, 150)],
    }


def test_each_alert_has_a_case():
    assert CASES.keys() == RULES.keys()


@pytest.mark.timeout(BUILD_SECONDS)
def test_each_alert_fires_alone_in_its_case_and_none_while_nothing_is_wrong(tmp_path):
    promtool = programs.promtool()
    tests = [case_of(name, name, each) for name, each in CASES.items()]
    tests += [case_of(f"{name}: {title}", name, each) for title, (name, each) in MORE_CASES.items()]
    file = tmp_path / "tests.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(FILE)],
                "evaluation_interval": "30s",
                "tests": [nothing_wrong(), *tests],
            }
        )
    )
    done = subprocess.run(
        [promtool, "test", "rules", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", RULES)
def test_the_healthy_cluster_has_the_series_of_each_rule(name):
    names = set(re.findall(r"\b(drakit_\w+|up)\{", RULES[name]["expr"]))
    rare = {"drakit_endpoint_diagnostics_total"}  # these have no series before their first problem
    assert names - rare <= {each.split("{")[0] for each in healthy()}
