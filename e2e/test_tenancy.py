"""
Devices for some namespaces, on a real API server: ``allowedNamespaces`` of a HostDevicePolicy, and
the output of `kubectl drakit` about it.

A control plane without nodes is sufficient; the operator runs as a local process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from drakit_formats import crds
from e2e.alone import control_plane, operator
from e2e.cluster.api import Capability, Cluster
from e2e.cluster.choice import REPOSITORY
from e2e.kit import wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.feature("hostdev"),
    pytest.mark.needs(Capability.CONTROL_PLANE_ALONE),
]

NAME = "drakit-operator-namespaces"
CLASS = "serial.drakit.dev"
SENTENCE = f"HostDevicePolicy 'serial' allows claims for DeviceClass '{CLASS}' only in some"
NAMESPACES = {"lab": {}, "test": {"team": "a"}, "office": {"team": "b"}}


def policy(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": crds.API_VERSION,
        "kind": "HostDevicePolicy",
        "metadata": {"name": "serial"},
        "spec": {"match": [{"subsystem": "tty", "paths": ["/dev/ttyUSB*"]}], **spec},
    }


RESTRICTED = policy(
    allowedNamespaces={"names": ["lab"], "selector": {"matchLabels": {"team": "a"}}}
)


def claim(version: str, *, name: str = "one", of: str = CLASS, alternatives: bool = False) -> Any:
    request: dict[str, Any] = {"name": "one", "exactly": {"deviceClassName": of}}
    if version == "v1beta1":
        request = {"name": "one", "deviceClassName": of}
    if alternatives:
        choices = [{"name": str(number), "deviceClassName": each}
                   for number, each in enumerate(("other.test", of))]  # fmt: skip
        request = {"name": "one", "firstAvailable": choices}
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [request]}},
    }


def template(version: str, **options: Any) -> Any:
    body = claim(version, **options)
    return body | {"kind": "ResourceClaimTemplate", "spec": {"spec": body["spec"]}}


def refusal(server: Cluster, namespace: str, body: Any, *flags: str) -> str:
    """Create an object, and return the API server's message if it rejects the object."""
    done = server.kubectl(
        *("create", "-n", namespace, "-f", "-", *flags), input=json.dumps(body), check=False
    )
    return "" if done.returncode == 0 else done.stderr


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    """An API server with three namespaces, and the chart's admission policy."""
    with control_plane("tenancy") as started:
        for name, labels in NAMESPACES.items():
            metadata = {"name": name, "labels": labels}
            started.apply(json.dumps({"apiVersion": "v1", "kind": "Namespace",
                                      "metadata": metadata}))  # fmt: skip
        rendered = started.helm(
            *("template", "drakit", str(REPOSITORY / "charts/drakit")),
            "--show-only=templates/operator-admission.yaml",
            *("--set=image.repository=none.test/drakit", "--set=hostdev.restrictNamespaces=true"),
        )
        bodies = yaml.safe_load_all(rendered.stdout)
        mine = [each for each in bodies if each["metadata"]["name"] == NAME]
        assert len(mine) == 2
        started.apply("\n---\n".join(map(json.dumps, mine)))
        yield started


@pytest.fixture
def restricted(server: Cluster) -> Iterator[Cluster]:
    """The policy, in effect: the API server needs up to 30 s to recognize a kind of parameters."""
    server.apply(json.dumps(RESTRICTED))

    def in_force() -> bool:
        said = refusal(server, "office", claim("v1"), "--dry-run=server")
        return SENTENCE in said and not refusal(server, "lab", claim("v1"), "--dry-run=server")

    wait_for("the restriction", in_force, seconds=60)
    yield server
    server.kubectl("delete", "hdp,deviceclasses", "--all")
    for name in NAMESPACES:
        server.kubectl("delete", "pods,resourceclaims,resourceclaimtemplates,resourcequotas",
                       "--all", "-n", name, "--force")  # fmt: skip


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_only_allowed_namespaces_get_devices_of_the_policy(restricted, version):
    bodies = [
        make(version, alternatives=alternatives)
        for make in (claim, template)
        for alternatives in (False, True)
    ]
    for body in bodies:
        assert SENTENCE in refusal(restricted, "office", body, "--dry-run=server")
        for name in ("lab", "test"):
            assert refusal(restricted, name, body, "--dry-run=server") == ""
    for make in (claim, template):
        other = make(version, of="other.test")
        assert refusal(restricted, "office", other, "--dry-run=server") == ""


def test_a_change_of_labels_or_of_the_policy_takes_effect_and_old_claims_can_be_deleted(restricted):
    body = claim("v1")
    restricted.kubectl("label", "namespace", "office", "team=a", "--overwrite")
    wait_for("the label", lambda: refusal(restricted, "office", body) == "", seconds=20)
    restricted.kubectl("label", "namespace", "office", "team=b", "--overwrite")
    again = claim("v1", name="two")
    wait_for(
        "the label", lambda: SENTENCE in refusal(restricted, "office", again, "--dry-run=server")
    )
    # A claim that already existed can be changed and deleted.
    restricted.kubectl("label", "resourceclaim", "one", "-n", "office", "a=b")
    restricted.kubectl("delete", "resourceclaim", "one", "-n", "office", "--timeout=20s")
    restricted.apply(json.dumps(policy()))
    wait_for("no restriction", lambda: not refusal(restricted, "office", again), seconds=20)


def test_a_pod_with_a_template_of_before_waits_with_the_reason(server, request):
    body = template("v1", name="old")
    wait_for("the kind of the parameters", lambda: not refusal(server, "office", body))
    restricted = request.getfixturevalue("restricted")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "old"},
        "spec": {
            "containers": [{"name": "main", "image": "none.test/none"}],
            "resourceClaims": [{"name": "one", "resourceClaimTemplateName": "old"}],
        },
    }
    assert refusal(restricted, "office", pod) == ""

    def reason() -> bool:
        events = restricted.get("events", "-n", "office")["items"]
        return any(SENTENCE in (each.get("message") or each.get("note", "")) for each in events)

    wait_for("an Event with the reason", reason, seconds=60)


@pytest.mark.parametrize("enforced", [True, False])
def test_a_class_exists_only_if_its_restriction_is_enforced(restricted, tmp_path, enforced):
    with operator(restricted, tmp_path, restrictNamespaces=enforced):
        if enforced:
            wait_for("the class", lambda: CLASS in restricted.kubectl(
                "get", "deviceclasses", "-o", "name").stdout, seconds=30)  # fmt: skip
            return
        restricted.kubectl("wait", "--for=condition=Accepted=false", "hdp/serial", "--timeout=30s")
        (accepted,) = [
            each
            for each in restricted.get("hdp", "serial")["status"]["conditions"]
            if each["type"] == "Accepted"
        ]
        assert "hostdev.restrictNamespaces" in accepted["message"]
        wait_for("no class", lambda: not restricted.get("deviceclasses")["items"])
