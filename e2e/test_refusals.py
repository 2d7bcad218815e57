"""
The operator survives an API server that rejects it for a while, without a restart of the process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from drakit_explain.kinds import KINDS
from e2e.alone import control_plane, operator
from e2e.cluster.api import Capability, Cluster
from e2e.kit import claim, from_claim, pod, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.feature("operator"),
    pytest.mark.needs(Capability.CONTROL_PLANE_ALONE),
]

REVOKED_SECONDS = 20
NAME = "operator"


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with control_plane("refusals") as started:
        wait_for("the ServiceAccount", lambda: started.get("serviceaccounts")["items"])
        yield started


class Account:
    """A ServiceAccount with the operator's permissions, and a kubeconfig with its token."""

    def __init__(self, server: Cluster, folder: Path) -> None:
        self._server = server
        self._token = folder / "token"
        self.kubeconfig = folder / "kubeconfig"
        self.allow()
        server.kubectl("create", "serviceaccount", NAME)
        subject = (f"--clusterrole={NAME}", f"--serviceaccount=default:{NAME}")
        server.kubectl("create", "clusterrolebinding", NAME, *subject)
        self.give_token()
        content = yaml.safe_load(server.kubeconfig.read_text())
        for each in content["users"]:
            each["user"] = {"tokenFile": str(self._token)}
        self.kubeconfig.write_text(yaml.safe_dump(content))

    def allow(self, *, except_for: str = "") -> None:
        """Grant all permissions, or all except those for one kind."""
        rules = [
            {"apiGroups": [kind.group], "resources": [kind.plural], "verbs": ["list", "watch"]}
            for kind in KINDS
            if kind.plural != except_for
        ]
        for group, resource in (("coordination.k8s.io", "leases"), ("events.k8s.io", "events")):
            rules.append({"apiGroups": [group], "resources": [resource], "verbs": ["*"]})
        role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": NAME},
            "rules": rules,
        }
        self._server.apply(json.dumps(role))

    def give_token(self) -> None:
        """Write a token that is valid while a Secret exists."""
        self._server.kubectl("create", "secret", "generic", NAME)
        bound = ("--bound-object-kind=Secret", f"--bound-object-name={NAME}")
        self._token.write_text(self._server.kubectl("create", "token", NAME, *bound).stdout)

    def revoke_token(self) -> None:
        self._server.kubectl("delete", "secret", NAME)

    def delete(self) -> None:
        self._server.kubectl("delete", "clusterrole,clusterrolebinding", NAME)
        self._server.kubectl("delete", "secret,serviceaccount", NAME)


@pytest.fixture
def account(server: Cluster, tmp_path: Path) -> Iterator[Account]:
    chosen = Account(server, tmp_path)
    yield chosen
    chosen.delete()


def wait_explained(server: Cluster, name: str) -> None:
    """Create a pod that waits, and wait for its Event."""
    bodies = (claim(name, ("disk", "missing.test")), pod(name, ("disk", from_claim(name))))
    server.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies}))
    events = f"--field-selector=involvedObject.name={name},reason=DeviceClassMissing"
    wait_for(f"an Event about {name}", lambda: server.get("events", events)["items"], seconds=90)


def test_a_permission_is_taken_away_and_given_back(server, tmp_path, account):
    log = tmp_path / "log"
    with operator(server, tmp_path, kubeconfig=account.kubeconfig, resyncPeriod=1):
        wait_explained(server, "permitted")
        account.allow(except_for="resourceclaims")
        wait_for(
            "the kind to be refused", lambda: "is not allowed to list and watch" in log.read_text()
        )
        account.allow()
        wait_explained(server, "permitted-again")


@pytest.mark.slow
def test_a_token_is_revoked_for_a_while(server, tmp_path, account):
    # By default, a leader exits if it cannot renew its Lease for 10 s.
    election = {"leaseDuration": 120, "renewDeadline": 100}
    log = tmp_path / "log"
    with operator(server, tmp_path, kubeconfig=account.kubeconfig, election=election):
        wait_explained(server, "known")
        account.revoke_token()
        # The API server caches an accepted token for 10 s.
        wait_for("requests to be refused", lambda: "does not accept" in log.read_text(), seconds=30)
        time.sleep(REVOKED_SECONDS)
        account.give_token()
        wait_explained(server, "known-again")
