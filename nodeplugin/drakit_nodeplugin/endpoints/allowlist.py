"""
The permissions of backends and device plugins: the edits that an administrator's entry allows.

An entry lists the owner of the socket, device nodes, mounts, hooks, environment variables and so
on. All other edits are refused. Even variables must be listed, because a variable such as
``LD_PRELOAD`` or ``BASH_ENV`` can run code in a tenant's container. No entry can allow the CDI
devices of claims, because a pod must not get the devices of another pod's claim.

Paths are compared as strings. The node plugin's container cannot see symbolic links outside
``/dev``, so a prefix is only as safe as the permissions of the directories below it. Device nodes
are also checked against the host's ``/dev`` (:mod:`.host_paths`). :mod:`drakit_nodeplugin.allowed`
defines the fields of an entry.

Does not depend on connections or claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from drakit.device import DeviceNode, Edits, Hook, Mount
from drakit_nodeplugin.endpoints.host_paths import HostNode, SocketFile

if TYPE_CHECKING:
    from drakit_nodeplugin.allowed import AllowedEndpoint

MAX_SHOWN = 200
"""Maximum length of a path in an error. The vendor's program chooses the path, so it can have any
length."""

BIND_TYPES = (None, "", "none", "bind")
MOUNT_OPTIONS = frozenset(
    {"bind", "rbind", "private", "rprivate", "ro", "rro", "rw", "nosuid", "nodev", "noexec"}
    | {"noatime", "nodiratime", "relatime"}
)
"""Mount options that only restrict a mount. No other options are allowed: ``dev``, ``suid`` and
``exec`` lift restrictions of the host mount, and a shared mount propagates the container's mounts
to the host."""

CLAIM_CLASS = "claim"
"""The CDI class of claim devices, for the drivers of this release and all other drivers."""

DEVICE_TYPES = (None, "b", "c", "u")

PERMISSIONS = 0o777
"""The permission bits of a file mode. Higher bits can change the type of a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rights:
    """The permissions of one backend or device plugin."""

    where: str
    """The location of the entry in the configuration, for remedies in error messages."""

    allowed: AllowedEndpoint
    find_node: Callable[[str], HostNode]
    """Looks up a host path. May block."""

    def owner_problem(self, file: SocketFile) -> str | None:
        """Return the reason why the socket must not have its current owner, with the remedy, as the
        end of a sentence. Return None if the owner is correct."""
        owner = self.allowed.owner
        if file.uid == owner.uid and owner.gid in (None, file.gid):
            return None
        group = "" if owner.gid is None else f" and group {owner.gid}"
        return (
            f"belongs to user {file.uid} and group {file.gid}, not to user {owner.uid}{group}; "
            f"change the socket's owner, or correct owner in {self.where}"
        )

    def edits_problem(self, edits: Edits) -> str | None:
        """Return the first edit that the entry does not allow, as the end of a sentence, or None.
        Blocks if there are device nodes."""
        return next(self._problems(edits), None)

    def _problems(self, edits: Edits) -> Iterator[str]:
        for node in edits.device_nodes:
            yield from self._node_problems(node)
        for mount in edits.mounts:
            yield from self._mount_problems(mount)
        for hook in edits.hooks:
            yield from self._hook_problems(hook)
        for interface in edits.net_devices:
            name = interface.host_interface_name
            if not any(fnmatchcase(name, pattern) for pattern in self.allowed.net_devices):
                yield self._refused(f"network interface {_shown(name)}", "netDevices")
        for gid in edits.additional_gids:
            if gid not in self.allowed.additional_gids:
                yield self._refused(f"group {gid}", "additionalGids")
        if edits.intel_rdt is not None and not self.allowed.intel_rdt:
            yield self._refused("Intel RDT settings", "intelRdt")
        for name in edits.env:
            if not self._allows_variable(name):
                yield self._refused(f"environment variable {_shown(name)}", "env")
        for name in edits.cdi_devices:
            if name.partition("=")[0].partition("/")[2] == CLAIM_CLASS:
                yield (
                    f"asks for CDI device {_shown(name)}, which is a claim's; no entry can allow "
                    "the devices of claims"
                )
            elif not self._allows_cdi_device(name):
                yield self._refused(f"CDI device {_shown(name)}", "cdiDevices")

    # ------------------------------------------------------------ device nodes

    def _node_problems(self, node: DeviceNode) -> Iterator[str]:
        given = node.host_path or node.path
        what = f"device node {_shown(given)}"
        path = _clean_path(given)
        if path is None or _clean_path(node.path) is None:
            yield _malformed(what, node.path)
            return
        if not self._allows_node(path):
            yield self._refused(what, "devices")
            return
        if node.type not in DEVICE_TYPES:
            yield f"asks for {what} of type {_shown(node.type or '')}, which is not a device type"
            return
        if node.file_mode is not None and node.file_mode & ~PERMISSIONS:
            yield f"asks for {what} with mode bits beyond permissions (0777)"
            return
        found = self.find_node(path)
        if not self._allows_node(found.path):
            yield self._refused(f"{what}, which leads to {_shown(found.path)}", "devices")
        elif not _is_same_device(node, found):
            # Check the numbers too, because the runtime creates the node from them, without reading
            # the host's node.
            yield (
                f"asks for {what} with a type and numbers that differ from the host's device node "
                f"or cannot be verified; the vendor must omit them"
            )

    def _allows_node(self, path: str) -> bool:
        parts = path.split("/")
        return any(
            len(pattern) == len(parts) and all(map(fnmatchcase, parts, pattern))
            for pattern in (each.split("/") for each in self.allowed.devices)
        )

    # ------------------------------------------------------------ mounts

    def _mount_problems(self, mount: Mount) -> Iterator[str]:
        what = f"a mount of {_shown(mount.host_path)}"
        path = _clean_path(mount.host_path)
        if path is None or _clean_path(mount.container_path) is None:
            yield _malformed(what, mount.container_path)
            return
        access = self._access_to(path)
        if access is None:
            yield self._refused(what, "mounts")
            return
        options = frozenset(mount.options)
        if mount.type not in BIND_TYPES or not options & {"bind", "rbind"}:
            yield f"asks for {what} that is not a bind mount, which no allow list permits"
        elif unknown := sorted(options - MOUNT_OPTIONS):
            yield (
                f"asks for {what} with option {_shown(unknown[0])}, which no allow list "
                f"permits; the vendor must omit it"
            )
        elif access == "ro" and not _is_read_only(options):
            yield self._refused(f"{what} that is not recursively read-only", "mounts")

    def _access_to(self, path: str) -> Literal["ro", "rw"] | None:
        prefixes = [each for each in self.allowed.mounts if _is_within(path, each)]
        return self.allowed.mounts[max(prefixes, key=len)] if prefixes else None

    # ------------------------------------------------------------ other edits

    def _hook_problems(self, hook: Hook) -> Iterator[str]:
        what = f"hook {_shown(hook.path)}"
        # Don't normalize the path, because the runtime runs exactly this path.
        if hook.path not in self.allowed.hooks:
            yield self._refused(what, "hooks")
        elif hook.env:
            # LD_PRELOAD and similar variables make any program run other code.
            yield (
                f"asks for {what} with environment variables, which no allow list permits; "
                f"the vendor must omit them"
            )

    def _allows_variable(self, name: str) -> bool:
        return any(
            name.startswith(each[:-1]) if each.endswith("*") else name == each
            for each in self.allowed.env
        )

    def _allows_cdi_device(self, name: str) -> bool:
        kind, _, device = name.partition("=")
        for each in self.allowed.cdi_devices:
            allowed_kind, equals, pattern = each.partition("=")
            if kind == allowed_kind and (not equals or fnmatchcase(device, pattern)):
                return True
        return False

    def _refused(self, what: str, setting: str) -> str:
        return (
            f"asks for {what}, which is not allowed; to allow it, extend {setting} in {self.where}"
        )


