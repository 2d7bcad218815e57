"""
Collects the data for a bug report: ``drakit version``, and ``drakit node report`` with this node's
data, as text or as an archive.

A part that cannot be read does not affect the others. Each part has a size limit. The report does
not contain opaque parameters, values of environment variables, or the content of CDI files, which
contain such values. It contains only the names of vendor drivers' settings, because the values may
be secrets.

Does not depend on how other commands collect the parts that they share with the report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import platform
import sqlite3
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from drakit_cli.answers import UsageError
from drakit_cli.checkpoint import as_text
from drakit_cli.host_devices import as_json, candidates, policies_text, read_hostdev
from drakit_cli.place import drivers, find_place, read_checkpoint

if TYPE_CHECKING:
    from drakit_nodeplugin.config import NodePluginConfig

# ---------------------------------------------------------------- the report

MAX_PART_BYTES = 512 * 1024
"""Maximum size of each part. Longer parts are truncated."""

_MAX_FILES = 512
"""Maximum number of file names to list per directory."""

_MAX_MOUNTINFO_BYTES = 4 * 1024 * 1024

_API_SECONDS = 10.0
"""The time limit for reading the NodeDeviceReports, because the command must not wait for an API
server that is down."""

_REDACTED = "(left out)"


def report(options: argparse.Namespace) -> int:
    """Write the report. Return 1 if a part could not be read."""
    place = find_place(options)
    problems: list[str] = []
    parts = dict(_collected(place, problems))
    if problems:
        parts["problems.txt"] = "".join(f"{problem}\n" for problem in problems)
    output: Path | None = options.output
    text = "".join(f"==== {name}\n{content.rstrip()}\n\n" for name, content in parts.items())
    if output is None:
        print(text, end="")
    else:
        try:
            output.write_bytes(
                _archive(parts) if output.name.endswith((".tar.gz", ".tgz")) else text.encode()
            )
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror}") from error
        print(f"wrote {output}; check it for confidential data before you publish it")
    return 1 if problems else 0


def _collected(place: NodePluginConfig, problems: list[str]) -> Iterator[tuple[str, str]]:
    parts: Mapping[str, Callable[[], str]] = {
        "versions.txt": _versions,
        "configuration.yaml": partial(_configuration, place),
        "policies.yaml": partial(_policies, place),
        "devices.json": partial(_devices, place),
        "checkpoints.txt": partial(_checkpoints, place),
        "files.txt": partial(_files, place),
        "reports.yaml": partial(_reports, place),
        "udev.txt": partial(_udev, place),
        "mounts.txt": partial(_mounts, place),
    }
    for name, read in parts.items():
        try:
            yield name, _bounded(read())
        # A part that fails must not prevent the others, because its failure may be the reason for
        # the bug report.
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")


def _bounded(text: str) -> str:
    data = text.encode(errors="replace")
    if len(data) <= MAX_PART_BYTES:
        return data.decode()
    return data[:MAX_PART_BYTES].decode(errors="ignore") + f"\n(cut off at {MAX_PART_BYTES} bytes)"


def _archive(parts: Mapping[str, str]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, content in parts.items():
            data = content.encode()
            member = tarfile.TarInfo(f"drakit-report/{name}")
            member.size, member.mtime = len(data), int(time.time())
            archive.addfile(member, io.BytesIO(data))
    return target.getvalue()


# ------------------------------------------------------------ parts


def _versions() -> str:
    kernel = os.uname()
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        versions(argparse.Namespace())
    return f"{text.getvalue()}{kernel.sysname} {kernel.release} {kernel.machine} {kernel.version}\n"


def _configuration(place: NodePluginConfig) -> str:
    body = place.model_dump(mode="json", by_alias=True, warnings=False)
    for entry in body.get("drivers", ()):
        if entry["driver"] == "hostdev":
            # Omit the policies, because they have their own part.
            entry["config"].pop("policies", None)
        else:
            entry["config"] = dict.fromkeys(entry["config"], _REDACTED)
    return yaml.safe_dump(body, sort_keys=False)


def _policies(place: NodePluginConfig) -> str:
    hostdev = read_hostdev(place)
    found: dict[str, dict[str, Any]] = {}
    for policy in hostdev.policies:
        spec = policy.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        if env := spec.get("container", {}).get("env"):
            spec["container"]["env"] = dict.fromkeys(env, _REDACTED)
        found[policy.name] = spec
    problems = "".join(f"# {' '.join(problem.split())}\n" for problem in hostdev.problems)
    return problems + (policies_text(found) if found else "# no policies\n")


def _devices(place: NodePluginConfig) -> str:
    found = candidates(read_hostdev(place))
    bodies = [as_json(each) for each in found]
    for body in bodies:
        del body["suggestedPolicy"]
    return "\n".join(json.dumps(body) for body in bodies)


def _checkpoints(place: NodePluginConfig) -> str:
    texts: list[str] = []
    for driver in drivers(place, None):
        try:
            texts.append(as_text(read_checkpoint(place, driver)))
        except Exception as error:  # the database is damaged
            texts.append(f"{driver}: {type(error).__name__}: {error}")
    return "\n\n".join(texts) or "no driver has a checkpoint"


def _files(place: NodePluginConfig) -> str:
    directories = (
        place.kubelet_root / "plugins_registry",
        *(place.drivers_directory / driver for driver in drivers(place, None)),
        place.cdi_directory,
    )
    return "\n".join(line for directory in directories for line in _listing(directory))


def _listing(directory: Path) -> Iterator[str]:
    yield f"{directory}:"
    try:
        entries = sorted(os.scandir(directory), key=lambda each: each.name)
    except OSError as error:
        yield f"  {error.strerror}"
        return
    for entry in entries[:_MAX_FILES]:
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError as error:
            yield f"  {entry.name!r}: {error.strerror}"
            continue
        changed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.st_mtime))
        yield f"  {entry.name!r} mode {found.st_mode:o}, {found.st_size} bytes, changed {changed}"
    if len(entries) > _MAX_FILES:
        yield f"  and {len(entries) - _MAX_FILES} more"


def _reports(place: NodePluginConfig) -> str:
    node = os.environ.get("NODE_NAME")
    if not node:
        return "# NODE_NAME is not set: run the command in the pod of the node plugin"
    return asyncio.run(_reports_of(node, drivers(place, None)))


async def _reports_of(node: str, names: Sequence[str]) -> str:
    from drakit_daemon.kube import ApiError, connect, resource_path
    from drakit_formats import crds
    from drakit_nodeplugin.host.report import report_name

    texts: list[str] = []
    async with asyncio.timeout(_API_SECONDS), await connect(user_agent="drakit-report") as session:
        for name in filter(None, (report_name(node, driver) for driver in names)):
            try:
                body = await session.get(resource_path(crds.API_VERSION, crds.REPORTS, name=name))
            except ApiError as error:
                texts.append(f"# {name}: {' '.join(str(error).split())}\n")
                continue
            parts = {key: body.get(key) for key in ("kind", "spec", "status")}
            texts.append(yaml.safe_dump(parts, sort_keys=False))
    return "---\n".join(texts)


def _udev(place: NodePluginConfig) -> str:
    config = read_hostdev(place).config
    data = config.udev_root / "data"
    try:
        number = len(os.listdir(data))
    except OSError as error:
        return f"{data}: {error.strerror}: udev's properties and links are not available to hostdev"
    return f"{data}: {number} entries"


def _mounts(place: NodePluginConfig) -> str:
    """Return the block devices in use. For a pod's volume, omit the source, because the names of
    logical volumes and subPaths can contain tenants' names."""
    from drakit_drivers.hostdev.block_usage import parse_mountinfo

    config = read_hostdev(place).config
    with config.mountinfo.open(errors="replace") as file:
        # The last line may be incomplete.
        lines = file.read(_MAX_MOUNTINFO_BYTES).rpartition("\n")[0]
    kept = [
        f"{each.number} {each.fs_type} {each.place}" + ("" if each.is_volume else f" {each.source}")
        for each in parse_mountinfo(lines)
        if each.source.startswith("/dev/")
    ]
    return "\n".join([*kept, "", config.swaps.read_text(errors="replace")])


# ---------------------------------------------------------------- versions


def versions(_: argparse.Namespace) -> int:
    """Print the versions."""
    print(
        f"drakit {version('drakit')} (Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version})"
    )
    return 0
