"""
The operator follows the cluster when a kind is removed, and when many objects appear and disappear.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.apiserver import connected
from drakit_formats import crds
from e2e.cluster.api import Cluster, CommandError
from e2e.kit import (
    NAMESPACE,
    OPERATOR,
    claim,
    from_claim,
    lease_holder,
    operator_metric,
    pod,
    wait_for,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.serial,
    pytest.mark.timeout(300),
    pytest.mark.feature("operator"),
]

POLICIES = f"{crds.POLICIES}.{crds.GROUP}"
CLAIMS = "resourceclaims.resource.k8s.io"
MANY = 1000
"""Claims, each with a pod: 2,000 objects."""


def objects(cluster: Cluster, kind: str) -> float:
    return operator_metric(cluster, f'drakit_operator_objects{{kind="{kind}"}}')


def listed(cluster: Cluster, kind: str) -> float:
    return operator_metric(cluster, f'drakit_operator_kind_listed{{kind="{kind}"}}')


@pytest.fixture(autouse=True)
def settled(release: Cluster) -> None:
    """Wait for the operator, because an earlier test may have just rebooted its node."""
    rollout = ("rollout", "status", "deployment/drakit-operator", "--timeout=120s")
    release.kubectl("-n", NAMESPACE, *rollout)
    wait_for("a leader that knows the policies", lambda: leads(release))


def leads(cluster: Cluster) -> bool:
    try:
        return listed(cluster, POLICIES) == 1
    except CommandError:
        return False  # the pod of the last leader does not respond


def restarts(cluster: Cluster) -> dict[str, int]:
    text = cluster.kubectl("-n", NAMESPACE, "get", "pods", "-l", OPERATOR, "-o", "json").stdout
    return {
        each["metadata"]["name"]: each["status"]["containerStatuses"][0]["restartCount"]
        for each in json.loads(text)["items"]
    }


@contextmanager
def one_process(cluster: Cluster) -> Iterator[None]:
    """Check that the same process remains the leader."""
    before = (lease_holder(cluster), restarts(cluster))
    yield
    assert (lease_holder(cluster), restarts(cluster)) == before


def read(cluster: Cluster, *arguments: str) -> dict:
    """Return an object in a form in which it can be created again."""
    body = json.loads(cluster.kubectl("get", *arguments, "-o", "json").stdout)
    for each in body.get("items", [body]):
        each.pop("status", None)
        for name in ("uid", "resourceVersion", "creationTimestamp", "generation"):
            each["metadata"].pop(name, None)
    return body


def test_the_definition_of_policies_is_deleted_and_created_again(release):
    number = objects(release, POLICIES)
    assert number > 0
    definition = read(release, "crd", POLICIES)
    policies = read(release, crds.POLICIES)
    with one_process(release):
        try:
            release.kubectl("delete", "crd", POLICIES, timeout=150)
            wait_for(
                "the policies to be forgotten",
                lambda: objects(release, POLICIES) == 0 and listed(release, POLICIES) == 0,
                seconds=30,
            )
        finally:
            release.apply(json.dumps(definition))
            release.kubectl("wait", "--for=condition=Established", f"crd/{POLICIES}")
            wait_for(
                "the policies to be created again",
                lambda: release.apply(json.dumps(policies)) or True,
                seconds=30,
            )
        wait_for(
            "the policies to be known again",
            lambda: objects(release, POLICIES) == number and listed(release, POLICIES) == 1,
            seconds=30,
        )
        for each in policies["items"]:
            name = each["metadata"]["name"]
            release.kubectl(
                "wait", f"{crds.POLICIES}/{name}", "--for=condition=Accepted", "--timeout=60s"
            )


@pytest.mark.slow
def test_of_many_objects_that_come_and_go_at_once_nothing_stays(space, release):
    kinds = (CLAIMS, "pods")
    before = {kind: objects(release, kind) for kind in kinds}
    names = [f"many-{number}" for number in range(MANY)]
    claims = [claim(name, ("disk", "nothing.test")) for name in names]
    pods = [pod(name, ("disk", from_claim(name))) for name in names]
    for each in (*claims, *pods):
        each["metadata"]["namespace"] = space.name
    with one_process(release), connected(release.kubeconfig) as api:
        # Create them concurrently; kubectl would create one after the other.
        api.create_all("resourceclaims", claims)
        api.create_all("pods", pods)
        wait_for(
            "all of them to be known",
            lambda: all(objects(release, kind) >= before[kind] + MANY for kind in kinds),
            seconds=60,
        )
        # Use one request for each kind; kubectl would delete one object after the other.
        for group, kind in (("api/v1", "pods"), ("apis/resource.k8s.io/v1", "resourceclaims")):
            space.kubectl("delete", "--raw", f"/{group}/namespaces/{space.name}/{kind}")
        wait_for(
            "nothing to be left",
            lambda: all(objects(release, kind) <= before[kind] for kind in kinds),
            seconds=120,
        )
