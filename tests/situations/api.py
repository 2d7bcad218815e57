"""
The API server without a process for each call: plain HTTP, to a `kubectl proxy` or a fake server.

Hundreds of objects are made at the same time, and pods are polled. Does not depend on situations.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

from drakit_formats import crds

Body = dict[str, Any]

DRA = "/apis/resource.k8s.io/v1"
REPORTS = f"/apis/{crds.API_VERSION}"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
TAINT_RULES = ("v1", "v1beta2", "v1alpha3")
"""Versions of DeviceTaintRules, the newest first."""

_PATHS = {
    "namespaces": "/api/v1",
    "nodes": "/api/v1",
    "pods": "/api/v1",
    "resourcequotas": "/api/v1",
    "events": "/api/v1",
    "resourceclaims": DRA,
    "resourceclaimtemplates": DRA,
    "resourceslices": DRA,
    "deviceclasses": DRA,
    "nodedevicereports": REPORTS,
    "leases": "/apis/coordination.k8s.io/v1",
    "validatingadmissionpolicies": ADMISSION,
    "validatingadmissionpolicybindings": ADMISSION,
}
KINDS = {
    "ResourceClaim": "resourceclaims",
    "ResourceClaimTemplate": "resourceclaimtemplates",
    "ResourceSlice": "resourceslices",
    "DeviceClass": "deviceclasses",
    "DeviceTaintRule": "devicetaintrules",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
    "Lease": "leases",
    "Namespace": "namespaces",
    "NodeDeviceReport": "nodedevicereports",
    "Node": "nodes",
    "Pod": "pods",
    "ResourceQuota": "resourcequotas",
}

REQUEST_SECONDS = 20
GONE_SECONDS = 30


class RefusedError(Exception):
    """The API server's answer is an error."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Api:
    """Objects by plural name. For threads: every call has a connection of its own."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self._taint_rules: str | None = None

    def list(self, plural: str, *, namespace: str = "") -> list[Body]:
        return self.call("GET", self._path(plural, namespace))["items"]

    def get(self, plural: str, name: str, *, namespace: str = "") -> Body:
        return self.call("GET", f"{self._path(plural, namespace)}/{name}")

    def create(self, body: Body) -> Body:
        namespace = body["metadata"].get("namespace", "")
        return self.call("POST", self._path(KINDS[body["kind"]], namespace), body)

    def patch(
        self, plural: str, name: str, change: Body, *, namespace: str = "", subresource: str = ""
    ) -> Body:
        """Apply a JSON merge patch."""
        path = f"{self._path(plural, namespace)}/{name}"
        return self.call("PATCH", f"{path}/{subresource}" if subresource else path, change)

    def write_status(self, plural: str, body: Body) -> Body:
        metadata = body["metadata"]
        path = self._path(plural, metadata.get("namespace", ""))
        return self.call("PUT", f"{path}/{metadata['name']}/status", body)

    def start_deletion(self, plural: str, name: str, *, namespace: str = "") -> None:
        """Delete an object, a pod with its grace period; do not wait."""
        self.call("DELETE", f"{self._path(plural, namespace)}/{name}")

    def delete(self, plural: str, name: str, *, namespace: str = "", wait: bool = True) -> None:
        """Delete an object, and wait until it is gone; one that is missing is fine."""
        path = f"{self._path(plural, namespace)}/{name}"
        grace = {"gracePeriodSeconds": 0} if plural == "pods" else {}
        end = time.monotonic() + GONE_SECONDS
        while True:
            try:
                self.call("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", **grace})
            except RefusedError as error:
                if error.code == 404:
                    return
                raise
            if not wait:
                return
            if time.monotonic() > end:
                raise RefusedError(0, f"{path} is not gone after {GONE_SECONDS} s")
            time.sleep(0.2)

    def delete_all(self, plural: str, *, labels: str) -> None:
        if plural != "devicetaintrules" or self.taint_rules_path():
            self.call("DELETE", f"{self._path(plural, '')}?labelSelector={labels}")

    def call(self, method: str, path: str, body: Body | None = None) -> Any:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            self._base + path, data=data, method=method, headers={"Content-Type": kind}
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            with suppress(ValueError, KeyError):
                text = json.loads(text)["message"]
            raise RefusedError(error.code, text) from None

    def taint_rules_path(self) -> str | None:
        """The path under which DeviceTaintRules are served; None where they are not."""
        if self._taint_rules is None:
            self._taint_rules = ""
            for version in TAINT_RULES:
                path = f"/apis/resource.k8s.io/{version}"
                try:
                    resources = self.call("GET", path)["resources"]
                except RefusedError:
                    continue
                if any(each["name"] == "devicetaintrules" for each in resources):
                    self._taint_rules = path
                    break
        return self._taint_rules or None

    def _path(self, plural: str, namespace: str) -> str:
        group = self.taint_rules_path() if plural == "devicetaintrules" else _PATHS[plural]
        assert group is not None, f"{plural} are not served"
        return f"{group}/namespaces/{namespace}/{plural}" if namespace else f"{group}/{plural}"
