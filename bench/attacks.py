"""
Objects that tenants can create to delay or stop the operator. They have the largest size, number,
depth or cost that the API server accepts, in one namespace or in many.

Each attack has its own namespaces. :data:`ATTACKS` contains them all, in the order of their rows;
:mod:`.hostile` runs them. Does not depend on processes, clocks or budgets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from bench.apiserver import Body
from drakit_formats import crds

GPUS = "gpu.hostile.drakit.dev"
NICS = "nic.hostile.drakit.dev"
"""The two drivers. Each has a class of the same name."""

NODES = 20
DEVICES = 32
"""The number of devices of each driver on each node."""

COLORS = 5
"""The number of values of the attribute ``color``."""

HANGS = "the helper hangs here"
"""A string in a selector for which the helper of the attack ``helper`` hangs."""

LEVELS = 1_200
"""The depth of values that are nested too deeply to be parsed."""

_NESTED = "@nested"
_DEEP_LIST = "[" * LEVELS + "1" + "]" * LEVELS
_DEEP_FIELDS = '{"f:x":' * LEVELS + "{}" + "}" * LEVELS


OF_MANY = 40
"""Minimum number of objects that each of many namespaces creates, if the attack has that many.
Otherwise, the namespaces share the objects of a single namespace."""


class Item(NamedTuple):
    """An object to create: the resource, and the text of the body."""

    resource: str
    namespace: str
    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One attack."""

    name: str
    facts: str
    """The facts that the row shows."""

    items: Callable[[str], Iterator[Item]]
    """Returns the objects for a namespace."""

    rewrites: int = 0
    """How many times per second the first object is changed."""

    helper_hangs: bool = False

    def namespaces(self, number: int) -> list[str]:
        """Return the names of the first namespaces of the attack."""
        return [f"{self.name}-{each}" for each in range(number)]

    def items_of(self, namespaces: Sequence[str]) -> Iterator[Item]:
        """Yield the objects of an attack from several namespaces."""
        number: int | None = None
        if len(namespaces) > 1:
            whole = sum(1 for _ in self.items(namespaces[0]))
            number = max(whole // len(namespaces), OF_MANY)
        for namespace in namespaces:
            yield from islice(self.items(namespace), number)


def scene() -> Iterator[Item]:
    """Yield the objects that exist before each attack: classes, nodes, and the devices of two
    drivers."""
    for driver in (GPUS, NICS):
        selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
        yield _item("deviceclasses", "", driver, {"spec": {"selectors": [selector]}})
    for number in range(NODES):
        name = f"hostile-{number:02}"
        resources = {"cpu": "96", "memory": "1Ti", "pods": "110"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        yield _item(
            "nodes",
            "",
            name,
            {
                "metadata": {"labels": {"kubernetes.io/hostname": name}},
                "status": {"capacity": resources, "allocatable": resources, "conditions": [ready]},
            },
        )
        for driver in (GPUS, NICS):
            spec = {
                "driver": driver,
                "nodeName": name,
                "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
                "devices": [_device(number, each) for each in range(DEVICES)],
            }
            yield _item("resourceslices", "", f"{name}-{driver}", {"spec": spec})


def innocent(namespace: str, name: str) -> Iterator[Item]:
    """Yield a claim that no device matches, and its pod, so that the operator has a reason to
    report."""
    yield _claim(namespace, name, [_request("gpu", _is("model", f'"{name}"'))])
    yield _pod(namespace, name, name)


def _device(node: int, device: int) -> Body:
    attributes: dict[str, Any] = {
        "index": {"int": device},
        "numa": {"int": device % 4},
        "color": {"string": f"color-{device % COLORS}"},
        "model": {"string": f"model-{node % 4}"},
        "serial": {"string": f"{node:04}-{device:04}"},
    }
    return {"name": f"d{device}", "attributes": attributes}


# ---------------------------------------------------------------- search


def _alternatives(namespace: str) -> Iterator[Item]:
    yield from _with_alternatives(namespace, "alternatives", count=1)


def _with_alternatives(namespace: str, name: str, *, count: int) -> Iterator[Item]:
    """Yield requests with eight alternatives each. No two devices have the same serial number."""
    requests = [
        {
            "name": f"{name}-{number}",
            "firstAvailable": [
                {
                    "name": f"a{each}",
                    "deviceClassName": (GPUS, NICS)[each % 2],
                    "count": count + each // 2,
                }
                for each in range(8)
            ],
        }
        for number in range(4)
    ]
    same = [{"matchAttribute": f"{driver}/serial"} for driver in (GPUS, NICS)]
    yield _claim(namespace, name, requests, constraints=same)
    yield _pod(namespace, name, name)


def _distinct(namespace: str) -> Iterator[Item]:
    yield from _with_distinct(namespace, "distinct", count=COLORS + 1)


def _with_distinct(namespace: str, name: str, *, count: int) -> Iterator[Item]:
    """Yield more requests for devices of different colors than there are colors."""
    requests = [_request(f"r{number}") for number in range(count)]
    different = [{"distinctAttribute": f"{GPUS}/color"}]
    yield _claim(namespace, name, requests, constraints=different)
    yield _pod(namespace, name, name)


def _searches(namespace: str) -> Iterator[Item]:
    """Yield different searches, each with a remedy to find and a reason to confirm."""
    for number in range(250):
        yield from _with_alternatives(namespace, f"alternatives-{number}", count=1 + number % 4)
        yield from _with_distinct(namespace, f"distinct-{number}", count=COLORS + 1 + number % 10)


def _sixteen_claims(namespace: str) -> Iterator[Item]:
    """Yield one pod whose claims have the maximum number of requests and alternatives."""
    names = [f"c{number}" for number in range(16)]
    for name in names:
        requests = [
            {
                "name": f"r{number}",
                "firstAvailable": [
                    {"name": f"a{each}", "deviceClassName": (GPUS, NICS)[each % 2]}
                    for each in range(8)
                ],
            }
            for number in range(32)
        ]
        yield _claim(namespace, name, requests, constraints=[{"matchAttribute": f"{GPUS}/serial"}])
    yield _pod(namespace, "sixteen", *names)


def _sixteen_requests(namespace: str) -> Iterator[Item]:
    """Yield one pod with 16 claims, each with its own search."""
    names = [f"c{number}" for number in range(16)]
    for number, name in enumerate(names):
        exactly = {"deviceClassName": (GPUS, NICS)[number % 2], "count": 4}
        same = [{"matchAttribute": f"{exactly['deviceClassName']}/serial"}]
        yield _claim(
            namespace, name, [{"name": "r", "exactly": exactly}], constraints=same[number:]
        )
    yield _pod(namespace, "sixteen", *names)


# ---------------------------------------------------------------- size


def _affinity(namespace: str) -> Iterator[Item]:
    for number in range(16):
        yield _claim(namespace, f"p{number}", [_request("r")])
        yield _pod_with_terms(namespace, f"p{number}", terms=25_000)


def _pod_with_terms(namespace: str, name: str, *, terms: int) -> Item:
    """Return a pod with a term for each 56 bytes."""
    term = {"matchExpressions": [{"key": "a", "operator": "Exists"}]}
    required = {"nodeSelectorTerms": [term] * terms}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return _pod(namespace, name, name, nodeSelector={"own": name}, affinity=affinity)


def _four_bytes(namespace: str) -> Iterator[Item]:
    """Yield a pod with one character for which Python needs four bytes for each character of a
    string."""
    for number in range(48):
        name = f"c{number}"
        selectors = [
            f'device.driver == "{chr(0x1F52C)}{"x" * 10_000}-{number}-{each}"' for each in range(28)
        ]
        requests = [_request(f"r{each}", *selectors) for each in range(5)]
        yield _claim(namespace, name, requests)
        yield _pod(namespace, name, name)


def _expressions(namespace: str) -> Iterator[Item]:
    """Yield twelve pods, each with almost as many selectors as are evaluated for one pod."""
    for pod in range(12):
        names = [f"c{pod}-{number}" for number in range(3)]
        for name in names:
            selectors = [f'device.driver == "{"x" * 2_000}-{name}-{each}"' for each in range(20)]
            yield _claim(namespace, name, [_request("r", *selectors)])
        yield _pod(namespace, f"p{pod}", *names)


def _many(namespace: str) -> Iterator[Item]:
    for number in range(500):
        name = f"p{number}"
        selectors = [f'device.driver == "{"x" * 2_000}-{name}-{each}"' for each in range(28)]
        yield _claim(namespace, name, [_request("r", *selectors)])
        yield _pod_with_terms(namespace, name, terms=1_100)


def _small(namespace: str) -> Iterator[Item]:
    """Yield pods that the limit for content admits, each with its own selector."""
    for number in range(3_000):
        yield from innocent(namespace, f"p{number}")


def _parameters(namespace: str) -> Iterator[Item]:
    """Yield small values, each of which is 20 times as large in memory as in JSON."""
    for number in range(40):
        small: Body = {"x": [[]] * 3_400}
        name = f"c{number}"
        yield _claim(namespace, name, [_request("r")], parameters=[small] * 32)
        yield _pod(namespace, name, name)


def _writer(namespace: str) -> Iterator[Item]:
    yield _pod_with_terms(namespace, "rewritten", terms=25_000)
    yield _claim(namespace, "rewritten", [_request("r")])


# ---------------------------------------------------------------- selectors


def _expensive(namespace: str) -> Iterator[Item]:
    """Yield selectors that take almost the time that the API server allows, for each device."""
    numbers = json.dumps(list(range(40)))
    for number in range(20):
        name = f"p{number}"
        selectors = [
            f"{numbers}.all(a, {numbers}.all(b, {numbers}.exists(c, "
            f'a + b + c + device.attributes["{GPUS}"].index != {-1 - number - each * 100})))'
            for each in range(16)
        ]
        yield _claim(namespace, name, [_request("r", *selectors)])
        yield _pod(namespace, name, name)


def _hanging(namespace: str) -> Iterator[Item]:
    for number in range(10):
        name = f"p{number}"
        yield _claim(namespace, name, [_request("r", f'device.driver == "{HANGS} {number}"')])
        yield _pod(namespace, name, name)


# ---------------------------------------------------------------- depth


def _nested(namespace: str) -> Iterator[Item]:
    """Yield an object of each kind whose managed fields cannot be parsed, and such parameters."""
    name = f"{namespace}-nested"
    spec = {"devices": {"requests": [_request("r")]}}
    slice_spec = {
        "driver": GPUS,
        "nodeName": "hostile-00",
        "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
        "devices": [_device(NODES, 0)],
    }
    report = {"spec": {"nodeName": namespace, "driver": GPUS}}
    opaque = {"driver": GPUS, "parameters": {"x": _NESTED}}
    yield _with_deep_fields(_pod(namespace, name, name))
    yield _with_deep_fields(_item("resourceclaims", namespace, name, {"spec": spec}))
    template = {"spec": {"spec": spec}}
    yield _with_deep_fields(_item("resourceclaimtemplates", namespace, name, template))
    yield _with_deep_fields(_item("deviceclasses", "", name, {"spec": {}}))
    yield _with_deep_fields(_item("resourceslices", "", name, {"spec": slice_spec}))
    yield _with_deep_fields(_item("nodes", "", name, {}))
    yield _with_deep_fields(_item("nodedevicereports", "", f"{namespace}.{GPUS}", report))
    yield _item(
        "deviceclasses", "", f"{name}-parameters", {"spec": {"config": [{"opaque": opaque}]}}
    )
    for number in range(3):
        deep = f"deep-{number}"
        yield _claim(namespace, deep, [_request("r")], parameters=[{"x": _NESTED}])
        yield _pod(namespace, deep, deep)


def _with_deep_fields(item: Item) -> Item:
    version = json.loads(item.text)["apiVersion"]
    entry = {
        "manager": "deep",
        "operation": "Update",
        "apiVersion": version,
        "time": "2026-01-01T00:00:00Z",
        "fieldsType": "FieldsV1",
        "fieldsV1": _NESTED,
    }
    body = json.loads(item.text)
    body["metadata"]["managedFields"] = [entry]
    return item._replace(text=_text(body).replace(f'"{_NESTED}"', _DEEP_FIELDS))


# ---------------------------------------------------------------- objects


def _request(name: str, *selectors: str) -> Body:
    exactly: Body = {"deviceClassName": GPUS}
    if selectors:
        exactly["selectors"] = [{"cel": {"expression": each}} for each in selectors]
    return {"name": name, "exactly": exactly}


def _is(attribute: str, value: str) -> str:
    return f'device.attributes["{GPUS}"].{attribute} == {value}'


def _claim(
    namespace: str,
    name: str,
    requests: list[Body],
    *,
    constraints: list[Body] | None = None,
    parameters: list[Body] | None = None,
) -> Item:
    devices: Body = {"requests": requests}
    if constraints:
        devices["constraints"] = constraints
    if parameters:
        devices["config"] = [
            {"opaque": {"driver": GPUS, "parameters": each}} for each in parameters
        ]
    return _item("resourceclaims", namespace, name, {"spec": {"devices": devices}})


def _pod(namespace: str, name: str, *claims: str, **spec: Any) -> Item:
    body = {
        "spec": {
            "containers": [{"name": "main", "image": "none.invalid/none"}],
            "resourceClaims": [{"name": each, "resourceClaimName": each} for each in claims],
            "automountServiceAccountToken": False,
            **spec,
        }
    }
    return _item("pods", namespace, name, body)


def _item(resource: str, namespace: str, name: str, body: Body) -> Item:
    versions = {"pods": "v1", "nodes": "v1", "nodedevicereports": crds.API_VERSION}
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    whole = {
        **body,
        "apiVersion": versions.get(resource, "resource.k8s.io/v1"),
        "kind": _KINDS[resource],
        "metadata": {**body.get("metadata", {}), **metadata},
    }
    return Item(resource, namespace, name, _text(whole).replace(f'"{_NESTED}"', _DEEP_LIST))


def _text(body: Body) -> str:
    """Return JSON in the form that the API server writes."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


_KINDS = {
    "pods": "Pod",
    "nodes": "Node",
    "nodedevicereports": "NodeDeviceReport",
    "resourceclaims": "ResourceClaim",
    "resourceclaimtemplates": "ResourceClaimTemplate",
    "resourceslices": "ResourceSlice",
    "deviceclasses": "DeviceClass",
}

ATTACKS = (
    Attack(name="alternatives", facts="pods=1 alternatives=4096", items=_alternatives),
    Attack(name="distinct", facts=f"pods=1 values={COLORS}", items=_distinct),
    Attack(name="searches", facts="pods=500", items=_searches),
    Attack(name="claims", facts="pods=1 claims=16 requests=1", items=_sixteen_requests),
    Attack(name="claims-full", facts="pods=1 claims=16 requests=32", items=_sixteen_claims),
    Attack(name="affinity", facts="pods=16 mb=1.4", items=_affinity),
    Attack(name="four-byte", facts="claims=48 mb=1.4", items=_four_bytes),
    Attack(name="expressions", facts="expressions=720 kib=2", items=_expressions),
    Attack(name="many", facts="claims=500 pods=500 kib=60", items=_many),
    Attack(name="small", facts="claims=3000 pods=3000", items=_small),
    Attack(name="parameters", facts="claims=40 values=108800", items=_parameters),
    Attack(name="cel", facts="pods=20 expressions=320", items=_expensive),
    Attack(name="helper", facts="pods=10", items=_hanging, helper_hangs=True),
    Attack(name="nested", facts=f"levels={LEVELS}", items=_nested),
    Attack(name="writer", facts="mb=1.4 per_second=10", items=_writer, rewrites=10),
)
