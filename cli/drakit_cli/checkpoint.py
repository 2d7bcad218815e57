"""
``drakit node checkpoint show`` and ``verify``.

It must not know how a checkpoint is stored: :mod:`.place` reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from drakit_cli.answers import table, visible
from drakit_cli.place import Checkpoint, Entry, find_place, read_checkpoints, spec_path

if TYPE_CHECKING:
    from drakit_nodeplugin.config import NodePluginConfig
    from drakit_nodeplugin.state.records import StoredDevice, StoredEndpoint

SETTLE_SECONDS = 2.5
"""Until CDI files are checked again: a running node plugin restores them within 2 s, and writes the
file of a new claim a moment after its row."""

_HEAD = ("CLAIM", "UID", "STATE", "DEVICES", "BOOT", "CDI FILE")
_ENDPOINTS_HEAD = ("ENDPOINT", "STATE", "SINCE", "POOLS")


def show(options: argparse.Namespace) -> int:
    """Print claims and endpoints; return 1 if a database is damaged."""
    place = find_place(options)
    found = list(read_checkpoints(place, options.driver))
    if options.json:
        print(json.dumps({"checkpoints": [_as_json(item) for item in found]}, indent=2))
    else:
        print("\n\n".join(as_text(item) for item in found) or _nothing(place))
    problems = [f"{c.driver}: {text}" for c in found for text in _database_problems(c)]
    for problem in problems:
        print(visible(problem), file=sys.stderr)
    return 1 if problems else 0


def verify(options: argparse.Namespace) -> int:
    """Print the problems; return 1 if there are any."""
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
        what = f"{_count(len(found), 'checkpoint')} with {_count(entries, 'claim')}"
        print(f"{what}: no problems found")
    return 1 if any(problems.values()) else 0


def _nothing(place: NodePluginConfig) -> str:
    return f"no driver has a checkpoint in {place.drivers_directory}"


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


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def as_text(checkpoint: Checkpoint) -> str:
    """Return the claims and endpoints of a checkpoint, without opaque parameters."""
    number = _count(len(checkpoint.entries), "claim")
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
    return _count(len(endpoint.pools[pool]), "device") + (f", {gone} gone" if gone else "")


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
    more = {"boot": entry.boot, "cdi": entry.cdi}
    return asdict(entry.claim) | {"configs": configs} | more
