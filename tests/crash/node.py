"""
A node's directories, and what is held on it: rows, CDI files, marks of the hardware.

The checkpoint is read from a copy and by SQL, because opening it would tell its owner that another
process did. What should be held is told by the caller; this says where it is not so.

It must not know scenarios, steps, or how a plugin is started.
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
from drakit_nodeplugin.claims.checkpoint import rows
from drakit_nodeplugin.claims.checkpoint.records import StoredClaim
from drakit_nodeplugin.devices.endpoint_store import StoredEndpoint
from tests.crash.drivers import Hardware, Marking, Plain

NAME = "node-1"

DriverClass = type[Marking] | type[Plain]
Claims = Mapping[str, tuple[str, ...]]
"""Names of devices by the UID of the claim that has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What is held on a node at a moment."""

    rows: Mapping[str, StoredClaim]
    files: Mapping[str, Any]
    """CDI specs by claim UID; text where it is no JSON, None where it goes at this moment."""

    marks: Mapping[str, str]
    """Claim UIDs by device."""

    temporary: Sequence[str]
    """What is in the CDI directory beside CDI files: only a process that writes may have it."""

    endpoints: Collection[str]
    """Names of the endpoints that are stored."""

    strange: Sequence[str]
    """What should never be: half-made marks, calls that a driver should not have got, rows of
    endpoints that are neither the old nor the new one."""

    @property
    def prepared(self) -> Claims:
        return {uid: _names(row) for uid, row in self.rows.items() if row.state == "prepared"}


class Node:
    """One node's directories below one root."""

    def __init__(
        self, root: Path, driver: DriverClass, *, settings: Mapping[str, Any] | None = None
    ) -> None:
        """Settings of the plugin's configuration file can be given beside those of the paths."""
        self.root, self.driver, self._settings = root, driver, settings or {}
        self.cdi, self.config = root / "cdi", root / "plugin.yaml"
        self.boot_id = root / "boot_id"
        self.checkpoint = driver_directory(root, driver.name) / "checkpoint.db"
        self.hardware = Hardware(root / "hardware")

    def make(self) -> None:
        """Begin with an empty node."""
        self.boot_id.write_text("boot-1\n")
        (self.root / "plugins_registry").mkdir()
        self.hardware.make()
        self._write_config()

    def copy_to(self, root: Path) -> Node:
        """Make another node that is just like this one, the sockets of the dead included."""
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

    # ------------------------------------------------------------ what is held

    def look(self) -> Held:
        """See what is held; sqlite3.Error or DamagedRowError where the checkpoint is damaged."""
        prefix = f"{self.driver.name}-claim_"
        files: dict[str, Any] = {}
        temporary: list[str] = []
        strange: list[str] = []
        for path in sorted(self.cdi.glob("*")):
            if path.name.startswith(prefix) and path.suffix == ".json":
                files[path.stem.removeprefix(prefix)] = _parsed(path)
            else:
                temporary.append(path.name)
        marks: dict[str, str] = {}
        for path in sorted(self.hardware.marks.iterdir()):
            if path.name.startswith("."):
                strange.append(f"file {path.name} of the hardware")
            else:
                marks[path.name] = self.hardware.holder(path.name) or "nobody"
        if self.hardware.wrong.exists():
            strange += self.hardware.wrong.read_text().splitlines()
        claims, endpoints, damaged = self._stored()
        return Held(
            rows={claim.uid: claim for claim in claims},
            files=files,
            marks=marks,
            temporary=temporary,
            endpoints={endpoint.name for endpoint in endpoints},
            strange=[*strange, *damaged],
        )

    def _stored(self) -> tuple[list[StoredClaim], list[StoredEndpoint], list[str]]:
        """Give claims and endpoints, and say which rows of endpoints are damaged."""
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


def _parsed(path: Path) -> Any:
    text = None
    try:
        text = path.read_text()
        return json.loads(text)
    except (FileNotFoundError, ValueError):
        return text


def _names(row: StoredClaim) -> tuple[str, ...]:
    return tuple(device.device for device in row.devices)


# -------------------------------------------------------------------- what is not as it should be


def differences(held: Held, expected: Claims, *, driver: DriverClass) -> list[str]:
    """Say where what is held is not exactly these prepared claims, in sentences."""
    found = [*held.strange, *(f"file {name} was left" for name in held.temporary)]
    for uid in sorted(held.rows.keys() - expected.keys()):
        row = held.rows[uid]
        found.append(
            f"claim {uid} is {row.state} with {_listed(_names(row))}: a row without reason"
        )
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
    return found


def _environment(spec: Any) -> list[str]:
    try:
        return [text for d in spec["devices"] for text in d["containerEdits"]["env"]]
    except (KeyError, TypeError):
        return []


def _wrong_marks(held: Held, wanted: Mapping[str, str]) -> list[str]:
    found = [
        f"device {device} is held by {uid}, and should be free"
        for device, uid in sorted(held.marks.items())
        if device not in wanted
    ]
    for device, uid in sorted(wanted.items()):
        if held.marks.get(device) is None:
            found.append(f"device {device} is free, and should be held by {uid}")
        elif held.marks[device] != uid:
            found.append(f"device {device} is held by {held.marks[device]}, not by {uid}")
    return found


def inexplicable(held: Held, *, untouched: Collection[str]) -> list[str]:
    """
    Say what nobody could ever put in order: what a crash may not leave at any moment.

    A mark or a CDI file needs a row, or nothing says whose it is; claims that run on, whatever is
    done beside them, stay prepared.
    """
    found = [
        f"device {device} is held by {uid}, and no row says so"
        for device, uid in sorted(held.marks.items())
        if uid not in held.rows or device not in _names(held.rows[uid])
    ]
    found += [
        f"claim {uid} has a CDI file and no row" for uid in sorted(held.files.keys() - held.rows)
    ]
    for uid in sorted(untouched):
        if uid not in held.prepared:
            found.append(f"claim {uid} is in use, and no row says that it is prepared")
    return found


def _listed(devices: Collection[str]) -> str:
    return ", ".join(devices)
