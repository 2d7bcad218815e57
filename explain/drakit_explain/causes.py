"""
What many pods and claims can have in common: a class or a node, and what is wrong with it.

Whoever reports reasons can then report the cause once, about the class or the node. The clause of a
cause names nothing of a single pod, so that equal causes are equal.

It must not know how a reason is found, or how many objects share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from drakit_explain.codes import Cause, Code
from drakit_explain.model import ObjectReference, PoolID
from drakit_explain.selectors import selector_of
from drakit_explain.world import World

_IN_COMMON: Mapping[Code, str] = {
    Code.NO_DEVICE_PUBLISHED: "no node publishes the devices of the class that the requests need",
    Code.DEVICES_ALLOCATED: "other claims hold the devices of the class that match the requests",
    Code.DEVICES_TAINTED: "too many devices of the class that match the requests are tainted",
    Code.DEVICES_ON_OTHER_NODES: "the devices of the class that match the requests are on nodes "
    "that the pods cannot use",
    Code.REQUESTS_COMPETE: "no node has as many free devices of the class as the requests need",
    Code.SELECTOR_FAILED: "a selector of the class fails on a device",
}
"""What requests for devices of one class have in common."""


def cause_at_node(node: str | None, what: str, world: World) -> Cause | None:
    """Return a cause on a node, which may be gone: Events about it are found by its name."""
    if not node:
        return None
    facts = world.node(node)
    if facts is not None:
        return Cause(facts.reference, what)
    return Cause(ObjectReference("Node", node, "", api_version="v1"), what)


def cause_of_pool(pool: PoolID, problem: str, world: World) -> Cause | None:
    """Return the cause that a pool of one node has a problem; None for a pool of several."""
    nodes = {place.node for each in world.slices_of_pool(pool) if (place := each.place)}
    node = nodes.pop() if len(nodes) == 1 else None
    what = f"no device can be allocated from pool {pool.pool} of driver {pool.driver}: {problem}"
    return cause_at_node(node, what, world)


def cause_of_class(name: str, code: Code, world: World) -> Cause | None:
    """Return the cause that requests for devices of a class have in common."""
    found = world.device_class(name)
    return Cause(found.reference, _IN_COMMON[code]) if found is not None else None


def cause_of_selector(text: str, classes: Iterable[str], world: World) -> Cause | None:
    """Return the cause that the selector of a class fails; None for that of a request."""
    failing = (name for name in sorted(classes) if f"{selector_of(f'class {name}')} " in text)
    return cause_of_class(next(failing, ""), Code.SELECTOR_FAILED, world)
