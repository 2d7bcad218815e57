"""
Two replicas of the operator, and a leader that fails: the other replica takes over in time, and the
first one stops writing.

Pods that need an Event appear continuously, so that any replica that may write does write. The API
server's audit records show which replica wrote when.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from e2e.cluster.api import Capability, Cluster
from e2e.kit import (
    LEASE,
    NAMESPACE,
    OPERATOR,
    Space,
    from_template,
    lease_holder,
    pod,
    signal_pod,
    template,
    wait_for,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.feature("operator"),
    pytest.mark.disruptive,
    pytest.mark.needs(Capability.AUDIT),
]

USER = f"system:serviceaccount:{NAMESPACE}:drakit-operator"

PROGRAM = "drakit-operator"
"""A part of the command line of the operator."""

FAILOVER_SECONDS = 20.0
"""Maximum time without a leader that writes."""

STOP_SECONDS = 5.0
"""Maximum time if the leader is stopped in an orderly way and releases its Lease."""

AFTER_SECONDS = 6.0
"""Seconds for which a resumed leader is observed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A replica that leads."""

    cluster: Cluster
    holder: str
    body: dict[str, Any]

    @property
    def pod(self) -> str:
        return self.body["metadata"]["name"]

    def kill(self) -> None:
        signal_pod(self.cluster, self.body, PROGRAM, "KILL")

    def stop(self) -> None:
        signal_pod(self.cluster, self.body, PROGRAM, "TERM")

    def freeze(self) -> None:
        signal_pod(self.cluster, self.body, PROGRAM, "STOP")

    def thaw(self) -> None:
        signal_pod(self.cluster, self.body, PROGRAM, "CONT")

    def cut(self) -> None:
        self.cluster.cut_pod(self.body["spec"]["nodeName"], self.body["status"]["podIP"])

    def heal(self) -> None:
        self.cluster.heal_pod(self.body["spec"]["nodeName"], self.body["status"]["podIP"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """An Event that a replica wrote, with the API server's time."""

    at: float
    pod: str


def acquired(cluster: Cluster, *, after: str) -> float:
    """Return the time at which the next holder acquired the Lease, or infinity if it has not
    yet."""
    spec = cluster.get("lease", LEASE, "-n", NAMESPACE)["spec"]
    if spec["holderIdentity"] in ("", after):
        return math.inf
    return datetime.fromisoformat(spec["acquireTime"]).timestamp()


def leader(cluster: Cluster) -> Replica:
    """Return the leader, while another replica is ready to replace it."""
    replicas = wait_for("two ready replicas", lambda: ready_replicas(cluster), seconds=60)

    def leading() -> Replica | None:
        name = lease_holder(cluster)
        # An earlier release can have left its Lease.
        found = [item for item in replicas if name.startswith(item["metadata"]["name"])]
        return Replica(cluster=cluster, holder=name, body=found[0]) if found else None

    return wait_for("a leader", leading, seconds=30)


def ready_replicas(cluster: Cluster) -> list[dict]:
    items = cluster.get("pods", "-n", NAMESPACE, "-l", OPERATOR)["items"]
    found = [
        item
        for item in items
        if all(each["ready"] for each in item["status"].get("containerStatuses", [{"ready": 0}]))
    ]
    return found if len(found) == 2 else []


def event_writes(cluster: Cluster, *, since: float) -> list[Write]:
    """Return the operator's writes of Events in the audit records, in order."""
    found = []
    for record in cluster.audit():
        if record["user"]["username"] != USER or record["objectRef"].get("resource") != "events":
            continue
        at = datetime.fromisoformat(record["requestReceivedTimestamp"]).timestamp()
        # Other tests use a token of the account that is not bound to a pod.
        names = record["user"].get("extra", {}).get("authentication.kubernetes.io/pod-name")
        if names is None:
            continue
        (name,) = names
        if at > since and record["responseStatus"]["code"] < 300 and record["verb"] != "get":
            found.append(Write(at=at, pod=name))
    return sorted(found, key=lambda write: write.at)


@contextmanager
def pods_that_wait(space: Space) -> Iterator[None]:
    """Create pods that wait for a missing class, about two per second."""
    space.apply(template("gone", ("gpu", "missing.test")))
    ended = threading.Event()

    def create() -> None:
        number = 0
        while not ended.wait(0.4):
            space.apply(pod(f"waits-{number}", ("gpu", from_template("gone"))))
            number += 1

    thread = threading.Thread(target=create, name="pods that wait")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    ("break_it", "mend_it", "longest_seconds"),
    [
        pytest.param(Replica.kill, None, FAILOVER_SECONDS, id="killed"),
        pytest.param(Replica.stop, None, STOP_SECONDS, id="stopped", marks=pytest.mark.slow),
        pytest.param(
            *(Replica.freeze, Replica.thaw, FAILOVER_SECONDS), id="frozen", marks=pytest.mark.slow
        ),
        pytest.param(
            Replica.cut,
            Replica.heal,
            FAILOVER_SECONDS,
            id="cut-off-from-the-API-server",
            marks=[pytest.mark.slow, pytest.mark.needs(Capability.CUT)],
        ),
    ],
)
def test_a_leader_that_fails_is_replaced_and_writes_nothing_more(
    space,
    release,
    break_it: Callable[[Replica], None],
    mend_it: Callable[[Replica], None] | None,
    longest_seconds: float,
):
    first = leader(release)
    began = time.time()
    with pods_that_wait(space):
        wait_for("an Event", lambda: event_writes(release, since=began), seconds=10)
        failed = time.time()
        break_it(first)
        try:
            new = wait_for(
                "an Event of the next leader",
                lambda: [
                    write
                    for write in event_writes(release, since=acquired(release, after=first.holder))
                    if mend_it is None or write.pod != first.pod
                ],
                seconds=60,
            )[0]
        finally:
            if mend_it is not None:
                mend_it(first)
        mended = time.time()
        time.sleep(AFTER_SECONDS)

    seconds = new.at - failed
    print(f"the next leader wrote its first Event {seconds:.1f} s after the failure")
    assert seconds < longest_seconds
    assert lease_holder(release) != first.holder
    writes = event_writes(release, since=began)
    late = [write for write in writes if write.pod == first.pod and write.at >= new.at]
    assert mend_it is None or not late, "the first leader wrote beside the next one"
    changes = [1 for one, two in pairwise(writes) if one.pod != two.pod]
    assert len(changes) <= 1, "the replicas wrote by turns"
    assert [write for write in writes if write.at > mended], "somebody wrote to the end"
