"""
``drakit node claim forget``: release a claim's devices manually.

For claims that nothing else releases: their driver never returns, or fails to unprepare them. The
driver is not called, and the command reports what was not done. It must not know how a checkpoint
is stored.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from drakit_cli.answers import CommandError, UsageError
from drakit_cli.place import Checkpoint, Entry, find_place, read_checkpoints, spec_path

if TYPE_CHECKING:
    from drakit_nodeplugin.config import NodePluginConfig

_STATES = {
    "preparing": "being prepared",
    "prepared": "prepared",
    "unpreparing": "being unprepared",
}
"""The states of a claim, as they are printed after "was"."""


def forget(options: argparse.Namespace) -> int:
    """Remove a claim's row and CDI file; raise CommandError if it is unknown or in use."""
    place = find_place(options)
    uid: str = options.uid
    found = list(read_checkpoints(place, options.driver))
    known = [(c, entry) for c in found for entry in c.entries if entry.claim.uid == uid]
    if len(known) > 1:
        names = ", ".join(checkpoint.driver for checkpoint, _ in known)
        raise UsageError(f"claim {uid} has devices of several drivers ({names}): give --driver")
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
            f"claim {claim} ({claim.uid}) is prepared, and the kubelet lists a container that "
            "uses it; delete its pod to unprepare it; nothing was changed; --force forgets it "
            "anyway"
        )
    if unknown is not None:
        raise CommandError(
            f"claim {claim} ({claim.uid}) is prepared, and drakit cannot determine whether a "
            f"container uses it: {unknown}; nothing was changed; --force forgets it anyway"
        )


def _remove(path: Path) -> bool:
    """Remove a file; return whether it existed."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        print(f"{path} cannot be removed: {error}; remove it manually", file=sys.stderr)
        return False
    return True
