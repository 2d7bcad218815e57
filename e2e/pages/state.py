"""
The state of the cluster before and after a page: drakit as the page needs it, and nothing else.

If the previous page left the required state, the page starts without waiting.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from e2e.cluster.api import Cluster, ClusterError, CommandError
from e2e.kit import slices, wait_for
from e2e.pages.page import Needs
from e2e.release import DRAKIT, NAMESPACE, Release, install, only_on, uninstall
from e2e.simulated import DRIVER as SIMULATED

VALUES: dict[Needs, dict[str, Any]] = {
    Needs.INSTALLED: {},
    Needs.SIMULATED: {"simulated": {"enabled": True}},
}

KINDS = (
    *("namespaces", "pods", "deployments", "daemonsets", "statefulsets", "jobs", "services"),
    *("configmaps", "secrets", "serviceaccounts", "roles", "rolebindings", "clusterroles"),
    *("clusterrolebindings", "resourcequotas", "networkpolicies", "persistentvolumeclaims"),
    *("deviceclasses", "resourceclaims", "resourceclaimtemplates"),
    *("validatingadmissionpolicies", "validatingadmissionpolicybindings"),
)
"""Kinds that a page may create, and must remove."""

OPTIONAL_KINDS = ("devicemaintenances", "devicetaintrules", "hostdevicepolicies")
"""Kinds that change the devices of later pages. Not every API server serves them."""

DATA = "/var/lib/kubelet/plugins/drakit.dev"

NOT_HELMS = "app.kubernetes.io/managed-by!=Helm,owner!=helm"
COLUMNS = (
    "K:.kind,NS:.metadata.namespace,NAME:.metadata.name,OWNER:.metadata.ownerReferences[0].uid"
)

Object = tuple[str, str, str]
"""Kind, namespace (or `<none>`) and name."""

SHORT_GRACE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "List",
    "items": [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicy",
            "metadata": {"name": "pages.test.drakit.dev"},
            "spec": {
                "failurePolicy": "Ignore",
                "reinvocationPolicy": "Never",
                "matchConstraints": {
                    "resourceRules": [
                        {
                            "apiGroups": [""],
                            "apiVersions": ["v1"],
                            "operations": ["CREATE"],
                            "resources": ["pods"],
                        }
                    ]
                },
                "matchConditions": [
                    {
                        "name": "default",
                        "expression": "object.spec.terminationGracePeriodSeconds == 30",
                    }
                ],
                "mutations": [
                    {
                        "patchType": "ApplyConfiguration",
                        "applyConfiguration": {
                            "expression": "Object{spec: Object.spec{"
                            "terminationGracePeriodSeconds: 1}}"
                        },
                    }
                ],
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": {"name": "pages.test.drakit.dev"},
            "spec": {"policyName": "pages.test.drakit.dev"},
        },
    ],
}
"""A shell that sleeps as process 1 ignores SIGTERM, so each deletion would take 30 s."""


class State:
    """The installed releases, to the extent that they are known."""

    def __init__(self, cluster: Cluster, *, build: str) -> None:
        self._cluster = cluster
        self._build = build
        self._known: tuple[Needs, int] | None = None

    def empty_default_namespace(self) -> None:
        """Remove the remains of an interrupted run in a kept cluster."""
        kinds = "deployments,daemonsets,jobs,pods,resourceclaims,resourceclaimtemplates"
        self._cluster.kubectl(
            *("-n", "default", "delete", kinds, "--all", "--timeout=60s"), timeout=70, check=False
        )

    def shorten_grace(self) -> None:
        """Shorten the grace period of pods, if the API server serves mutating policies."""
        try:
            self._cluster.apply(json.dumps(SHORT_GRACE))
        except CommandError:
            return

    def restore_grace(self) -> None:
        self._cluster.kubectl(
            *("delete", "-f", "-", "--ignore-not-found"), input=json.dumps(SHORT_GRACE), check=False
        )

    def ensure(self, needs: Needs, *, nodes: int) -> None:
        """Bring the cluster into the state that a page needs."""
        if self._known == (needs, nodes):
            return
        self._known = None
        if needs is Needs.NOTHING:
            self.clear()
        else:
            self._install(needs, nodes=nodes)
        self._known = (needs, nodes)

    def forget(self) -> None:
        """Record that the release was changed since it was installed here."""
        self._known = None

    def clean(self) -> None:
        """Remove every release, and the files that drivers of earlier pages left on the nodes."""
        self.clear()
        self._known = (Needs.NOTHING, 0)
        for node in self._cluster.nodes:
            self._cluster.exec_on_node(node, ["rm", "-rf", DATA])

    def clear(self) -> None:
        """Remove every release, and the namespace."""
        for release in self.releases():
            uninstall(self._cluster, release)
        self._cluster.kubectl(
            "delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=60s", timeout=70
        )

    def releases(self) -> list[Release]:
        listed = json.loads(self._cluster.helm("list", "--all-namespaces", "-o", "json").stdout)
        return [Release(name=one["name"], namespace=one["namespace"]) for one in listed]

    def objects(self) -> set[Object]:
        """Return the objects in the cluster, except those that Helm manages or that other objects
        own."""
        done = self._cluster.kubectl(
            *("get", ",".join(KINDS), "--all-namespaces", "--no-headers", "--ignore-not-found"),
            *("-l", NOT_HELMS, "-o", f"custom-columns={COLUMNS}"),
        )
        rows = (line.split() for line in done.stdout.splitlines())
        return {(kind, space, name) for kind, space, name, owner in rows if owner == "<none>"}

    def left_behind(self, before: set[Object], *, seconds: float) -> set[Object]:
        """Return the objects that did not exist before the page, and that remain after a
        timeout."""

        def left() -> set[Object]:
            spaces = {name for kind, _, name in before if kind == "Namespace"}
            # Objects in a new namespace are deleted with it.
            return {one for one in self.objects() - before if one[1] in spaces | {"<none>"}}

        try:
            wait_for("the page's objects to be gone", lambda: not left(), seconds=seconds)
        except ClusterError:
            return left()
        return set()

    def recover(self, left: Iterable[Object]) -> None:
        """Clean up after a failed page: remove its objects, and uncordon the nodes."""
        kubectl = self._cluster.kubectl
        kubectl("uncordon", *self._cluster.nodes, check=False)
        ours = ("Namespace", "<none>", NAMESPACE)
        # Delete pods first, because only a running node plugin can unprepare their claims.
        for kind, space, name in sorted(set(left) - {ours}, key=lambda one: one[0] != "Pod"):
            place = [] if space == "<none>" else ["-n", space]
            kubectl(
                *("delete", kind, name, *place, "--ignore-not-found", "--timeout=60s"),
                timeout=70,
                check=False,
            )
        for kind in OPTIONAL_KINDS:
            kubectl("delete", kind, "--all", "--timeout=60s", timeout=70, check=False)
        self.clear()
        self._known = None

    def _install(self, needs: Needs, *, nodes: int) -> None:
        cluster = self._cluster
        for release in self.releases():
            if release != DRAKIT:
                uninstall(cluster, release)
        install(cluster, values={**VALUES[needs], **placed(cluster, nodes)}, build=self._build)
        if needs is Needs.SIMULATED:
            for node in cluster.nodes[:nodes]:
                wait_for(
                    f"the devices of {node} to be published",
                    lambda: slices(cluster, node, driver=SIMULATED),  # noqa: B023
                )


def placed(cluster: Cluster, nodes: int) -> dict[str, Any]:
    """Return the chart's values that keep drakit on the first nodes."""
    return {"nodeplugin": {"affinity": only_on(cluster.nodes[:nodes])}}
