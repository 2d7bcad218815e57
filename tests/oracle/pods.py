"""
Random pods in the clusters of :mod:`.worlds`, as raw objects: what the scheduler's other filters,
allocated claims and DeviceTaintRules add to a search on several nodes.

A seed makes the same situation each time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from tests.oracle.worlds import DRIVERS, Body, World, make_cluster

DEFAULT_SINCE = 36
"""The minor release since which the fields of all feature gates are stored by default."""

_DEVICE_FIELDS = (
    "allowMultipleAllocations",
    "allNodes",
    "bindingConditions",
    "bindingFailureConditions",
    "consumesCounters",
    "nodeName",
    "taints",
)
"""Those of a device that need a gate."""

_TAINT = {"key": "example.com/maintenance", "value": "", "effect": "NoSchedule"}
_PLAIN: Body = {
    "attributes": {
        "model": {"string": "x"},
        "numa": {"int": 0},
        "fast": {"bool": True},
        "version": {"version": "1.2.0"},
        "common.example.com/root": {"string": "r0"},
    },
    "capacity": {"memory": {"value": "8Gi"}},
}
"""A device with everything that requests read."""

_NUMA = f'device.attributes["{DRIVERS[0]}"].numa == 0'
"""A selector that fails at devices without the attribute."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A cluster, and a pod that waits for a node."""

    world: World
    """The world, whose `claims` are those of the pod, in order."""

    pod: Body
    rules: list[Body]

    def gates(self, *, minor: int) -> dict[str, bool]:
        """Return the feature gates that differ from the defaults of Kubernetes 1.`minor`."""
        return {"DRADeviceTaintRules": True} if minor >= DEFAULT_SINCE else {}

    def question(self, *, minor: int) -> Body:
        """Return the question to the scheduler of Kubernetes 1.`minor`."""
        version = "v1" if minor >= 37 else "v1beta2"
        rule = {"apiVersion": f"resource.k8s.io/{version}", "kind": "DeviceTaintRule"}
        return {
            "pod": self.pod,
            "nodes": self.world.nodes,
            "claims": [*self.world.claims, *self.world.allocated],
            "classes": self.world.classes,
            "slices": self.world.slices,
            "rules": [{**rule, **each} for each in self.rules],
        }


def make_situation(seed: int, *, minor: int) -> Situation:
    """Make the situation of a seed, with 2 to 4 nodes, as Kubernetes 1.`minor` stores it."""
    world = make_cluster(seed, nodes=(2, 3, 4))
    found = _Maker(random.Random(f"pod {seed}"), world).situation()
    return found if minor >= DEFAULT_SINCE else _without_gates(found)


def _without_gates(situation: Situation) -> Situation:
    """Remove the fields that 1.34 and 1.35 do not store by default."""
    world = situation.world
    for body in world.slices:
        spec = body["spec"]
        spec.pop("sharedCounters", None)
        if spec.pop("perDeviceNodeSelection", None):
            spec["allNodes"] = True
        for device in spec.get("devices", ()):
            for field in _DEVICE_FIELDS:
                device.pop(field, None)
            for capacity in device.get("capacity", {}).values():
                capacity.pop("requestPolicy", None)
    for claim in world.claims:
        devices = claim["spec"]["devices"]
        devices["constraints"] = [
            each for each in devices.get("constraints", ()) if "matchAttribute" in each
        ]
        for exact in exact_requests(claim):
            exact.pop("tolerations", None)
            exact.pop("capacity", None)
            for selector in exact.get("selectors", ()):
                if "allowMultipleAllocations" in selector["cel"]["expression"]:
                    selector["cel"]["expression"] = "true"
    for claim in world.allocated:
        for result in claim["status"]["allocation"]["devices"]["results"]:
            result.pop("shareID", None)
            result.pop("consumedCapacity", None)
    return replace(situation, rules=[])


def exact_requests(claim: Body) -> list[Body]:
    """Return the exact requests of a claim, those of its lists included."""
    return [
        exact
        for each in claim["spec"]["devices"]["requests"]
        for exact in (each.get("firstAvailable") or [each["exactly"]])
    ]


