"""
The cluster that the operator's benchmarks use: many devices, claims and waiting pods.

The benchmark writes nodes, slices, claims and pods, and nothing else changes them: the controller
manager and the scheduler are frozen in the meantime (:mod:`.operator`).

Does not depend on processes, clocks or budgets.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.apiserver import Body

DRIVER = "explain.bench.drakit.dev"
NAMESPACE = "default"

PER_CLASS = 9
"""The number of pods or claims with the same cause that each get an Event. Ten would get one about
the class."""

FREED = 4_500
"""The number of allocated claims with classes that do not exist. A claim that loses its allocation
gets an Event."""

_FLAGS = ("ecc", "mig", "nvlink", "rdma", "vgpu")
_MODELS = ("bench-9000", "bench-8000")
_TOLERATIONS = [{"operator": "Exists"}]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Numbers of objects."""

    slices: int = 5_000
    """The number of slices, one per node."""

    devices: int = 16
    """Devices per slice. Each has ten attributes, two of which are unique in the cluster."""

    claims: int = 100_000
    """The number of all claims, including those of the pods. Each device is allocated to one of the
    other claims, and no pod is waiting for the remaining claims."""

    pods: int = 500

    @property
    def classes(self) -> int:
        """The number of classes. Each has its own request and selector."""
        return -(-self.pods // PER_CLASS)

    @property
    def a_pod(self) -> str:
        return "waits-0001"

    def facts(self) -> str:
        return (
            f"claims={self.claims} slices={self.slices} devices={self.slices * self.devices} "
            f"pods={self.pods} classes={self.classes}"
        )

    def node_bodies(self) -> Iterator[Body]:
        for number in range(self.slices):
            name = node_name(number)
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
            labels = {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "node.kubernetes.io/instance-type": f"bench-{number % 4}",
                "topology.kubernetes.io/region": "lab",
                "topology.kubernetes.io/zone": f"lab-{number % 3}",
                "lab.example/rack": f"rack-{number // 32}",
            }
            resources = {"cpu": "96", "memory": "1Ti", "pods": "110", "ephemeral-storage": "1Ti"}
            yield {
                "metadata": {"name": name, "labels": labels},
                "status": {"capacity": resources, "allocatable": resources, "conditions": [ready]},
            }

    def slice_bodies(self) -> Iterator[Body]:
        return (self.slice_body(number) for number in range(self.slices))

    def slice_body(self, number: int, *, generation: int = 1) -> Body:
        """Return a slice. The model depends on the generation."""
        node = node_name(number)
        return {
            "metadata": {"name": f"explain-{number:04}"},
            "spec": {
                "driver": DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
                "devices": [_device(number, each, generation) for each in range(self.devices)],
            },
        }

    def class_bodies(self) -> Iterator[Body]:
        selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
        for number in range(self.classes):
            yield {"metadata": {"name": _class(number)}, "spec": {"selectors": [selector]}}

    def pending_claim_bodies(self) -> Iterator[Body]:
        for number in range(self.pods):
            exactly = _request(number // PER_CLASS)
            yield _claim(f"waits-{number:04}", {"name": "gpu", "exactly": exactly})

    def other_claims(self) -> Iterator[tuple[Body, Body | None]]:
        """Yield claims, and the status of each: one device, spread over all nodes, for a pod that
        runs. No pod waits for claims without a status."""
        for number in range(self.claims - self.pods):
            if number >= self.slices * self.devices:
                request = {"name": "gpu", "exactly": {"deviceClassName": _class(0)}}
                yield _claim(f"spare-{number:05}", request), None
                continue
            node = node_name(number % self.slices)
            result = {
                "request": "gpu",
                "driver": DRIVER,
                "pool": node,
                "device": f"gpu-{number // self.slices}",
            }
            here = {"key": "metadata.name", "operator": "In", "values": [node]}
            allocation = {
                "devices": {"results": [result]},
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [here]}]},
            }
            absent = f"absent-{number // PER_CLASS}.{DRIVER}"
            exactly = {"deviceClassName": absent if number < FREED else _class(0)}
            body = _claim(f"holds-{number:05}", {"name": "gpu", "exactly": exactly})
            pod = {"resource": "pods", "name": f"runs-{number:05}", "uid": _serial(number, 1 << 15)}
            yield body, {"allocation": allocation, "reservedFor": [pod]}

    def pod_bodies(self) -> Iterator[Body]:
        return (self.pod_body(number) for number in range(self.pods))

    def pod_body(self, number: int) -> Body:
        name = f"waits-{number:04}"
        return {
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "containers": [{"name": "main", "image": "none.invalid/none"}],
                "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
                "tolerations": _TOLERATIONS,
                "automountServiceAccountToken": False,
            },
        }


def node_name(number: int) -> str:
    """Return the name of a node."""
    return f"bench-{number:04}"


def _class(number: int) -> str:
    return f"class-{number:02}.{DRIVER}"


def _claim(name: str, request: Body) -> Body:
    return {
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"devices": {"requests": [request]}},
    }


def _request(number: int) -> Body:
    """
    Return a request that no node can fulfill, with its own selector.

    A third asks for more capacity than a device has, a third for more devices than a node has, and
    a third for a device that is allocated or does not exist. Two of these read a unique attribute.
    """
    chosen = [flag for bit, flag in enumerate(_FLAGS) if (number + 1) >> bit & 1]
    terms = [f'device.attributes["{DRIVER}"].{flag} == true' for flag in chosen]
    asked: Body = {"deviceClassName": _class(number)}
    match number % 3:
        case 0:
            asked["capacity"] = {"requests": {"memory": "1Ti"}}
        case 1:
            terms.append(f'device.attributes["{DRIVER}"].index < 16')
            asked["count"] = 17
        case _ if number in (2, 5):
            serial = _serial(number, 0)
            terms.append(f'device.attributes["{DRIVER}"].serial == "{serial}"')
        case _:
            terms.append(f'device.attributes["{DRIVER}"].model == "bench-7000"')
    asked["selectors"] = [{"cel": {"expression": " && ".join(terms)}}]
    return asked


def _serial(number: int, device: int) -> str:
    return str(uuid.UUID(int=(number << 16) | device | 4 << 76 | 8 << 60))


def _device(number: int, device: int, generation: int) -> Body:
    model = _MODELS[(number + generation) % 2]
    attributes: dict[str, Any] = {flag: {"bool": True} for flag in _FLAGS}
    attributes |= {
        "index": {"int": device},
        "model": {"string": model},
        "numaNode": {"int": device // 56},
        "serial": {"string": _serial(number, device)},
        "busID": {"string": f"{number:04x}:{device:02x}:00.0"},
    }
    return {
        "name": f"gpu-{device}",
        "attributes": attributes,
        "capacity": {"memory": {"value": "80Gi"}},
    }
