"""
The API objects of a kit: published ResourceSlices, and claims that are allocated as a scheduler
would allocate them.

Does not depend on the node plugin, or on the kubelet.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from drakit.device import ClaimReference
from drakit.testing.apiserver import FakeApiServer
from drakit.testing.conformance.facts import ClaimUnderTest, ConformanceError, PublishedDevice

NAMESPACE = "lab"

PUBLISH_SECONDS = 10.0
"""Maximum time from the driver's registration until a device is published. The node plugin does not
wait for anything else in between."""

SETTLE_SECONDS = 0.2
"""How long the published device list must stay unchanged to be considered complete. A list that is
the same as after the previous start is complete at once."""

SETTLE_PROGRAM_SECONDS = 1.0
"""Like `SETTLE_SECONDS`, but for drivers in a separate program, which may register its resources
one at a time."""

LIST_SECONDS = 2.0
"""How long to wait for enough devices. A driver may list them one at a time."""

POLL_SECONDS = 0.02

_SLICES = "/apis/resource.k8s.io/v1/resourceslices"
_CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
_EVENTS = "/apis/events.k8s.io/v1/events"


class Cluster:
    """The cluster that contains a kit's node."""

    def __init__(self, api: FakeApiServer, *, node: str) -> None:
        self._api = api
        self._node = node
        self._numbers = itertools.count(1)
        self._settled: frozenset[tuple[str, str]] = frozenset()
        api.store(f"/api/v1/nodes/{node}", {"metadata": {"uid": str(uuid.uuid4())}})

    # ------------------------------------------------------------ published devices

    def slices(self, driver: str) -> list[dict[str, Any]]:
        """Return the ResourceSlices of a driver."""
        return [body for body in self._api.objects(_SLICES) if body["spec"].get("driver") == driver]

    def slice_writes(self) -> int:
        """Return the number of ResourceSlice writes, not counting dry runs."""
        return sum(
            method not in ("GET", "WATCH") and path.startswith(_SLICES) and not query.get("dryRun")
            for (method, path), query in zip(self._api.requests, self._api.queries, strict=False)
        )

    def devices(self, driver: str) -> list[PublishedDevice]:
        """Return the published devices of a driver, from the newest generation of each pool."""
        slices = self.slices(driver)
        newest: dict[str, int] = {}
        for body in slices:
            pool = body["spec"]["pool"]
            newest[pool["name"]] = max(newest.get(pool["name"], 0), pool["generation"])
        found = [
            _published(device, pool=body["spec"]["pool"]["name"])
            for body in slices
            if body["spec"]["pool"]["generation"] == newest[body["spec"]["pool"]["name"]]
            for device in body["spec"].get("devices") or ()
        ]
        return sorted(found, key=lambda device: (device.pool, device.name))

    async def until_published(self, driver: str, *, is_program: bool) -> None:
        """Wait until a driver has published a device that pods could get, and its device list is
        complete. Raises ConformanceError on timeout. `is_program` means that the driver is a
        separate process."""
        if not await within(PUBLISH_SECONDS, lambda: any(map(_usable, self.devices(driver)))):
            raise ConformanceError(
                f"{PUBLISH_SECONDS:g} s after its registration the driver has no published device "
                f"that pods could get"
            )
        # A list is complete if it is the same as after the previous start, or stays unchanged for a
        # while.
        loop = asyncio.get_running_loop()
        settle = SETTLE_PROGRAM_SECONDS if is_program else SETTLE_SECONDS
        now, since, until = self._names(driver), loop.time(), loop.time() + PUBLISH_SECONDS
        while now != self._settled and loop.time() < min(since + settle, until):
            await asyncio.sleep(POLL_SECONDS)
            if (names := self._names(driver)) != now:
                now, since = names, loop.time()
        self._settled = now

    async def until_listed(self, driver: str, *, at_least: int) -> list[PublishedDevice]:
        """Wait briefly until this many devices are published, and return all published devices."""
        await within(LIST_SECONDS, lambda: len(self.devices(driver)) >= at_least)
        return self.devices(driver)

    def _names(self, driver: str) -> frozenset[tuple[str, str]]:
        return frozenset((device.pool, device.name) for device in self.devices(driver))

    def events(self) -> list[str]:
        """Return the notes of all Events."""
        return [str(event.get("note", "")) for event in self._api.objects(_EVENTS)]

    # ------------------------------------------------------------ claims

    def store_claim(
        self,
        driver: str,
        results: Iterable[Mapping[str, Any]],
        *,
        devices: Sequence[PublishedDevice],
        configs: Sequence[Mapping[str, Any]],
        metadata: Mapping[str, Any] = MappingProxyType({}),
        reserved_for: Sequence[Mapping[str, Any]] | None = None,
        of: ClaimUnderTest | None = None,
    ) -> ClaimUnderTest:
        """Store a claim with these allocation results. `of` is an existing claim to allocate
        again."""
        number = next(self._numbers)
        reference = (
            of.reference
            if of is not None
            else ClaimReference(namespace=NAMESPACE, name=f"claim-{number}", uid=str(uuid.uuid4()))
        )
        body = _claim_body(
            reference, driver=driver, node=self._node, results=list(results), configs=configs
        )
        body["metadata"] |= metadata
        if reserved_for is not None:
            body["status"]["reservedFor"] = [dict(consumer) for consumer in reserved_for]
        stored = self._api.store(f"{_CLAIMS}/{reference.name}", body)
        return ClaimUnderTest(reference=reference, devices=tuple(devices), body=stored)

    def delete_claim(self, claim: ClaimUnderTest) -> None:
        """Delete a claim object immediately, if it still exists."""
        path = f"{_CLAIMS}/{claim.reference.name}"
        if self._api.object(path) is not None:
            self._api.remove(path)


