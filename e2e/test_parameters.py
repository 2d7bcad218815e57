"""
Opaque parameters that a real API server validates when they are written, with the operator's
webhook.

A control plane without nodes is sufficient. The operator runs as a local process, so the API server
reaches it through an address, and not through the chart's Service.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from drakit_formats import crds
from e2e.alone import control_plane, operator
from e2e.cluster.api import Capability, Cluster
from e2e.cluster.choice import REPOSITORY
from e2e.cluster.local.pki import Authority
from e2e.kit import holds_for, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.feature("operator"),
    pytest.mark.needs(Capability.CONTROL_PLANE_ALONE),
]

DRIVER = "lamps.example.com"
V1 = "lamps.example.com/v1"
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"brightness": {"type": "integer", "maximum": 100}},
}
OF_V1 = {
    **SCHEMA,
    "properties": {"apiVersion": {"const": V1}, "kind": {"const": "Lamp"}, **SCHEMA["properties"]},
}
WEBHOOKS = "ValidatingWebhookConfiguration"
CERTIFICATE_SECONDS = 15
"""Maximum time until a replica has loaded a new certificate."""


def driver(**parameters: Any) -> dict[str, Any]:
    return {
        "apiVersion": crds.API_VERSION,
        "kind": "DeviceDriver",
        "metadata": {"name": DRIVER},
        "spec": {"parameters": parameters},
    }


def config(parameters: Any) -> list[dict[str, Any]]:
    return [{"opaque": {"driver": DRIVER, "parameters": parameters}}]


def claim(version: str, parameters: Any) -> dict[str, Any]:
    request: dict[str, Any] = {"name": "one", "exactly": {"deviceClassName": "lamps"}}
    if version == "v1beta1":
        request = {"name": "one", "deviceClassName": "lamps"}
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": "one", "namespace": "default"},
        "spec": {"devices": {"requests": [request], "config": config(parameters)}},
    }


def template(version: str, parameters: Any) -> dict[str, Any]:
    body = claim(version, parameters)
    return body | {"kind": "ResourceClaimTemplate", "spec": {"spec": body["spec"]}}


def device_class(version: str, parameters: Any) -> dict[str, Any]:
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "DeviceClass",
        "metadata": {"name": "lamps"},
        "spec": {"config": config(parameters)},
    }


class Scene:
    """The API server, and the certificate of the operator."""

    def __init__(self, server: Cluster, folder: Path, port: int) -> None:
        self.server, self.folder, self.port = server, folder, port
        self.authority = Authority.create(folder / "pki")
        self.certificates = folder / "certificates"
        self.certificates.mkdir()
        self.issue()

    def issue(self) -> None:
        """Replace the certificate, like the kubelet does."""
        self.authority.issue("tls", common_name="localhost", dns=["localhost"])
        for suffix in ("crt", "key"):
            new = self.certificates / f"new.{suffix}"
            shutil.copy(self.authority.folder / f"tls.{suffix}", new)
            new.rename(self.certificates / f"tls.{suffix}")

    def settings(self) -> dict[str, Any]:
        listen = f"127.0.0.1:{self.port}"
        found = {"enabled": True, "listen": listen, "certificates": str(self.certificates)}
        return {"admission": found}

    def register(self) -> None:
        """Apply the chart's webhook, with an address instead of its Service."""
        rendered = self.server.helm(
            *("template", "drakit", str(REPOSITORY / "charts/drakit")),
            "--show-only=templates/operator-webhook.yaml",
            *("--set=image.repository=none.test/drakit", "--set=operator.admission.enabled=true"),
        )
        bodies = yaml.safe_load_all(rendered.stdout)
        (body,) = [each for each in bodies if each and each["kind"] == WEBHOOKS]
        bundle = base64.b64encode((self.authority.folder / "ca.crt").read_bytes()).decode()
        for each in body["webhooks"]:
            each["clientConfig"] = {"url": f"https://localhost:{self.port}/", "caBundle": bundle}
        self.server.apply(json.dumps(body))

    def create(self, body: dict[str, Any]) -> str:
        """Create an object in a dry run, and return kubectl's standard error."""
        flags = ("create", "--dry-run=server", "-f", "-")
        return self.server.kubectl(*flags, input=json.dumps(body), check=False).stderr


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with control_plane("parameters") as server:
        scene = Scene(server, tmp_path_factory.mktemp("webhook"), port)
        server.apply(json.dumps(driver(**{"": SCHEMA, V1: OF_V1})))
        scene.register()
        yield scene


