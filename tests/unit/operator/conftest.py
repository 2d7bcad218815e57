"""A cluster for the operator: the API server in memory, with the discovery that Kopf asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tests.fakes.kube import FakeApiServer, Target

RESOURCE = "/apis/resource.k8s.io/v1"
NAMESPACED = {"resourceclaims": "ResourceClaim", "resourceclaimtemplates": "ResourceClaimTemplate"}
CLUSTERWIDE = {"resourceslices": "ResourceSlice", "deviceclasses": "DeviceClass"}


def _resource(plural: str, kind: str, *, namespaced: bool) -> dict:
    return {
        "name": plural,
        "singularName": kind.lower(),
        "kind": kind,
        "namespaced": namespaced,
        "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
    }


_GROUP_VERSION = {"groupVersion": "resource.k8s.io/v1", "version": "v1"}
DISCOVERY = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            _resource("pods", "Pod", namespaced=True),
            _resource("nodes", "Node", namespaced=False),
            _resource("namespaces", "Namespace", namespaced=False),  # Kopf waits until it sees it
        ],
    },
    "/apis": {
        "kind": "APIGroupList",
        "groups": [
            {
                "name": "resource.k8s.io",
                "versions": [_GROUP_VERSION],
                "preferredVersion": _GROUP_VERSION,
            }
        ],
    },
    RESOURCE: {
        "kind": "APIResourceList",
        "groupVersion": "resource.k8s.io/v1",
        "resources": [
            *(_resource(plural, kind, namespaced=True) for plural, kind in NAMESPACED.items()),
            *(_resource(plural, kind, namespaced=False) for plural, kind in CLUSTERWIDE.items()),
        ],
    },
}


class Cluster(FakeApiServer):
    """What the operator sees; ``waits`` and the like are what users do."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        return await super()._handle(request)

    def add_class(self, name: str, driver: str) -> None:
        selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
        self.store(
            f"{RESOURCE}/deviceclasses/{name}",
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "DeviceClass",
                "spec": {"selectors": [selector]},
            },
        )

    def add_slice(self, name: str, driver: str, *devices: str) -> None:
        self.store(
            f"{RESOURCE}/resourceslices/{name}",
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceSlice",
                "spec": {
                    "driver": driver,
                    "nodeName": "n1",
                    "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
                    "devices": [{"name": device} for device in devices],
                },
            },
        )

    def add_claim(
        self, name: str, device_class: str, *, allocated: str = "", pod: str = ""
    ) -> None:
        status: dict = {}
        if allocated:
            result = {"request": "gpu", "driver": "d", "pool": "n1", "device": allocated}
            status = {"allocation": {"devices": {"results": [result]}}}
        if pod:
            status["reservedFor"] = [{"resource": "pods", "name": pod, "uid": pod}]
        self.store(
            f"{RESOURCE}/namespaces/lab/resourceclaims/{name}",
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "spec": {"devices": {"requests": [_request(device_class)]}},
                "status": status,
            },
        )

    def add_template(self, name: str, device_class: str) -> None:
        self.store(
            f"{RESOURCE}/namespaces/lab/resourceclaimtemplates/{name}",
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaimTemplate",
                "spec": {"spec": {"devices": {"requests": [_request(device_class)]}}},
            },
        )

    def add_pod(self, name: str, claim: str, *, phase: str = "Pending") -> None:
        self.store(
            f"/api/v1/namespaces/lab/pods/{name}",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "spec": {"resourceClaims": [{"name": "gpu", "resourceClaimName": claim}]},
                "status": {"phase": phase},
            },
        )

    def events(self) -> list[dict]:
        return self.objects("/apis/events.k8s.io/v1/namespaces/lab/events")

    def writes_of_events(self) -> list[tuple[str, str]]:
        return [write for write in self.writes() if "/events" in write[1]]

    def forget(self, path: str) -> None:
        """Lose an object without a word to any watch, as in a gap that ends in a new list."""
        del self.cluster.objects[Target.parse(path).key]

    def told(self) -> set[tuple[str, str, str]]:
        """What was told: kind and name of the object, and the Event's reason."""
        return {
            (event["regarding"]["kind"], event["regarding"]["name"], event["reason"])
            for event in self.events()
        }


def _request(device_class: str) -> dict:
    return {"name": "gpu", "exactly": {"deviceClassName": device_class}}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as server:
        yield server
