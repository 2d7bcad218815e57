"""
Random small clusters, as raw objects of the API: nodes, classes, slices, and claims to allocate.

A seed makes the same world each time. Names, counts and values come from few choices, so that
requests compete, constraints bind, and pools contradict themselves often. A world for a minor
release of Kubernetes has the fields that its API server stores with the default feature gates.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from drakit_explain.cel.gates import DEFAULT_GATES
from drakit_explain.cel.helper import Helper
from drakit_explain.model import PodClaim, PodFacts
from drakit_explain.projection import project_claim, project_class, project_node, project_slice
from drakit_explain.verdicts import Verdict
from drakit_explain.world import World as Facts

Body = dict[str, Any]

DRIVERS = ("a.example.com", "b.example.com")
NEWEST = list(DEFAULT_GATES)[-1]
"""The newest minor release."""

NODE = "node-1"
OTHER = "node-2"
LABELS = {"kubernetes.io/hostname": NODE, "zone": "x"}


@dataclass(frozen=True, kw_only=True)
class World:
    """One cluster, as the allocator needs it."""

    seed: int
    minor: str
    nodes: list[Body]
    classes: list[Body]
    slices: list[Body]
    claims: list[Body]
    allocated: list[Body]

    def in_use(self) -> list[Body]:
        """The results of all allocated claims."""
        of_claims = [claim["status"]["allocation"]["devices"] for claim in self.allocated]
        return [result for devices in of_claims for result in devices["results"]]

    def verdicts(self, helper: Helper) -> tuple[Verdict, ...]:
        """Ask the helper's allocator about all nodes, with the objects as they are."""
        question = {
            "nodes": self.nodes,
            "classes": self.classes,
            "slices": self.slices,
            "claims": self.claims,
            "inUse": self.in_use(),
            "gates": dict.fromkeys(DEFAULT_GATES[self.minor], True),
        }
        return helper.verdicts(orjson.dumps(question), nodes=len(self.nodes))

    def facts(self) -> Facts:
        """The explainer's facts of the cluster."""
        facts = Facts()
        for node in self.nodes:
            facts.apply(project_node({"metadata": {"uid": "node", **node["metadata"]}}))
        for project, bodies in (
            (project_class, self.classes),
            (project_slice, self.slices),
            (project_claim, [*self.allocated, *self.claims]),
        ):
            for body in bodies:
                facts.apply(project(body))
        return facts

    def pod(self) -> PodFacts:
        """A pod with all claims that are to be allocated."""
        claims = [project_claim(body) for body in self.claims]
        return PodFacts(
            namespace=claims[0].namespace,
            name="pod",
            uid="pod",
            claims=tuple(PodClaim(name=each.name, claim=each.name) for each in claims),
        )


def make_world(seed: int, minor: str = NEWEST) -> World:
    """Make the world of a seed, with one node, for a minor release of Kubernetes."""
    world = _Maker(random.Random(seed)).world(seed, minor)
    _drop_fields(world, DEFAULT_GATES[minor])
    return world


def _drop_fields(world: World, gates: Collection[str]) -> None:
    """Drop what an API server drops or rejects without these gates."""
    specs = [body["spec"] for body in world.slices]
    devices = [device for spec in specs for device in spec.get("devices", ())]
    claims = [claim["spec"]["devices"] for claim in world.claims]
    requests = [
        exact
        for claim in claims
        for request in claim["requests"]
        for exact in request.get("firstAvailable", [request.get("exactly")])
    ]
    results = world.in_use()
    dropped: list[tuple[Sequence[Body], Collection[str]]] = []
    if "DRADeviceBindingConditions" not in gates:
        dropped.append((devices, ("bindingConditions", "bindingFailureConditions")))
    if "DRADeviceTaints" not in gates:
        dropped += [(devices, ("taints",)), (requests, ("tolerations",))]
    if "DRAPartitionableDevices" not in gates:
        for spec in specs:
            spec.setdefault("devices", [])
            if spec.get("perDeviceNodeSelection"):
                spec["allNodes"] = True
        dropped.append((specs, ("sharedCounters", "perDeviceNodeSelection")))
        dropped.append((devices, ("consumesCounters", "nodeName", "allNodes")))
    if "DRAConsumableCapacity" not in gates:
        capacities = [each for device in devices for each in device.get("capacity", {}).values()]
        dropped += [(capacities, ("requestPolicy",)), (requests, ("capacity",))]
        dropped.append((devices, ("allowMultipleAllocations",)))
        dropped.append((results, ("shareID", "consumedCapacity")))
        for claim in claims:
            constraints = claim.get("constraints", ())
            claim["constraints"] = [c for c in constraints if "distinctAttribute" not in c]
        for request in requests:
            request["selectors"] = [
                each
                for each in request.get("selectors", ())
                if "allowMultipleAllocations" not in each["cel"]["expression"]
            ]
    for bodies, fields in dropped:
        for body in bodies:
            for name in fields:
                body.pop(name, None)


