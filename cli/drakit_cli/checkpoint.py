"""
``drakit node checkpoint show`` and ``verify``, and ``drakit node claim forget``.

Administrators use `forget` if nothing else releases a claim's devices, because the driver is
permanently gone or fails to unprepare the claim. The command does not call the driver, and reports
the side effects that remain.

Does not depend on how a checkpoint is stored: :mod:`.place` reads it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drakit.text import plural
from drakit_cli.answers import CommandError, UsageError, table, visible
from drakit_cli.place import Checkpoint, Entry, find_place, read_checkpoints, spec_path

if TYPE_CHECKING:
    from drakit_nodeplugin.config import NodePluginConfig
    from drakit_nodeplugin.state.records import StoredDevice, StoredEndpoint

SETTLE_SECONDS = 2.5
"""How long to wait before checking CDI files again. A running node plugin restores them within 2 s,
and writes the file of a new claim shortly after its row."""

_HEAD = ("CLAIM", "UID", "STATE", "DEVICES", "BOOT", "CDI FILE")
_ENDPOINTS_HEAD = ("ENDPOINT", "STATE", "SINCE", "POOLS")


def show(options: argparse.Namespace) -> int:
    """Print claims and endpoints. Return 1 if a database is damaged."""
    place = find_place(options)
    found = list(read_checkpoints(place, options.driver))
    if options.json:
        print(json.dumps({"checkpoints": [_as_json(item) for item in found]}, indent=2))
    else:
        nothing = f"no driver has a checkpoint in {place.drivers_directory}"
        print("\n\n".join(map(as_text, found)) or nothing)
    problems = [f"{c.driver}: {text}" for c in found for text in _database_problems(c)]
    for problem in problems:
        print(visible(problem), file=sys.stderr)
    return 1 if problems else 0


def verify(options: argparse.Namespace) -> int:
    """Print the problems. Return 1 if there are any."""
    place = find_place(options)
    found = list(read_checkpoints(place, options.driver))
    first = {text for item in found for text in _file_problems(item, place)}
    if first:
        time.sleep(SETTLE_SECONDS)
        found = list(read_checkpoints(place, options.driver))
    problems = {
        item.driver: [
            *_database_problems(item),
            *(text for text in _file_problems(item, place) if text in first),
        ]
        for item in found
    }
    if options.json:
        body = [
            {"driver": c.driver, "path": str(c.path), "problems": problems[c.driver]} for c in found
        ]
        print(json.dumps({"checkpoints": body}, indent=2))
    elif any(problems.values()):
        print("\n".join(visible(f"{d}: {text}") for d, ts in problems.items() for text in ts))
    else:
        entries = sum(len(item.entries) for item in found)
        what = f"{plural(len(found), 'checkpoint')} with {plural(entries, 'claim')}"
        print(f"{what}: no problems found")
    return 1 if any(problems.values()) else 0


def _database_problems(checkpoint: Checkpoint) -> list[str]:
    found = list(checkpoint.inspection.problems)
    if found:
        found.append("the node plugin quarantines it at its next start, and keeps the intact rows")
    found += [
        f"{text}; the node plugin drops it at its next start: the driver reports its devices again"
        for text in checkpoint.inspection.dropped
    ]
    if (damage := checkpoint.inspection.damage) is not None:
        found.append(f"entries were lost, and are not rebuilt yet: {damage}")
    return found


def _file_problems(checkpoint: Checkpoint, place: NodePluginConfig) -> list[str]:
    wrong = {"missing": "is missing", "differs": "differs from the prepared one"}
    found = [
        f"claim {entry.claim} ({entry.claim.uid}): its CDI file "
        f"{spec_path(place, checkpoint.driver, entry.claim.uid)} {wrong[entry.cdi]}"
        for entry in checkpoint.entries
        if entry.cdi in wrong
    ]
    return found + [f"CDI file {path} belongs to no known claim" for path in checkpoint.orphans]


def as_text(checkpoint: Checkpoint) -> str:
    """Return the claims and endpoints of a checkpoint, without opaque parameters."""
    number = plural(len(checkpoint.entries), "claim")
    lines = [f"{checkpoint.driver}: {number} ({checkpoint.path})"]
    if checkpoint.entries:
        lines.append(table(_HEAD, [_row(entry) for entry in checkpoint.entries]))
    if checkpoint.inspection.endpoints:
        rows = [_endpoint_row(endpoint) for endpoint in checkpoint.inspection.endpoints]
        lines += ["", table(_ENDPOINTS_HEAD, rows)]
    lines += [f"quarantined: {name}" for name in checkpoint.inspection.quarantined]
    return "\n".join(lines)


def _row(entry: Entry) -> tuple[str, ...]:
    claim = entry.claim
    devices = dict.fromkeys(_device(device) for device in claim.devices)
    shown = ", ".join(devices)
    return str(claim), claim.uid, claim.state, shown, entry.boot, entry.cdi


def _device(device: StoredDevice) -> str:
    hold = " (admin)" if device.admin_access else " (share)" if device.share_id else ""
    first, *more = device.cdi_devices or ("",)
    others = f" + {first}" if first else ""
    return f"{device.pool}/{device.device}{hold}{others}{f' and {len(more)} more' if more else ''}"


def _endpoint_row(endpoint: StoredEndpoint) -> tuple[str, ...]:
    pools = [f"{pool} ({_devices(endpoint, pool)})" for pool in endpoint.pools]
    return endpoint.name, _endpoint_state(endpoint), _since(endpoint.stopped_at), ", ".join(pools)


def _devices(endpoint: StoredEndpoint, pool: str) -> str:
    gone = len(endpoint.gone.get(pool, ()))
    return plural(len(endpoint.pools[pool]), "device") + (f", {gone} gone" if gone else "")


def _endpoint_state(endpoint: StoredEndpoint) -> str:
    if endpoint.removing:
        return "removing"
    return "running" if endpoint.stopped_at is None else "stopped"


def _since(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def _as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    inspection = checkpoint.inspection
    return {
        "driver": checkpoint.driver,
        "path": str(checkpoint.path),
        "schemaVersion": inspection.version,
        "problems": list(inspection.problems),
        "damage": inspection.damage,
        "quarantined": list(inspection.quarantined),
        "claims": [_entry_as_json(entry) for entry in checkpoint.entries],
        "endpoints": [asdict(endpoint) for endpoint in inspection.endpoints],
        "orphanedFiles": [str(path) for path in checkpoint.orphans],
    }


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    configs = [json.loads(text) for text in entry.claim.configs]
    data = None if entry.claim.data is None else json.loads(entry.claim.data)
    metadata = {request: json.loads(text) for request, text in entry.claim.metadata.items()}
    parsed = {"configs": configs, "data": data, "metadata": metadata}
    return asdict(entry.claim) | parsed | {"boot": entry.boot, "cdi": entry.cdi}


# ---------------------------------------------------------------- forget

_STATES = {"preparing": "being prepared", "prepared": "prepared", "unpreparing": "being unprepared"}
"""The state of a claim, as printed after "was"."""


def forget(options: argparse.Namespace) -> int:
    """Remove a claim's row and CDI file. Raise CommandError if it is unknown or in use."""
    place = find_place(options)
    uid: str = options.uid
    found = list(read_checkpoints(place, options.driver))
    known = [(c, entry) for c in found for entry in c.entries if entry.claim.uid == uid]
    if len(known) > 1:
        names = ", ".join(checkpoint.driver for checkpoint, _ in known)
        raise UsageError(f"claim {uid} has devices of several drivers ({names}): set --driver")
    if known:
        return _forget(place, *known[0], force=options.force)
    orphans = [path for c in found for path in c.orphans if path == spec_path(place, c.driver, uid)]
    if not orphans:
        raise CommandError(f"no checkpoint in {place.drivers_directory} contains claim {uid}")
    for path in orphans:
        _remove(path)
        print(f"removed {path}; no checkpoint contains its claim")
    return 0