def result_for(
    device: PublishedDevice,
    *,
    driver: str,
    request: str = "main",
    admin_access: bool = False,
    share_id: str | None = None,
    consumed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the allocation result that a scheduler would write for a device. If several claims can
    use the device, the result is for a share, except with admin access."""
    result: dict[str, Any] = {
        "driver": driver,
        "pool": device.pool,
        "device": device.name,
        "request": request,
    }
    if admin_access:
        result["adminAccess"] = True
    shared = device.allow_multiple and not admin_access
    if share_id is not None or shared:
        result["shareID"] = share_id or str(uuid.uuid4())
    if consumed is not None or shared:
        result["consumedCapacity"] = dict(default_share(device) if consumed is None else consumed)
    return result


def default_share(device: PublishedDevice) -> Mapping[str, str]:
    """Return the consumed capacity of a claim that does not request an amount."""
    taken: dict[str, str] = {}
    capacities: Mapping[str, Mapping[str, Any]] = device.body.get("capacity") or {}
    for name, capacity in capacities.items():
        policy: Mapping[str, Any] = capacity.get("requestPolicy") or {}
        taken[name] = str(policy.get("default") or capacity["value"])
    return taken


async def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Wait until a condition is met or the time is up. Return whether the condition is met."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while not (holds := condition()) and loop.time() < until:
        await asyncio.sleep(POLL_SECONDS)
    return holds


def _usable(device: PublishedDevice) -> bool:
    return not any(taint.get("key") == "drakit.dev/stopped" for taint in device.taints)


def _published(body: Mapping[str, Any], *, pool: str) -> PublishedDevice:
    attributes: Mapping[str, Mapping[str, Any]] = body.get("attributes") or {}
    capacity: Mapping[str, Mapping[str, Any]] = body.get("capacity") or {}
    return PublishedDevice(
        name=body["name"],
        pool=pool,
        attributes={name: next(iter(value.values())) for name, value in attributes.items()},
        capacity={name: str(value["value"]) for name, value in capacity.items()},
        taints=tuple(body.get("taints") or ()),
        allow_multiple=bool(body.get("allowMultipleAllocations")),
        body=body,
    )


def _claim_body(
    reference: ClaimReference,
    *,
    driver: str,
    node: str,
    results: Sequence[Mapping[str, Any]],
    configs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    requests = dict.fromkeys(str(result.get("request", "main")) for result in results)
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"uid": reference.uid},
        "spec": {
            "devices": {
                "requests": [
                    {"name": name, "exactly": {"deviceClassName": driver}} for name in requests
                ]
            }
        },
        "status": {
            "reservedFor": [{"resource": "pods", "name": "pod", "uid": str(uuid.uuid4())}],
            "allocation": {
                "devices": {
                    "results": [dict(result) for result in results],
                    "config": [
                        {
                            "source": "FromClaim",
                            "requests": [],
                            "opaque": {"driver": driver, "parameters": dict(parameters)},
                        }
                        for parameters in configs
                    ],
                },
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [here]}]},
            },
        },
    }
