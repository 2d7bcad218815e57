"""
Drivers that stop, and may return: their devices, the pods that use them, and the writes.

`test_health.py` covers devices whose driver is running.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.cluster.api import Capability
from e2e.kit import devices, restarts, slice_generations, slices, taints, wait_for
from e2e.scripted.control import Rule, Script, Stock
from e2e.scripted.stage import DEVICES, HORNS, LAMPS, STOP_GRACE_SECONDS, Stage
from e2e.writes import written

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.disruptive,
    pytest.mark.serial,
    pytest.mark.feature("endpoints"),
]

REASON = "the bus was unplugged"
STOPPED = "drakit.dev/stopped:NoSchedule"
UNPREPARING = "drakit.dev/unpreparing:NoSchedule"


def tolerate(key: str) -> dict[str, str]:
    return {"key": key, "operator": "Exists"}


def stop(script: Script) -> float:
    """Stop a driver, and return the time."""
    script.stock(Stock(stop=REASON))
    return time.monotonic()


def wait_stopped(stage: Stage, driver: str) -> None:
    def look() -> bool:
        found = taints(stage.cluster, driver).values()
        return len(found) == DEVICES and all(STOPPED in keys for keys in found)

    wait_for(f"all devices of {driver} to be tainted", look, seconds=20)


def wait_untainted(stage: Stage, driver: str) -> None:
    wait_for(f"{driver} to have no taints", lambda: not taints(stage.cluster, driver))


def stored(stage: Stage, driver: str) -> dict[str, Any] | None:
    """Return the driver's endpoint in the checkpoint."""
    found = stage.checkpoint(driver)["endpoints"]
    return found[0] if found else None


# Kubernetes 1.35 does not store the message, and 1.34 reports no health for claims from templates.
@pytest.mark.kubernetes(oldest="1.36")
def test_a_driver_that_returns_within_the_grace_period_and_one_that_does_not(stage):
    stage.with_lamp("user", 0)
    stage.wait_phase("user", "Running")
    wait_for("the lamp's health", lambda: stage.device_health("user") == [("Healthy", "")])
    before = slice_generations(stage.cluster, LAMPS)
    with written(stage.cluster, LAMPS, HORNS, updates=2):
        stop(stage.lamps)
        stopped_at = stop(stage.horns)
        wait_stopped(stage, LAMPS)
        wait_stopped(stage, HORNS)
    # The grace period of the horns may end during any of these steps.
    with written(stage.cluster, HORNS, deletes=1):
        with written(stage.cluster, LAMPS):
            stage.with_lamp("plain", 1)
            stage.with_lamp("tolerant", 2, tolerations=[tolerate("drakit.dev/stopped")])
            stage.event("tolerant", f"driver {LAMPS} is unavailable", REASON)
            stage.refused("plain")
            ((status, message),) = stage.device_health("user")
            assert status == "Unknown"
            assert REASON in message
        with written(stage.cluster, LAMPS, updates=1):
            stage.lamps.stock()
            wait_untainted(stage, LAMPS)
        wait_for(
            "the horns' slice to be deleted", lambda: not slice_generations(stage.cluster, HORNS)
        )
        seconds = time.monotonic() - stopped_at
    print(f"the slice was seen deleted {seconds:.1f} s after the stop")
    assert seconds > STOP_GRACE_SECONDS - 1
    wait_for("the endpoint to be forgotten", lambda: stored(stage, HORNS) is None)
    with written(stage.cluster, LAMPS, HORNS, creates=1):
        stage.horns.stock()
        wait_for("the slice to be back", lambda: slice_generations(stage.cluster, HORNS))
    assert taints(stage.cluster, HORNS) == {}

    stage.nudge("tolerant")
    for name in ("plain", "tolerant"):
        stage.wait_phase(name, "Running")
    wait_for("the lamp's health", lambda: stage.device_health("user") == [("Healthy", "")])
    assert restarts(stage.get("pod", "user")) == 0
    assert slice_generations(stage.cluster, LAMPS) == before