class _Maker:
    def __init__(self, chance: random.Random, world: World) -> None:
        self._chance = chance
        self._world = world

    def situation(self) -> Situation:
        for node in self._world.nodes:
            self._complete(node)
        self._ask_for_less()
        if self._maybe(0.4):
            self._make_alike()
        elif self._maybe(0.5):
            self._add_pool("plain", DRIVERS[0], [_PLAIN] * 6)
        if self._maybe(0.15):
            self._add_large_pool()
        names = [claim["metadata"]["name"] for claim in self._world.claims]
        if len(names) > 1 and self._maybe(0.3):
            self._allocate(self._world.claims[-1])
        elif self._maybe(0.05):
            self._break()
        return Situation(
            world=self._world,
            pod=self._pod(names),
            rules=[self._rule()] if self._maybe(0.2) else [],
        )

    def _maybe(self, probability: float) -> bool:
        return self._chance.random() < probability

    # ---- nodes and devices

    def _complete(self, node: Body) -> None:
        """Give a node what filters before the DynamicResources plugin look at."""
        cpu = self._chance.choice(("1", "4", "4", "4"))
        node["metadata"]["uid"] = node["metadata"]["name"]
        node["status"] = {"allocatable": {"cpu": cpu, "memory": "8Gi", "pods": "110"}}
        if self._maybe(0.1):
            node["spec"] = {"unschedulable": True}
        elif self._maybe(0.1):
            node["spec"] = {"taints": [_TAINT]}

    def _make_alike(self) -> None:
        """Give the nodes equal devices, but one node a pool with a flaw."""
        self._world.slices.clear()
        self._world.allocated.clear()
        for node in self._world.nodes:
            if self._maybe(0.8):
                self._add_pool("plain", DRIVERS[0], [_PLAIN] * 4, node=node)
        for exact in self._exact():
            if self._maybe(0.4):
                exact.pop("count", None)
                exact["allocationMode"] = "All"
            if self._maybe(0.4):
                exact["selectors"] = [{"cel": {"expression": _NUMA}}]
        devices = [dict(_PLAIN) for _ in range(3)]
        missing, generation = 0, 1
        match self._chance.choice(("attribute", "slice", "name", "value", "taint", "generation")):
            case "attribute":
                devices[1] = {"attributes": {"model": {"string": "x"}}}
            case "slice":
                missing = 1
            case "name":
                devices[1] = {"name": "dev-0", **_PLAIN}
            case "value":
                devices[1] = {"attributes": {**_PLAIN["attributes"], "numa": {"int": 1}}}
            case "taint":
                devices[1] = {
                    **_PLAIN,
                    "taints": [{"key": "example.com/t", "effect": "NoSchedule"}],
                }
            case _:
                missing, generation = 1, 2
        driver = self._chance.choice((*DRIVERS, DRIVERS[0]))
        node = self._chance.choice(self._world.nodes)
        self._add_pool("flaw", driver, devices, node=node, missing=missing, generation=generation)
        if generation > 1:  # an older generation that is complete does not count
            self._add_pool("flaw", driver, devices, node=node)

    def _add_large_pool(self) -> None:
        devices = [{"attributes": {"model": {"string": "x"}}}]
        number = self._chance.choice((24, 32, 33, 40))
        self._add_pool("large", self._chance.choice(DRIVERS), devices * number)
        for exact in self._exact():
            if self._maybe(0.5):
                exact.pop("count", None)
                exact |= self._chance.choice(
                    (
                        {"allocationMode": "All"},
                        {"allocationMode": "ExactCount", "count": 20},
                        {"allocationMode": "ExactCount", "count": 33},
                    )
                )

    def _add_pool(
        self,
        kind: str,
        driver: str,
        devices: list[Body],
        *,
        node: Body | None = None,
        missing: int = 0,
        generation: int = 1,
    ) -> None:
        """Add a pool of one slice to a node, by default to any."""
        place = (node or self._chance.choice(self._world.nodes))["metadata"]["name"]
        pool = {"name": f"{kind}-{place}", "generation": generation}
        spec: Body = {
            "driver": driver,
            "pool": {**pool, "resourceSliceCount": 1 + missing},
            "nodeName": place,
            "devices": [{"name": f"dev-{n}", **device} for n, device in enumerate(devices)],
        }
        name = f"{driver}-{kind}-{place}-{generation}"
        self._world.slices.append({"metadata": {"name": name, "uid": name}, "spec": spec})

    def _exact(self) -> list[Body]:
        """Return the exact requests of all claims."""
        return [exact for claim in self._world.claims for exact in exact_requests(claim)]

    def _rule(self) -> Body:
        of = self._chance.choice(self._world.slices)["spec"] if self._world.slices else {}
        selector: Body = {"driver": of.get("driver", DRIVERS[0])}
        if self._maybe(0.7):
            selector["pool"] = of.get("pool", {}).get("name", "none")
            if of.get("devices") and self._maybe(0.5):
                selector["device"] = self._chance.choice(of["devices"])["name"]
        effect = self._chance.choice(("NoSchedule", "NoExecute", "None"))
        taint = {"key": "example.com/t", "value": self._chance.choice(("", "v")), "effect": effect}
        return {
            "metadata": {"name": "rule", "uid": "rule"},
            "spec": {"deviceSelector": selector, "taint": taint},
        }

    # ---- claims and the pod

    def _ask_for_less(self) -> None:
        """Keep two claims, often with one request each: what fits nowhere shows little."""
        del self._world.claims[self._chance.choice((1, 1, 2)) :]
        for claim in self._world.claims:
            devices = claim["spec"]["devices"]
            if self._maybe(0.6):
                del devices["requests"][1:]
                devices.pop("constraints", None)

    def _allocate(self, claim: Body) -> None:
        """Allocate a claim, with or without a place, and with or without another consumer."""
        node = self._chance.choice(self._world.nodes)["metadata"]["name"]
        terms = self._chance.choice(
            (
                {"matchFields": [_in("metadata.name", node)]},
                {"matchFields": [_in("metadata.name", node)]},
                {"matchExpressions": [_in("zone", self._chance.choice(("x", "y")))]},
                None,
            )
        )
        name = claim["spec"]["devices"]["requests"][0]["name"]
        result = {"request": name, "driver": DRIVERS[0], "pool": "gone", "device": "dev-0"}
        allocation: Body = {"devices": {"results": [result]}}
        if terms is not None:
            allocation["nodeSelector"] = {"nodeSelectorTerms": [terms]}
        status: Body = {"allocation": allocation}
        if self._maybe(0.5):
            status["reservedFor"] = [{"resource": "pods", "name": "other", "uid": "other"}]
        claim["status"] = status

    def _break(self) -> None:
        """Break something that the scheduler finds before it looks at nodes, or a selector."""
        match self._chance.choice(("claim", "class", "deletion", "selector")):
            case "claim":
                del self._world.claims[0]
            case "class":
                self._exact()[0]["deviceClassName"] = "class-missing"
            case "deletion":
                self._world.claims[0]["metadata"] |= {
                    "deletionTimestamp": "2026-01-01T00:00:00Z",
                    "finalizers": ["resource.kubernetes.io/delete-protection"],
                }
            case _:
                self._exact()[-1]["selectors"] = [{"cel": {"expression": "device.nothing"}}]

    def _pod(self, claims: list[str]) -> Body:
        container: Body = {"name": "main", "image": "main"}
        if self._maybe(0.4):
            container["resources"] = {"requests": {"cpu": "2"}}
        spec: Body = {
            "schedulerName": "default-scheduler",
            "containers": [container],
            "resourceClaims": [{"name": each, "resourceClaimName": each} for each in claims],
        }
        if self._maybe(0.25):
            spec["nodeSelector"] = {"zone": self._chance.choice(("x", "y"))}
        elif self._maybe(0.07):
            node = self._chance.choice(self._world.nodes)["metadata"]["name"]
            terms = {"nodeSelectorTerms": [{"matchFields": [_in("metadata.name", node)]}]}
            required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
            spec["affinity"] = {"nodeAffinity": required}
        if self._maybe(0.2):
            spec["tolerations"] = [{"key": _TAINT["key"], "operator": "Exists"}]
        metadata = {"name": "pod", "namespace": "lab", "uid": "pod"}
        return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


def _in(key: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}
