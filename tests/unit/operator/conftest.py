"""A cluster for the operator: the API server in memory, with discovery."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from drakit_explain.kinds import KINDS
from drakit_formats import crds
from e2e.images.go import CEL_MINORS, cel_programs
from tests.fakes.kube import Target
from tests.fakes.objects import Objects
from tests.programs import WITHOUT_GO

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


GROUP = "resource.k8s.io"
OF_DRA = [
    *(_resource(plural, kind, namespaced=True) for plural, kind in NAMESPACED.items()),
    *(_resource(plural, kind, namespaced=False) for plural, kind in CLUSTERWIDE.items()),
]
OURS = {
    "devicedrivers": "DeviceDriver",
    "devicemaintenances": "DeviceMaintenance",
    "hostdevicepolicies": "HostDevicePolicy",
    "nodedevicereports": "NodeDeviceReport",
}
OF_DRAKIT = [
    *(_resource(plural, kind, namespaced=False) for plural, kind in OURS.items()),
    _resource("devicedrivers/status", "DeviceDriver", namespaced=False),
    _resource("hostdevicepolicies/status", "HostDevicePolicy", namespaced=False),
]
RULES = _resource("devicetaintrules", "DeviceTaintRule", namespaced=False)


def _discovered(path: str, versions: list[str], *, ours: bool) -> dict | None:
    """Answer the discovery of a cluster that serves the group in these versions, and our kinds."""
    match path.strip("/").split("/"):
        case ["apis", "drakit.dev", crds.VERSION] if ours:
            of = crds.API_VERSION
            return {"kind": "APIResourceList", "groupVersion": of, "resources": OF_DRAKIT}
        case ["apis", group, version] if group == GROUP and version in versions:
            resources = [RULES] if version in ("v1beta2", "v1alpha3") else []
            if version != "v1alpha3":
                resources = [*OF_DRA, *resources]
            of = f"{GROUP}/{version}"
            return {"kind": "APIResourceList", "groupVersion": of, "resources": resources}
        case _:
            return None


class Cluster(Objects):
    """A cluster as the operator sees it."""

    driver = "d"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        versions = self.served.setdefault(GROUP, ["v1", "v1beta2"])
        ours = bool(self.served.setdefault("drakit.dev", [crds.VERSION]))
        if (answer := _discovered(request.path, versions, ours=ours)) is not None:
            return web.json_response(answer)
        return await super()._handle(request)

    def is_watched(self) -> bool:
        """Whether the operator watches all kinds, and pods on nodes."""
        return self.watch_count == len(KINDS) + 1

    def add_policy(self, name: str) -> None:
        self.store(
            f"/apis/{crds.API_VERSION}/hostdevicepolicies/{name}",
            {
                "apiVersion": crds.API_VERSION,
                "kind": "HostDevicePolicy",
                "metadata": {"uid": name},
                "spec": {},
            },
        )

    def add_maintenance(self, name: str, **devices: str) -> None:
        self.store(
            f"/apis/{crds.API_VERSION}/devicemaintenances/{name}",
            {
                "apiVersion": crds.API_VERSION,
                "kind": "DeviceMaintenance",
                "metadata": {"uid": name},
                "spec": {"devices": devices, "mode": "Cordon"},
            },
        )

    def add_driver(self, name: str, **spec: object) -> None:
        self.store(
            f"/apis/{crds.API_VERSION}/devicedrivers/{name}",
            {"apiVersion": crds.API_VERSION, "kind": "DeviceDriver", "spec": spec},
        )

    def add_report(self, node: str, *policies: str, generation: int = 1) -> None:
        outcomes = [
            {
                "name": each,
                "uid": each,
                "observedGeneration": generation,
                "generation": generation,
                "matched": 1,
                "published": 1,
            }
            for each in policies
        ]
        driver = "hostdev.drakit.dev"
        self.store(
            f"/apis/{crds.API_VERSION}/nodedevicereports/{node}.{driver}",
            {
                "apiVersion": crds.API_VERSION,
                "kind": "NodeDeviceReport",
                "spec": {"nodeName": node, "driver": driver},
                "status": {"policies": outcomes},
            },
        )

    def add_rule(self, name: str, **selector: str) -> None:
        taint = {"key": "example.com/broken", "effect": "NoSchedule"}
        self.store(
            f"/apis/{GROUP}/v1beta2/devicetaintrules/{name}",
            {
                "apiVersion": f"{GROUP}/v1beta2",
                "kind": "DeviceTaintRule",
                "spec": {"deviceSelector": selector, "taint": taint},
            },
        )

    def events(self) -> list[dict]:
        return self.objects("/apis/events.k8s.io/v1/events")

    def writes_of_events(self) -> list[tuple[str, str]]:
        return [write for write in self.writes() if "/events" in write[1]]

    def forget(self, path: str) -> None:
        """Lose an object without a word to any watch, as in a gap that ends in a new list."""
        del self.cluster.objects[Target.parse(path).key]

    def told_of_pods(self) -> set[tuple[str, str, str]]:
        return {each for each in self.told() if each[0] == "Pod"}

    def told(self) -> set[tuple[str, str, str]]:
        """Recorded Events: kind and name of the object, and the Event's reason."""
        return {
            (event["regarding"]["kind"], event["regarding"]["name"], event["reason"])
            for event in self.events()
        }


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as server:
        yield server


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator of each release of Kubernetes, as the image has them."""
    if not WITHOUT_GO:
        monkeypatch.setenv("DRAKIT_CEL", str(cel_programs() / f"drakit-cel-{CEL_MINORS[-1]}"))