@pytest.mark.slow
def test_a_pod_ends_while_its_driver_is_stopped_but_its_device_stays_in_use(stage):
    stage.with_lamp("user", 0)
    stage.wait_phase("user", "Running")
    uid = stage.uid("user", "lamp")
    stop(stage.lamps)
    wait_stopped(stage, LAMPS)
    stage.delete("pod", "user")
    assert stage.files() == set()
    assert stage.lamps.story() == ["prepare began", "prepare ended"], "nobody was there to undo it"
    entries = {c["uid"]: c["state"] for c in stage.checkpoint(LAMPS)["claims"]}
    assert entries == {uid: "unpreparing"}

    stage.lamps.play(Rule(operation="unprepare", fail="it is still hot"))
    stage.lamps.stock()
    wait_for(
        "lamp-0 alone to be tainted",
        lambda: (
            {name: set(keys) for name, keys in taints(stage.cluster, LAMPS).items()}
            == {"lamp-0": {UNPREPARING}}
        ),
    )
    stage.with_lamp("next", 0)
    stage.refused("next")
    assert stage.prepared() == {uid}
    stage.lamps.play()
    stage.wait_phase("next", "Running")
    assert stage.prepared() == {stage.uid("next", "lamp")}


CARD = {"name": "card", "counters": {"memory": "40Gi"}}
WHOLE, HALF, OTHER_HALF = ("card", 10, "40Gi"), ("half-0", 11, "20Gi"), ("half-1", 12, "20Gi")


def card(*, stop: str | None = None) -> Stock:
    """Return a stock with a card that can be allocated as a whole or in two halves, and the
    lamps."""
    parts = [
        {
            "name": name,
            "attributes": {"kind": "card", "index": index},
            "consumes": {"card": {"memory": memory}},
        }
        for name, index, memory in (WHOLE, HALF, OTHER_HALF)
    ]
    return Stock(extra=parts, counter_sets=[CARD], stop=stop)


@pytest.mark.slow
def test_a_partition_waits_until_the_whole_device_of_a_force_deleted_pod_is_free(stage):
    stage.lamps.stock(card())
    stage.with_lamp("whole", 10)
    stage.wait_phase("whole", "Running")
    holder, uid = stage.claim_of("whole", "lamp")["metadata"]["name"], stage.uid("whole", "lamp")
    stage.lamps.stock(card(stop=REASON))
    wait_for(
        "the driver's devices to be tainted",
        lambda: all(STOPPED in keys for keys in taints(stage.cluster, LAMPS).values()),
    )
    stage.delete("pod", "whole", force=True)
    wait_for(
        "the claim to be unprepared but for its driver",
        lambda: [c["state"] for c in stage.checkpoint(LAMPS)["claims"]] == ["unpreparing"],
    )
    wait_for("the claim to be deleted", lambda: stage.get("resourceclaim", holder) is None)
    stage.lamps.play(Rule(operation="unprepare", device="card", fail="it is still hot"))
    stage.lamps.stock(card())
    wait_for(
        "the card and its halves alone to be tainted",
        lambda: (
            {name: set(keys) for name, keys in taints(stage.cluster, LAMPS).items()}
            == {name: {UNPREPARING} for name, _, _ in (WHOLE, HALF, OTHER_HALF)}
        ),
    )
    stage.with_lamp("half", 11)
    stage.refused("half")
    # For a pod that tolerates the taint, the scheduler considers the half free.
    stage.with_lamp("other", 12, tolerations=[tolerate("drakit.dev/unpreparing")])
    text = stage.event(
        "other", f"device half-1 cannot be used together with device card of claim {stage.name}"
    )
    assert f"{stage.name}/{holder}: both consume memory of counter set card" in text
    assert stage.phase("other") == "Pending"
    assert stage.prepared() == {uid}

    stage.lamps.play()
    wait_for("the card to be unprepared", lambda: uid not in stage.prepared())
    stage.wait_phase("half", "Running")
    stage.nudge("other")
    stage.wait_phase("other", "Running")
    assert stage.prepared() == {stage.uid("half", "lamp"), stage.uid("other", "lamp")}


