"""
A node's directories and its state: rows, CDI files, metadata files, marks of the hardware.

The checkpoint is read by SQL from a copy, because its owner would notice that another process opens
it. The caller supplies the expected state; this module reports the differences.

It must not depend on scenarios, steps, or the start of a plugin.
"""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drakit.layout import driver_directory
from drakit_nodeplugin.state import rows
from drakit_nodeplugin.state.records import StoredClaim, StoredEndpoint
from tests.crash.drivers import Hardware, Marking, Plain

NAME = "node-1"

ENDING = "_main.json"
"""The end of the name of a metadata file: the request of all claims."""

DriverClass = type[Marking] | type[Plain]
Claims = Mapping[str, tuple[str, ...]]
"""Names of devices, keyed by the UID of the claim that holds them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The state of a node at one moment."""

    rows: Mapping[str, StoredClaim]
    files: Mapping[str, Any]
    """CDI specs by claim UID: text if the file is not JSON, None if it is being removed."""

    metadata: Mapping[str, Any]
    """The newest version of metadata files by claim UID; text if it is not JSON."""

    marks: Mapping[str, str]
    """Claim UIDs by device."""

    temporary: Sequence[str]
    """Other files in the directories of these files. Only a process that is writing may have
    some."""

    endpoints: Collection[str]
    """Names of the endpoints that are stored."""

    unexpected: Sequence[str]
    """Inconsistencies that must never occur: half-made marks, forbidden calls of a driver, rows of
    endpoints that are neither the old nor the new one."""

    @property
    def prepared(self) -> Claims:
        return {uid: _names(row) for uid, row in self.rows.items() if row.state == "prepared"}


class Node:
    """One node's directories below one root."""

    def __init__(
        self, root: Path, driver: DriverClass, *, settings: Mapping[str, Any] | None = None
    ) -> None:
        """`settings` are added to the plugin's configuration file, which has the paths."""
        self.root, self.driver, self._settings = root, driver, settings or {}
        self.cdi, self.config = root / "cdi", root / "plugin.yaml"
        self.boot_id = root / "boot_id"
        self.checkpoint = driver_directory(root, driver.name) / "checkpoint.db"
        self.metadata = self.checkpoint.with_name("metadata")
        self.hardware = Hardware(root / "hardware")

    def make(self) -> None:
        """Begin with an empty node."""
        self.boot_id.write_text("boot-1\n")
        (self.root / "plugins_registry").mkdir()
        self.hardware.make()
        self._write_config()

    def copy_to(self, root: Path) -> Node:
        """Make an identical node, including the sockets of killed processes."""
        shutil.copytree(self.root, root, dirs_exist_ok=True, ignore=_sockets)
        for path in self.root.rglob("*.sock"):
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(root / path.relative_to(self.root)))
        other = Node(root, self.driver, settings=self._settings)
        other._write_config()
        return other

    def _write_config(self) -> None:
        entry = {
            "driver": f"{self.driver.__module__}:{self.driver.__name__}",
            "config": {"directory": str(self.root / "hardware")},
        }
        config = self._settings | {
            "listen": {"probes": "127.0.0.1:0", "metrics": "127.0.0.1:0"},
            "logging": {"format": "text"},
            "bootIDFile": str(self.boot_id),
            "kubeletRoot": str(self.root),
            "cdiDirectory": str(self.cdi),
            "drivers": [entry],
        }
        self.config.write_text(yaml.safe_dump(config))

    # ------------------------------------------------------------ state

    def look(self) -> Held:
        """Return the present state. Raises sqlite3.Error or DamagedRowError if the checkpoint is
        damaged."""
        prefix = f"{self.driver.name}-claim_"
        files: dict[str, Any] = {}
        temporary: list[str] = []
        unexpected: list[str] = []
        for path in sorted(self.cdi.glob("*")):
            if path.name.startswith(prefix) and path.suffix == ".json":
                files[path.stem.removeprefix(prefix)] = _parsed(path)
            else:
                temporary.append(path.name)
        metadata: dict[str, Any] = {}
        for path in sorted(self.metadata.glob("*")):
            if path.name.endswith(ENDING) and not path.name.startswith("."):
                metadata[path.name.removesuffix(ENDING)] = _parsed(path, lines=1)
            else:
                temporary.append(path.name)
        marks: dict[str, str] = {}
        for path in sorted(self.hardware.marks.iterdir()):
            if path.name.startswith("."):
                unexpected.append(f"file {path.name} of the hardware")
            else:
                marks[path.name] = self.hardware.holder(path.name) or "nobody"
        if self.hardware.wrong.exists():
            unexpected += self.hardware.wrong.read_text().splitlines()
        claims, endpoints, damaged = self._stored()
        return Held(
            rows={claim.uid: claim for claim in claims},
            files=files,
            metadata=metadata,
            marks=marks,
            temporary=temporary,
            endpoints={endpoint.name for endpoint in endpoints},
            unexpected=[*unexpected, *damaged],
        )

    def _stored(self) -> tuple[list[StoredClaim], list[StoredEndpoint], list[str]]:
        """Return the claims, the endpoints, and a sentence for each damaged row of an endpoint."""
        if not self.checkpoint.exists():
            return [], [], []
        with tempfile.TemporaryDirectory(dir=self.root.parent) as folder:
            for suffix in ("", "-wal"):
                part = self.checkpoint.with_name(self.checkpoint.name + suffix)
                if part.exists():
                    shutil.copy(part, folder)
            with closing(sqlite3.connect(Path(folder) / self.checkpoint.name)) as database:
                names = "SELECT name FROM sqlite_master WHERE type = 'table'"
                tables = {name for (name,) in database.execute(names)}
                if not tables:
                    return [], [], []
                claims = rows.page(database, after="", size=1000)
                damaged = rows.damaged_endpoints(database)
                return claims, rows.endpoints(database), list(damaged.values())