@pytest.fixture
def checked(scene: Scene, tmp_path: Path) -> Iterator[Scene]:
    with operator(scene.server, tmp_path, **scene.settings()):
        wait_for("a refusal", lambda: REFUSED in scene.create(claim("v1", BAD)), seconds=30)
        yield scene


GOOD, BAD = {"brightness": 5}, {"brightnes": 5}
REFUSED = "denied the request: "
PROBLEM = "brightnes: is not a known key; known keys: brightness"


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
@pytest.mark.parametrize("make", [claim, template, device_class])
def test_wrong_parameters_are_refused_in_each_served_version(checked, make, version):
    assert REFUSED not in checked.create(make(version, GOOD))
    said = checked.create(make(version, BAD))
    assert REFUSED in said
    assert f"the parameters for driver {DRIVER} are invalid: {PROBLEM}" in said
    right = {"apiVersion": V1, "kind": "Lamp", "brightness": 5}
    assert REFUSED not in checked.create(make(version, right))
    wrong = right | {"brightness": 500}
    said = checked.create(make(version, wrong))
    assert f"(apiVersion {V1}): brightness: must be at most 100" in said
    said = checked.create(make(version, {"apiVersion": "lamps.example.com/v2"}))
    assert f"have apiVersion lamps.example.com/v2; known: none, {V1}" in said


def test_parameters_of_other_drivers_and_objects_without_any_are_not_checked(checked):
    body = claim("v1", BAD)
    body["spec"]["devices"]["config"][0]["opaque"]["driver"] = "other.example.com"
    assert REFUSED not in checked.create(body)
    del body["spec"]["devices"]["config"]
    assert REFUSED not in checked.create(body)


def test_policies_and_schemas_that_cannot_be_valid_are_refused(checked):
    policy = {
        "apiVersion": crds.API_VERSION,
        "kind": "HostDevicePolicy",
        "metadata": {"name": "memory"},
        "spec": {"match": [{"subsystem": "mem", "paths": ["/dev/mem"]}]},
    }
    assert "/dev/mem is dangerous" in checked.create(policy)
    malformed = driver(**{"": {"type": 5}})
    malformed["metadata"]["name"] = "other.example.com"
    assert "type: fits none of the allowed forms" in checked.create(malformed)


def test_a_template_that_can_never_be_allocated_gets_a_warning(checked):
    def warned() -> bool:
        said = checked.create(template("v1", GOOD))
        assert REFUSED not in said
        return "Warning: " in said and 'DeviceClass "lamps"' in said

    wait_for("a warning", warned, seconds=30)


def test_schemas_take_effect_without_a_restart(checked):
    checked.server.apply(json.dumps(driver(**{"": {"type": "object"}})))
    wait_for("other schemas", lambda: REFUSED not in checked.create(claim("v1", BAD)), seconds=20)
    checked.server.apply(json.dumps(driver(**{"": SCHEMA, V1: OF_V1})))
    wait_for("the schemas", lambda: REFUSED in checked.create(claim("v1", BAD)), seconds=20)


def test_certificates_are_renewed_while_requests_are_checked(checked):
    """Each request must be rejected, because a dropped request would be allowed."""
    stop, allowed = threading.Event(), []

    def load() -> None:
        while not stop.is_set():
            if REFUSED not in (said := checked.create(claim("v1", BAD))):
                allowed.append(said)

    clients = [threading.Thread(target=load) for _ in range(3)]
    for each in clients:
        each.start()
    try:
        for _ in range(2):
            checked.issue()
            holds_for("no request is dropped", lambda: not allowed, seconds=CERTIFICATE_SECONDS)
    finally:
        stop.set()
        for each in clients:
            each.join()
    assert allowed == []


def test_without_the_operator_everything_is_allowed(scene, tmp_path):
    for _ in range(2):
        assert REFUSED not in scene.create(claim("v1", BAD))
        with operator(scene.server, tmp_path, **scene.settings()):
            wait_for("a refusal", lambda: REFUSED in scene.create(claim("v1", BAD)), seconds=30)
