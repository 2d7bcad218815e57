"""
Reads the node plugin's files on this node: its directories, the drivers that have files, and each
checkpoint entry with the state of its boot and CDI file.

Settings come from the node plugin's configuration file, but arguments take precedence. Does not
write anything, and does not depend on how the entries are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drakit_cli.answers import CommandError, UsageError
from drakit_formats.cdi import InvalidNameError, SpecDirectory, transient_file_name

if TYPE_CHECKING:
    from drakit_nodeplugin.config import NodePluginConfig
    from drakit_nodeplugin.state.inspection import Inspection
    from drakit_nodeplugin.state.records import StoredClaim

# ---------------------------------------------------------------- directories


def find_place(options: argparse.Namespace) -> NodePluginConfig:
    """Read the settings. Raises :class:`.answers.UsageError`."""
    from drakit_nodeplugin.config import ConfigError, NodePluginConfig, load_config

    given: dict[str, Any] = {
        "kubeletRoot": options.kubelet_root and options.kubelet_root.absolute(),
        "cdiDirectory": options.cdi_dir and options.cdi_dir.absolute(),
    }
    given = {key: value for key, value in given.items() if value is not None}
    file: Path = options.config or options.default_config
    if options.config is None and not file.exists():
        # Outside of the node plugin's container, the configuration file may be missing.
        return NodePluginConfig.model_construct(**given)
    try:
        return load_config(file, **given)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def drivers(place: NodePluginConfig, only: str | None) -> list[str]:
    """Return the drivers that have a checkpoint, or only the requested driver."""
    if only is not None:
        if "/" in only or only in ("", ".", ".."):
            raise UsageError(f"{only!r} is not a valid driver name")
        return [only]
    folders = place.drivers_directory.glob("*/checkpoint.db")
    return sorted(path.parent.name for path in folders)


def read_boot(place: NodePluginConfig) -> str | None:
    """Return the ID of this boot, or None if it cannot be read."""
    try:
        return place.boot_id_file.read_text().strip() or None
    except OSError:
        return None


# ---------------------------------------------------------------- checkpoints

BootState = Literal["this", "earlier", "unknown"]
CdiState = Literal["ok", "missing", "differs", "present", "-"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A checkpoint row, with the state of its boot and CDI file."""

    claim: StoredClaim
    boot: BootState
    cdi: CdiState
    """The state of the CDI file: ``ok`` if it has the stored content. It can be ``missing`` or
    ``differs`` only if the file must exist, because the claim was prepared in this boot. Otherwise,
    a file with other content is ``present``, and a missing file is ``-``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The checkpoint of one driver."""

    driver: str
    path: Path
    inspection: Inspection
    entries: tuple[Entry, ...]
    orphans: tuple[Path, ...]
    """CDI files of claims that are missing from the checkpoint."""


def read_checkpoints(place: NodePluginConfig, only: str | None) -> Iterator[Checkpoint]:
    """
    Read the checkpoints of all drivers, or of one.

    Raises :class:`.answers.CommandError` if one cannot be read. A database of another program is
    skipped unless its driver is requested.
    """
    from drakit_nodeplugin.state.inspection import InspectionError

    for driver in drivers(place, only):
        try:
            yield read_checkpoint(place, driver)
        except InspectionError as error:
            if error.foreign and only is None:
                continue
            raise CommandError(str(error)) from error


def read_checkpoint(place: NodePluginConfig, driver: str) -> Checkpoint:
    """Read the checkpoint of a driver. Raises InspectionError."""
    from drakit_nodeplugin.state.inspection import InspectionError, inspect

    path = place.drivers_directory / driver / "checkpoint.db"
    if not path.exists():
        raise InspectionError(f"driver {driver} has no checkpoint: {path} does not exist")
    directory = SpecDirectory(place.cdi_directory)
    # List the files before the rows, because a file is written after its row.
    prefix = f"{driver}-claim_"
    files = {name[len(prefix) : -len(".json")] for name in directory.names(prefix)}
    inspection = inspect(path)
    boot = read_boot(place)
    orphans = files - {claim.uid for claim in inspection.claims}
    return Checkpoint(
        driver=driver,
        path=path,
        inspection=inspection,
        entries=tuple(
            Entry(claim=claim, boot=_boot(claim, boot), cdi=_cdi(directory, driver, claim, boot))
            for claim in inspection.claims
        ),
        orphans=tuple(directory.path / f"{prefix}{uid}.json" for uid in sorted(orphans)),
    )


def spec_path(place: NodePluginConfig, driver: str, uid: str) -> Path | None:
    """Return the path of a claim's CDI file, or None for a UID that cannot be a file name."""
    with suppress(InvalidNameError):
        return place.cdi_directory / transient_file_name(f"{driver}/claim", uid)
    return None


def _boot(claim: StoredClaim, boot: str | None) -> BootState:
    if boot is None:
        return "unknown"
    return "this" if claim.boot_id == boot else "earlier"


def _cdi(directory: SpecDirectory, driver: str, claim: StoredClaim, boot: str | None) -> CdiState:
    try:
        text = directory.read_text(transient_file_name(f"{driver}/claim", claim.uid))
    except (InvalidNameError, OSError):
        text = None
    needed = claim.state == "prepared" and claim.boot_id == boot and claim.cdi_spec is not None
    if text is None:
        return "missing" if needed else "-"
    if text == claim.cdi_spec:
        return "ok"
    return "differs" if needed else "present"
