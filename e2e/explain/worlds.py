"""
Random worlds of `tests.oracle` on a real cluster: its objects, and one pod that uses its claims.

Worlds come one after the other, since most classes select devices of every driver. Drivers and
classes have names of their own in each world, because allocated claims go slowly.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.oracle.worlds import LABELS, NODE, make_world
from tests.situations.api import Api, Body, RefusedError
from tests.situations.explaining import Explaining
from tests.situations.scene import Heartbeats, Scene

HOLDER = {"apiGroup": "explain.test", "resource": "holders", "name": "holder", "uid": "holder"}
"""No pod: the controller of claims does not know how to release it."""


class RejectedWorldError(Exception):
    """The API server refuses an object of the world."""


@dataclass(frozen=True, kw_only=True)
class RealWorld:
    """A world as raw objects that the API server can take."""

    seed: int
    classes: list[Body]
    slices: list[Body]
    claims: list[Body]
    held: list[Body]

    @classmethod
    def of(cls, seed: int, *, node: str, other: str) -> RealWorld:
        world = make_world(seed)
        parts = {
            "classes": world.classes,
            "slices": world.slices,
            "claims": world.claims,
            "held": world.allocated,
        }
        text = json.dumps(parts)
        for old, new in (
            ("a.example.com", f"a{seed}.example.com"),
            ("b.example.com", f"b{seed}.example.com"),
            ('"class-', f'"world-{seed}-class-'),
            (json.dumps(NODE), json.dumps(node)),
            ('"node-2"', json.dumps(other)),
        ):
            text = text.replace(old, new)
        found = cls(seed=seed, **json.loads(text))
        for body in found.slices:
            for device in body["spec"].get("devices", ()):
                _correct(device)
        return found


def _correct(device: Body) -> None:
    """Remove what only devices for several claims can have: the allocator takes it, the API not."""
    if not device.get("allowMultipleAllocations"):
        for capacity in device.get("capacity", {}).values():
            capacity.pop("requestPolicy", None)


@contextmanager
def labelled(api: Api, node: str) -> Iterator[None]:
    """Give a node the labels of the worlds' node."""
    zone = {key: value for key, value in LABELS.items() if "/" not in key}
    api.patch("nodes", node, {"metadata": {"labels": zone}})
    try:
        yield
    finally:
        api.patch("nodes", node, {"metadata": {"labels": dict.fromkeys(zone)}})


def open_world(world: RealWorld, scene: Scene) -> None:
    """
    Create a world's objects, and the pod, held back from the scheduler.

    :raises RejectedWorldError: the API server refuses one of them.
    """
    try:
        for body in world.classes:
            scene.create("DeviceClass", body)
        for body in world.slices:
            scene.create("ResourceSlice", body)
        for body in world.held:
            _create_held(body, world, scene)
        for body in world.claims:
            scene.create("ResourceClaim", body)
    except RefusedError as error:
        raise RejectedWorldError(str(error)) from error
    scene.held = True
    names = [body["metadata"]["name"] for body in world.claims]
    scene.pod(claims=names, nodeSelector={"kubernetes.io/hostname": scene.node})


def _create_held(body: Body, world: RealWorld, scene: Scene) -> None:
    request = {"deviceClassName": world.classes[0]["metadata"]["name"]}
    body["spec"] = {"devices": {"requests": [{"name": "r", "exactly": request}]}}
    allocation = body.pop("status")["allocation"]
    for result in allocation["devices"]["results"]:
        if "shareID" in result:
            result["shareID"] = str(uuid.uuid4())
    made = scene.create("ResourceClaim", body)
    made["status"] = {"allocation": allocation, "reservedFor": [HOLDER]}
    scene.api.write_status("resourceclaims", made)


def is_allocated(world: RealWorld, scene: Scene) -> bool:
    """Return whether the scheduler found devices: a pod may still wait for its binding."""
    if scene.scheduled_on():
        return True
    return all(
        "allocation"
        in scene.api.get("resourceclaims", body["metadata"]["name"], namespace=scene.namespace).get(
            "status", {}
        )
        for body in world.claims
    )


def close_world(world: RealWorld, scene: Scene) -> None:
    held = {body["metadata"]["name"] for body in world.held}
    for body in scene.api.list("resourceclaims", namespace=scene.namespace):
        if body["metadata"]["name"] in held:
            body["status"] = {}
            scene.api.write_status("resourceclaims", body)
    scene.close()


def scene_of(
    seed: int,
    api: Api,
    explaining: Explaining,
    heartbeats: Heartbeats,
    *,
    node: str,
    other: str,
) -> Scene:
    namespace = f"world-{seed}-{uuid.uuid4().hex[:6]}"
    return Scene(api, explaining, f"world-{seed}", namespace, node, other, heartbeats)
