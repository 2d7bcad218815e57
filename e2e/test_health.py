"""
Unhealthy devices: which pods get them, what the pods' status reports, which pods are evicted.

`test_endpoints.py` shows what happens to devices whose driver is unavailable.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from e2e.kit import holds_for, taints, wait_for
from e2e.scripted.control import Stock, unwell
from e2e.scripted.stage import EVICTION_SECONDS, LAMPS, RECOVERY_SECONDS, Stage
from e2e.writes import written

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.serial,
    pytest.mark.feature("health"),
]

UNHEALTHY = "drakit.dev/unhealthy:NoSchedule"
EVICTING = "drakit.dev/unhealthy:NoExecute"
HEALTHY = [("Healthy", "")]


TOLERATIONS = [
    # Specify the effect, because the controller that evicts ignores a toleration without an effect.
    {"key": "drakit.dev/unhealthy", "operator": "Exists", "effect": effect}
    for effect in ("NoSchedule", "NoExecute")
]


def lamps(stage: Stage, **unwell: dict[str, Any]) -> None:
    """Set the health of these lamps from now on: ``lamp_0=...``."""
    health = {name.replace("_", "-"): word for name, word in unwell.items()}
    stage.lamps.stock(Stock(health=health))


def wait_taints(stage: Stage, **expected: set[str]) -> dict[str, dict[str, str]]:
    """Wait until these lamps have these taints, and no others have any. Return them with their
    times."""
    wanted = {name.replace("_", "-"): keys for name, keys in expected.items()}

    def look() -> tuple[dict[str, dict[str, str]]] | None:
        found = taints(stage.cluster, LAMPS)
        fits = {name: set(keys) for name, keys in found.items()} == wanted
        return (found,) if fits else None

    return wait_for(f"the taints to be {wanted}", look, seconds=20)[0]


def wait_health(stage: Stage, name: str, *expected: tuple[str, str]) -> None:
    wait_for(
        f"the status of {name} to say {expected}",
        lambda: stage.device_health(name) == list(expected),
    )


# Kubernetes 1.35 does not store the message, and 1.34 reports no health for claims from templates.
@pytest.mark.kubernetes(oldest="1.36")
def test_an_unhealthy_device_gets_no_new_pod_until_it_has_recovered(stage):
    stage.with_lamp("user", 0)
    stage.wait_phase("user", "Running")
    wait_health(stage, "user", *HEALTHY)
    with written(stage.cluster, LAMPS, updates=1):
        lamps(stage, lamp_0=unwell("it flickers"), lamp_1=unwell("it is dim"))
        tainted = wait_taints(stage, lamp_0={UNHEALTHY}, lamp_1={UNHEALTHY})
    wait_health(stage, "user", ("Unhealthy", "it flickers"))
    stage.with_lamp("waiting", 1)
    stage.refused("waiting")
    assert stage.phase("user") == "Running"

    with written(stage.cluster, LAMPS):  # it flaps: nothing is written, and no time restarts
        lamps(stage, lamp_1=unwell("it is dim"))
        holds_for(
            "lamp-0 is tainted",
            lambda: taints(stage.cluster, LAMPS) == tainted,
            seconds=RECOVERY_SECONDS / 3,
        )
        lamps(stage, lamp_0=unwell("it flickers again"), lamp_1=unwell("it is dim"))
        wait_health(stage, "user", ("Unhealthy", "it flickers again"))
        assert taints(stage.cluster, LAMPS) == tainted
    with written(stage.cluster, LAMPS, updates=1):
        lamps(stage)
        wait_taints(stage)
    wait_health(stage, "user", *HEALTHY)
    stage.wait_phase("waiting", "Running")


@pytest.mark.slow
def test_pods_that_have_a_broken_device_are_evicted_unless_they_tolerate_it(stage):
    # A grace period that is long enough to observe the stop.
    stage.with_lamp("user", 0, grace=4)
    stage.with_lamp("tolerant", 1, tolerations=TOLERATIONS)
    stage.wait_phase("user", "Running")
    stage.wait_phase("tolerant", "Running")
    broken = unwell("its glass is broken", evict_pods=True)
    with written(stage.cluster, LAMPS, updates=2):
        lamps(stage, lamp_0=broken, lamp_1=broken)
        wait_taints(stage, lamp_0={UNHEALTHY}, lamp_1={UNHEALTHY})
        both = {UNHEALTHY, EVICTING}
        since = wait_taints(stage, lamp_0=both, lamp_1=both)["lamp-0"]
        reason = wait_for("an eviction", lambda: stage.eviction("user"))
        assert reason == "DeletionByDeviceTaintManager"
    waited = moment(since[EVICTING]) - moment(since[UNHEALTHY])
    assert waited >= EVICTION_SECONDS - 1, "times of taints are whole seconds"
    stage.wait_gone("user")
    assert stage.prepared() == {stage.uid("tolerant", "lamp")}
    assert stage.phase("tolerant") == "Running"
    assert stage.device_health("tolerant") == [("Unhealthy", "its glass is broken")]

    with written(stage.cluster, LAMPS, updates=1):
        lamps(stage)
        wait_taints(stage)
    stage.with_lamp("next", 0)
    stage.wait_phase("next", "Running")


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.disruptive
@pytest.mark.slow
def test_over_a_restart_of_the_plugin_taints_stay_as_they_are_and_the_kubelet_is_notified_again(
    stage,
):
    stage.with_lamp("user", 0)
    stage.with_lamp("other", 1)
    stage.wait_phase("user", "Running")
    stage.wait_phase("other", "Running")
    lamps(stage, lamp_0=unwell("it flickers"))
    tainted = wait_taints(stage, lamp_0={UNHEALTHY})
    wait_health(stage, "user", ("Unhealthy", "it flickers"))
    with written(stage.cluster, LAMPS):
        with stage.without_plugin():
            wait_for(
                "the kubelet to know nothing of devices",
                lambda: (
                    [
                        status
                        for name in ("user", "other")
                        for status, _ in stage.device_health(name)
                    ]
                    == ["Unknown", "Unknown"]
                ),
            )
        wait_health(stage, "user", ("Unhealthy", "it flickers"))
        wait_health(stage, "other", *HEALTHY)
    assert taints(stage.cluster, LAMPS) == tainted