def _clean_path(path: str) -> str | None:
    """
    Return an absolute path in normalized form, or None if it is relative or contains ``..`` or a
    null byte.

    After a symbolic link, ``..`` may lead to a different directory than the path suggests.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or ".." in parts or "\0" in path:
        return None
    return "/" + "/".join(parts)


def _is_within(path: str, prefix: str) -> bool:
    """Return whether a path equals a prefix or is below it. The paths are compared by component,
    and both must be normalized."""
    return prefix == "/" or path == prefix or path.startswith(f"{prefix}/")


def _is_same_device(node: DeviceNode, found: HostNode) -> bool:
    """Return whether the numbers of an edit, if any, match the host's device node."""
    if node.major is None and node.minor is None:
        return True
    if found.device is None:
        return False
    type_, major, minor = found.device
    wanted_type = "c" if node.type == "u" else node.type
    return wanted_type in (None, type_) and (node.major, node.minor) == (major, minor)


def _is_read_only(options: frozenset[str]) -> bool:
    """Return whether a bind mount is read-only, including submounts from the host."""
    if "rw" in options:
        return False
    return "rro" in options or ("ro" in options and "rbind" not in options)


def _malformed(what: str, container_path: str) -> str:
    return (
        f"asks for {what} at {_shown(container_path)} in the container; both paths must be "
        f"absolute and must not contain '..'"
    )


def _shown(text: str) -> str:
    shown = text if text.isprintable() else ascii(text)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