def _forget(place: NodePluginConfig, checkpoint: Checkpoint, entry: Entry, *, force: bool) -> int:
    from drakit_nodeplugin.state.inspection import InspectionError, forget

    claim, driver = entry.claim, checkpoint.driver
    if claim.state == "prepared" and entry.boot != "earlier" and not force:
        _refuse_used(place, checkpoint, entry)
    try:
        forget(checkpoint.path, claim)
    except InspectionError as error:
        raise CommandError(str(error)) from error
    devices = ", ".join(dict.fromkeys(f"{d.pool}/{d.device}" for d in claim.devices)) or "nothing"
    print(f"forgot claim {claim} ({claim.uid}), which was {_STATES[claim.state]}")
    print(f"released: {devices}")
    path = spec_path(place, driver, claim.uid)
    if path is not None and _remove(path):
        print(f"removed: {path}")
    print(
        f"driver {driver} did not unprepare {devices}: the changes that it made remain until you "
        "undo them or reboot the node"
    )
    return 0


def _refuse_used(place: NodePluginConfig, checkpoint: Checkpoint, entry: Entry) -> None:
    """Raise CommandError if containers use a claim, or if that cannot be determined."""
    from drakit_nodeplugin.claims.kubelet_claims import kubelet_claims
    from drakit_nodeplugin.state.podresources import PodResources, PodResourcesError, own_pod

    claim, driver = entry.claim, checkpoint.driver
    podresources = PodResources(place.podresources, own_pod=own_pod(os.environ))
    try:
        listed = asyncio.run(podresources.claims())
    except PodResourcesError as error:
        listed, unknown = None, str(error)
    else:
        unknown = podresources.incomplete(listed)
    if listed is not None and kubelet_claims(driver, listed.devices, pods=listed.pods).holds(claim):
        raise CommandError(
            f"claim {claim} ({claim.uid}) was not forgotten: the kubelet lists a container that "
            "uses it; delete the pod of the container to unprepare the claim, or use --force"
        )
    if unknown is not None:
        raise CommandError(
            f"claim {claim} ({claim.uid}) was not forgotten: drakit cannot determine whether a "
            f"container uses it: {unknown}; delete the pods that use the claim, or use --force"
        )


def _remove(path: Path) -> bool:
    """Remove a file. Return whether it existed."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        print(f"{path} cannot be removed: {error.strerror}; remove it manually", file=sys.stderr)
        return False
    return True