@contextmanager
def cut(stage: Stage) -> Generator[None]:
    """Cut off only the daemon from the API server during the block."""
    address = stage.plugin()["status"]["podIP"]
    stage.cluster.cut_pod(stage.node, address)
    try:
        yield
    finally:
        stage.cluster.heal_pod(stage.node, address)


@pytest.mark.slow
@pytest.mark.needs(Capability.CUT)
def test_a_restart_continues_the_grace_period_and_finishes_a_removal(stage):
    with written(stage.cluster, LAMPS, HORNS, updates=2):
        stopped_at = stop(stage.lamps)
        stop(stage.horns)
        wait_stopped(stage, LAMPS)
        wait_stopped(stage, HORNS)
    with written(stage.cluster, LAMPS, HORNS):
        before = taints(stage.cluster, LAMPS)
        stage.kill_plugin(until_ready=False)
    assert taints(stage.cluster, LAMPS) == before

    def removing() -> bool:
        endpoint = stored(stage, LAMPS)
        return endpoint is not None and endpoint["removing"]

    with written(stage.cluster, LAMPS, HORNS, updates=1, deletes=1, seconds=60):
        stage.horns.stock()
        wait_untainted(stage, HORNS)
        with cut(stage):
            wait_for("the removal to be stored", removing)
            seconds = time.monotonic() - stopped_at
            stage.kill_plugin(until_ready=False)
            assert slice_generations(stage.cluster, LAMPS)
        wait_for(
            "the lamps' slice to be deleted", lambda: not slice_generations(stage.cluster, LAMPS)
        )
    print(f"the removal was begun {seconds:.1f} s after the stop")
    assert STOP_GRACE_SECONDS - 1 < seconds < STOP_GRACE_SECONDS + 5
    begun = [line for line in stage.log() if "was unavailable for too long" in line["msg"]]
    assert len(begun) == 1, "the removal was begun before the restart, and not again"
    with written(stage.cluster, LAMPS, HORNS, creates=1):
        stage.lamps.stock()
        wait_for("the slice to be back", lambda: slice_generations(stage.cluster, LAMPS))


# ------------------------------------------------------------ drivers that misbehave


def test_a_device_whose_capacity_the_api_server_rejects_is_not_in_a_new_layout(stage):
    def names() -> set[str]:
        return set(devices(stage.cluster, stage.node, driver=LAMPS))

    before = names()
    spares = [
        {"name": f"spare-{index}", "attributes": {"kind": "spare", "index": 100 + index}}
        for index in range(100)
    ]
    stage.lamps.stock(Stock(shared=True, step="9", extra=spares))
    expected = before | {each["name"] for each in spares}
    wait_for("the others to be published", lambda: names() == expected)
    pools = [body["spec"]["pool"] for body in slices(stage.cluster, stage.node, driver=LAMPS)]
    assert len(pools) > 1
    assert all(each == pools[0] for each in pools)
    assert pools[0]["resourceSliceCount"] == len(pools)
    (reason,) = {
        line["error"]
        for line in stage.log()
        if line["msg"] == "device is rejected" and line["device"] == "shared-0"
    }
    assert "capacity[light].requestPolicy.validRange.step: Invalid value" in reason
    stage.with_lamp("user", 0)
    stage.wait_phase("user", "Running")

    stage.lamps.stock(Stock(shared=True, extra=spares))
    wait_for("the device", lambda: names() == expected | {"shared-0"})
    stage.delete("pod", "user")
    stage.lamps.stock()
    wait_for("the lamps alone", lambda: names() == before)
    stage.wait_empty()
