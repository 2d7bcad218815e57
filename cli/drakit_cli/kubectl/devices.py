"""
``kubectl drakit devices``: each pool with its devices, and with ``-o wide`` each device.

It must not know sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drakit_cli.kubectl.gather import Gathered
from drakit_cli.kubectl.output import Output
from drakit_cli.kubectl.pools import DeviceRow, PoolRow, pool_rows
from drakit_explain.model import ClaimFacts

__all__ = ("body", "show")

_POOL = (
    *("DRIVER", "POOL", "NODE", "DEVICES", "FREE", "ALLOCATED", "TAINTED", "UNHEALTHY"),
    *("STATE", "ALLOCATED TO"),
)
_DEVICE = ("DRIVER", "POOL", "NODE", "DEVICE", "STATE", "TAINTS", "ALLOCATED TO")

MAX_HOLDERS = 3
"""Claims that are named for one pool, without ``-o wide``."""


def body(found: Gathered) -> dict[str, Any]:
    """Return the pools for programs."""
    return {
        "pools": [_pool_body(each) for each in pool_rows(found)],
        "notEvaluated": [str(gap) for gap in found.gaps],
    }


def show(found: Gathered, output: Output) -> None:
    """Print the pools."""
    rows = pool_rows(found)
    if not rows:
        output.line("No ResourceSlice publishes a device.")
    elif output.wide:
        output.table(_DEVICE, [_device_cells(pool, each) for pool in rows for each in pool.devices])
    else:
        output.table(_POOL, [_pool_cells(each) for each in rows])
    output.lines("Not evaluated", (str(gap) for gap in found.gaps))


def _pool_cells(pool: PoolRow) -> list[str]:
    numbers = (len(pool.devices), pool.free, pool.allocated, pool.tainted, pool.unhealthy)
    holders = _cut([_named(claim) for claim in pool.holders()])
    return [*pool.identity, pool.node, *map(str, numbers), pool.state, holders]


def _device_cells(pool: PoolRow, device: DeviceRow) -> list[str]:
    taints, claims = ", ".join(device.taints), ", ".join(map(_named, device.claims))
    return [*pool.identity, pool.node, device.name, _state(pool, device), taints, claims]


def _state(pool: PoolRow, device: DeviceRow) -> str:
    return pool.problem if pool.problem and not device.claims else device.state


def _named(claim: ClaimFacts) -> str:
    return f"{claim.namespace}/{claim.name}"


def _cut(names: Sequence[str]) -> str:
    rest = len(names) - MAX_HOLDERS
    return ", ".join(names[:MAX_HOLDERS]) + (f" and {rest} more" if rest > 0 else "")


def _pool_body(pool: PoolRow) -> dict[str, Any]:
    return {
        "driver": pool.identity.driver,
        "pool": pool.identity.pool,
        "node": pool.node,
        "state": pool.state,
        "generation": pool.generation,
        "slices": {"published": pool.slices, "expected": pool.expected},
        "count": len(pool.devices),
        "free": pool.free,
        "allocated": pool.allocated,
        "tainted": pool.tainted,
        "unhealthy": pool.unhealthy,
        "devices": [
            {
                "name": each.name,
                "state": _state(pool, each),
                "taints": list(each.taints),
                "claims": [_named(claim) for claim in each.claims],
            }
            for each in pool.devices
        ],
    }
