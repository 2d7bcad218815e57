"""
The cluster that the operator's benchmarks use: many devices, claims and waiting pods.

Nodes, slices, claims and pods are written by the benchmark, and nobody else changes them: the
controller manager and the scheduler are frozen meanwhile (:mod:`.operator`).

It must not know processes, clocks or budgets.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.apiserver import Body

DRIVER = "explain.bench.drakit.dev"
CLASS = DRIVER
NAMESPACE = "default"

ABSENT_CLASS = "absent.bench.drakit.dev"
"""The class of the allocated claims: it does not exist, so a claim that loses its allocation gets
an Event."""

_FLAGS = ("ecc", "mig", "nvlink", "rdma", "vgpu")
_MODELS = ("bench-9000", "bench-8000")
_TOLERATIONS = [{"operator": "Exists"}]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Numbers of objects."""

    slices: int = 2_000
    """One per node."""

    devices: int = 112
    """Devices per slice. Each has ten attributes, of which two are unique in the cluster."""

    claims: int = 10_000
    """All claims, including those of the pods. The others are allocated: one device each."""

    pods: int = 500
    selectors: int = 30

    @property
    def a_pod(self) -> str:
        return "waits-0001"

    def facts(self) -> str:
        return (
            f"claims={self.claims} slices={self.slices} devices={self.slices * self.devices} "
            f"pods={self.pods} selectors={self.selectors}"
        )

    def node_bodies(self) -> Iterator[Body]:
        for number in range(self.slices):
            name = _node(number)
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
        """Return a slice; those of another generation have another model."""
        node = _node(number)
        return {
            "metadata": {"name": f"explain-{number:04}"},
            "spec": {
                "driver": DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
                "devices": [_device(number, each, generation) for each in range(self.devices)],
            },
        }

    def class_body(self) -> Body:
        selector = {"cel": {"expression": f'device.driver == "{DRIVER}"'}}
        return {"metadata": {"name": CLASS}, "spec": {"selectors": [selector]}}

    def pending_claim_bodies(self) -> Iterator[Body]:
        for number in range(self.pods):
            exactly = _request(number % self.selectors)
            yield _claim(f"waits-{number:04}", {"name": "gpu", "exactly": exactly})

    def allocated_claims(self) -> Iterator[tuple[Body, Body]]:
        """Yield claims, and the status of each: one device, spread over all nodes."""
        for number in range(self.claims - self.pods):
            node = _node(number % self.slices)
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
            exactly = {"deviceClassName": ABSENT_CLASS}
            body = _claim(f"holds-{number:05}", {"name": "gpu", "exactly": exactly})
            yield body, {"allocation": allocation}

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


def _node(number: int) -> str:
    return f"bench-{number:04}"


def _claim(name: str, request: Body) -> Body:
    return {
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"devices": {"requests": [request]}},
    }


def _request(number: int) -> Body:
    """
    Return one of the requests that no node can fulfil, each with a selector of its own.

    A third asks for more capacity than a device has, a third for more devices than a node has,
    a third for a device that is allocated or does not exist. Two of these read a unique attribute.
    """
    chosen = [flag for bit, flag in enumerate(_FLAGS) if (number + 1) >> bit & 1]
    terms = [f'device.attributes["{DRIVER}"].{flag} == true' for flag in chosen]
    asked: Body = {"deviceClassName": CLASS}
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