def _sockets(folder: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(".sock")]


def _parsed(path: Path, *, lines: int | None = None) -> Any:
    text = None
    try:
        text = path.read_text()
        return json.loads("".join(text.splitlines(keepends=True)[:lines]))
    except (FileNotFoundError, ValueError):
        return text


def _names(row: StoredClaim) -> tuple[str, ...]:
    return tuple(device.device for device in row.devices)


# -------------------------------------------------------------------- differences


def differences(held: Held, expected: Claims, *, driver: DriverClass) -> list[str]:
    """Return the differences from a state with exactly these prepared claims, as sentences."""
    found = [*held.unexpected, *(f"file {name} was left" for name in held.temporary)]
    for uid in sorted(held.rows.keys() - expected.keys()):
        row = held.rows[uid]
        found.append(f"claim {uid} is {row.state} with {_listed(_names(row))}: an unexpected row")
    for uid, devices in expected.items():
        row = held.rows.get(uid)
        if row is None:
            found.append(f"claim {uid} should be prepared: it has no row")
        elif row.state != "prepared":
            found.append(f"claim {uid} should be prepared: its row says {row.state}")
        elif _names(row) != devices:
            found.append(f"claim {uid} should have {_listed(devices)}: its row has {_names(row)}")
    found += _wrong_files(held, expected)
    wanted = {device: uid for uid, devices in expected.items() for device in devices}
    if driver is Marking:
        found += _wrong_marks(held, wanted)
    return found


def _wrong_files(held: Held, expected: Claims) -> list[str]:
    found = [
        f"claim {uid} has a CDI file and is not prepared"
        for uid in sorted(held.files.keys() - expected.keys())
    ]
    for uid, devices in expected.items():
        spec = held.files.get(uid)
        row = held.rows.get(uid)
        if spec is None:
            found.append(f"claim {uid} is prepared and has no CDI file")
        elif _environment(spec) != [f"{d.upper().replace('-', '_')}={d}" for d in devices]:
            found.append(f"the CDI file of claim {uid} is not that of {_listed(devices)}: {spec}")
        elif row is not None and row.cdi_spec is not None and json.loads(row.cdi_spec) != spec:
            found.append(f"the CDI file of claim {uid} is not that of its row")
    found += [
        f"claim {uid} has a metadata file and is not prepared"
        for uid in sorted(held.metadata.keys() - expected.keys())
    ]
    for uid, devices in expected.items():
        if _described(held.metadata.get(uid)) != [*devices]:
            text = held.metadata.get(uid)
            found.append(f"the metadata file of claim {uid} is not that of its devices: {text}")
    return found


def _described(metadata: Any) -> list[str]:
    try:
        return [device["name"] for each in metadata["requests"] for device in each["devices"]]
    except (KeyError, TypeError):
        return []


def _environment(spec: Any) -> list[str]:
    try:
        return [text for d in spec["devices"] for text in d["containerEdits"]["env"]]
    except (KeyError, TypeError):
        return []


def _wrong_marks(held: Held, wanted: Mapping[str, str]) -> list[str]:
    found = [
        f"device {device} is held by {uid}, but must be free"
        for device, uid in sorted(held.marks.items())
        if device not in wanted
    ]
    for device, uid in sorted(wanted.items()):
        if held.marks.get(device) is None:
            found.append(f"device {device} is free, but must be held by {uid}")
        elif held.marks[device] != uid:
            found.append(f"device {device} is held by {held.marks[device]}, not by {uid}")
    return found


def irreparable(held: Held, *, untouched: Collection[str]) -> list[str]:
    """
    Return the problems that no recovery can repair, and that no crash may leave.

    A mark or a CDI file needs a row, which names its owner. Claims in use stay prepared.
    """
    found = [
        f"device {device} is held by {uid}, but has no row"
        for device, uid in sorted(held.marks.items())
        if uid not in held.rows or device not in _names(held.rows[uid])
    ]
    found += [
        f"claim {uid} has a CDI file and no row" for uid in sorted(held.files.keys() - held.rows)
    ]
    found += [
        f"claim {uid} has a metadata file and no row"
        for uid in sorted(held.metadata.keys() - held.rows)
    ]
    for uid in sorted(untouched):
        if uid not in held.prepared:
            found.append(f"claim {uid} is in use, but no row shows it as prepared")
    return found


def _listed(devices: Collection[str]) -> str:
    return ", ".join(devices)