def make_cluster(seed: int, minor: str = NEWEST, *, nodes: tuple[int, ...] = (2, 3)) -> World:
    """Make the world of a seed with more nodes, which have pools of their own."""
    chance = random.Random(f"cluster {seed}")
    world = _Maker(random.Random(seed)).world(seed, minor)
    for number in range(2, chance.choice(nodes) + 1):
        _Maker(chance, node=f"node-{number}", other=NODE).grow(world)
    _drop_fields(world, DEFAULT_GATES[minor])
    return world


class _Maker:
    def __init__(self, chance: random.Random, *, node: str = NODE, other: str = OTHER) -> None:
        """`other` is a node that some slices of a pool name, too."""
        self._chance = chance
        self._node = node
        self._other = other

    def world(self, seed: int, minor: str) -> World:
        slices = [
            body
            for driver in DRIVERS[: self._chance.choice((1, 1, 2))]
            for number in range(self._chance.choice((1, 1, 2)))
            for body in self._pool(driver, f"pool-{number}")
        ]
        self._chance.shuffle(slices)
        classes = [self._class(f"class-{number}") for number in range(3)]
        return World(
            seed=seed,
            minor=minor,
            nodes=[{"metadata": {"name": NODE, "labels": LABELS}}],
            classes=classes,
            slices=slices,
            claims=[self._claim(f"claim-{n}") for n in range(self._chance.choice((1, 1, 2, 3)))],
            allocated=self._allocated(slices),
        )

    def grow(self, world: World) -> None:
        """Add the node, with pools that are like those of the first node, or that are not."""
        zone = self._chance.choice(("x", "y"))
        labels = {"kubernetes.io/hostname": self._node, "zone": zone}
        world.nodes.append({"metadata": {"name": self._node, "labels": labels}})
        copied = self._maybe(0.5)
        slices = (
            self._copied(world.slices)
            if copied
            else [
                body
                for driver in DRIVERS[: self._chance.choice((0, 1, 1, 2))]
                for number in range(self._chance.choice((1, 1, 2)))
                for body in self._pool(driver, f"pool-{number}-{self._node}")
            ]
        )
        world.slices.extend(slices)
        world.allocated.extend(self._allocated(slices, name=f"held-{self._node}"))

    def _copied(self, slices: list[Body]) -> list[Body]:
        """Return pools like those that the first node has, one in five with another device."""
        found: list[Body] = []
        for body in slices:
            text = json.dumps(body)
            if json.dumps(NODE) not in text:
                continue
            copy = json.loads(text.replace(json.dumps(NODE), json.dumps(self._node)))
            copy["metadata"] = dict.fromkeys(
                ("name", "uid"), f"{body['metadata']['name']}-{self._node}"
            )
            copy["spec"]["pool"]["name"] += f"-{self._node}"
            if copy["spec"].get("devices") and self._maybe(0.2):
                device = self._chance.choice(copy["spec"]["devices"])
                device["attributes"] = self._attributes()
            found.append(copy)
        return found

    def _maybe(self, probability: float) -> bool:
        return self._chance.random() < probability

    # ---- slices

    def _pool(self, driver: str, name: str) -> list[Body]:
        partitioned = self._maybe(0.3)
        generation = self._chance.choice((1, 1, 2))
        bodies: list[Body] = []
        count = self._chance.choice((1, 1, 2))
        place = self._place()
        for number in range(count):
            devices = [
                self._device(f"dev-{number}-{index}", partitioned=partitioned)
                for index in range(self._chance.choice((2, 3, 4, 6)))
            ]
            if self._maybe(0.03):
                devices.append(dict(devices[0]))  # two devices of one name
            bodies.append({"devices": devices, **place})
        if partitioned:
            place = {"nodeName": self._node} if place == {"perDeviceNodeSelection": True} else place
            sets = [
                {"name": "board", "counters": {"slots": {"value": "4"}, "mem": {"value": "8Gi"}}}
            ]
            if self._maybe(0.03):
                sets = [{"name": "other", "counters": {"slots": {"value": "4"}}}]
            bodies.append({"sharedCounters": sets, **place})
        total = len(bodies) + (1 if self._maybe(0.05) else 0)
        found: list[Body] = []
        for number, body in enumerate(bodies):
            each_generation = generation
            if self._maybe(0.03):
                each_generation += 1
            pool = {"name": name, "generation": each_generation, "resourceSliceCount": total}
            spec = {"driver": driver, "pool": pool, **body}
            if self._maybe(0.1) and "nodeName" in spec and count > 1:
                spec["nodeName"] = self._other
            if spec.get("perDeviceNodeSelection"):
                for device in spec.get("devices", ()):
                    device.update(
                        self._chance.choice(
                            (
                                {"nodeName": self._node},
                                {"nodeName": self._other},
                                {"allNodes": True},
                            )
                        )
                    )
            slice_name = f"{driver}-{name}-{number}-{self._chance.randrange(1000)}"
            found.append({"metadata": {"name": slice_name, "uid": slice_name}, "spec": spec})
        return found

    def _place(self) -> Body:
        zone = self._chance.choice(("x", "y"))
        term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}
        return self._chance.choice(
            (
                {"nodeName": self._node},
                {"nodeName": self._node},
                {"nodeName": self._node},
                {"allNodes": True},
                {"nodeSelector": {"nodeSelectorTerms": [term]}},
                {"perDeviceNodeSelection": True},
            )
        )

    def _device(self, name: str, *, partitioned: bool) -> Body:
        device: Body = {"name": name, "attributes": self._attributes()}
        if self._maybe(0.5):
            device["capacity"] = self._capacity()
        if self._maybe(0.2):
            device["allowMultipleAllocations"] = True
        if self._maybe(0.1):
            effect = self._chance.choice(("NoSchedule", "NoExecute", "None"))
            value = self._chance.choice(("", "v"))
            device["taints"] = [{"key": "example.com/t", "value": value, "effect": effect}]
        if partitioned and self._maybe(0.8):
            counters = {"slots": {"value": str(self._chance.choice((1, 2, 3)))}}
            if self._maybe(0.5):
                counters["mem"] = {"value": self._chance.choice(("1Gi", "4Gi"))}
            device["consumesCounters"] = [{"counterSet": "board", "counters": counters}]
        if self._maybe(0.05):
            device["bindingConditions"] = ["example.com/attached"]
            device["bindingFailureConditions"] = ["example.com/failed"]
        return device

    def _attributes(self) -> Body:
        attributes: Body = {"model": {"string": self._chance.choice(("x", "x", "y"))}}
        if self._maybe(0.9):
            attributes["numa"] = {"int": self._chance.choice((0, 1))}
        if self._maybe(0.4):
            attributes["fast"] = {"bool": self._chance.choice((True, False))}
        if self._maybe(0.4):
            attributes["version"] = {"version": self._chance.choice(("1.0.0", "1.2.0"))}
        if self._maybe(0.3):
            attributes["common.example.com/root"] = {"string": self._chance.choice(("r0", "r1"))}
        return attributes

    def _capacity(self) -> Body:
        capacity: Body = {"memory": {"value": self._chance.choice(("4Gi", "8Gi"))}}
        if self._maybe(0.5):
            capacity["memory"]["requestPolicy"] = self._chance.choice(
                (
                    {"default": "1Gi", "validRange": {"min": "1Gi", "max": "4Gi", "step": "1Gi"}},
                    {"default": "2Gi", "validRange": {"min": "1Gi"}},
                    {"default": "1Gi", "validValues": ["1Gi", "2Gi", "4Gi"]},
                    {"default": "1Gi"},
                )
            )
        if self._maybe(0.3):
            capacity["share"] = {"value": "10"}
            if self._maybe(0.5):
                capacity["share"]["requestPolicy"] = {
                    "default": "1",
                    "validRange": {"min": "1", "step": "3"},
                }
        return capacity

    # ---- classes and claims

    def _class(self, name: str) -> Body:
        choices = [f'device.driver == "{driver}"' for driver in DRIVERS]
        choices.append('"model" in device.attributes["a.example.com"]')
        selectors = [] if self._maybe(0.6) else [self._chance.choice(choices)]
        return {
            "metadata": {"name": name, "uid": name},
            "spec": {"selectors": [{"cel": {"expression": each}} for each in selectors]},
        }

    def _selector(self) -> str:
        domain = self._chance.choice(DRIVERS[:1] * 3 + DRIVERS[1:])
        of = f'device.attributes["{domain}"]'
        return self._chance.choice(
            (
                f'{of}.model == "x"',
                f'"numa" in {of} && {of}.numa == 0',
                f'"fast" in {of} && {of}.fast',
                f'"version" in {of} && {of}.version.isGreaterThan(semver("1.1.0"))',
                f"{of}.model != 'y'",
                f'"memory" in device.capacity["{domain}"] '
                f'&& device.capacity["{domain}"].memory.compareTo(quantity("6Gi")) > 0',
                "device.allowMultipleAllocations",
                "!device.allowMultipleAllocations",
            )
        )

    def _claim(self, name: str) -> Body:
        requests = [self._request(f"r{n}") for n in range(self._chance.choice((1, 1, 2, 3)))]
        spec: Body = {"requests": requests}
        constraints: list[Body] = []
        for _ in range(self._chance.choice((0, 0, 0, 1, 2))):
            kind = self._chance.choice(("matchAttribute", "matchAttribute", "distinctAttribute"))
            attribute = self._chance.choice(
                (
                    "a.example.com/numa",
                    "a.example.com/model",
                    "common.example.com/root",
                    "a.example.com/version",
                )
            )
            constraint: Body = {kind: attribute}
            if self._maybe(0.4):
                constraint["requests"] = [self._chance.choice(_names(requests))]
            constraints.append(constraint)
        if constraints:
            spec["constraints"] = constraints
        metadata = {"name": name, "namespace": "lab", "uid": name}
        return {"metadata": metadata, "spec": {"devices": spec}}

    def _request(self, name: str) -> Body:
        if self._maybe(0.2):
            return {
                "name": name,
                "firstAvailable": [
                    {"name": f"s{n}", **self._exact(admin=False)}
                    for n in range(self._chance.choice((1, 2, 3)))
                ],
            }
        return {"name": name, "exactly": self._exact(admin=True)}

    def _exact(self, *, admin: bool) -> Body:
        body: Body = {"deviceClassName": f"class-{self._chance.choice((0, 1, 2))}"}
        if self._maybe(0.12):
            body["allocationMode"] = "All"
        else:
            body |= {
                "allocationMode": "ExactCount",
                "count": self._chance.choice((1, 1, 1, 1, 2, 3)),
            }
        if self._maybe(0.3):
            body["selectors"] = [
                {"cel": {"expression": self._selector()}}
                for _ in range(self._chance.choice((1, 1, 2)))
            ]
        if self._maybe(0.2):
            body["tolerations"] = [
                self._chance.choice(
                    (
                        {"key": "example.com/t", "operator": "Exists"},
                        {"operator": "Exists", "effect": "NoSchedule"},
                        {"key": "example.com/t", "operator": "Equal", "value": "v"},
                    )
                )
            ]
        if self._maybe(0.15):
            amounts = {"memory": self._chance.choice(("1Gi", "1500Mi", "3Gi", "6Gi"))}
            if self._maybe(0.3):
                amounts["share"] = self._chance.choice(("2", "5", "500m"))
            body["capacity"] = {"requests": amounts}
        if admin and self._maybe(0.05):
            body["adminAccess"] = True
        return body

    def _allocated(self, slices: list[Body], *, name: str = "held") -> list[Body]:
        results: list[Body] = []
        held = self._chance.choice((0, 0.1, 0.3))
        for body in slices:
            spec = body["spec"]
            for device in spec.get("devices", ()):
                if not self._maybe(held):
                    continue
                result: Body = {
                    "request": "r",
                    "driver": spec["driver"],
                    "pool": spec["pool"]["name"],
                    "device": device["name"],
                }
                if device.get("allowMultipleAllocations"):
                    result["shareID"] = f"share-{len(results)}"
                    consumed = dict.fromkeys(device.get("capacity", {}), "1")
                    if "memory" in consumed:
                        consumed["memory"] = self._chance.choice(("1Gi", "3Gi"))
                    if consumed:
                        result["consumedCapacity"] = consumed
                elif self._maybe(0.1):
                    result["adminAccess"] = True
                results.append(result)
        if not results:
            return []
        status = {"allocation": {"devices": {"results": results}}}
        metadata = {"name": name, "namespace": "lab", "uid": name}
        return [{"metadata": metadata, "spec": {}, "status": status}]


def _names(requests: list[Body]) -> list[str]:
    names: list[str] = []
    for request in requests:
        names.append(request["name"])
        names += [f"{request['name']}/{sub['name']}" for sub in request.get("firstAvailable", ())]
    return names
