"""
The result of a conversion: policies, and remarks on what people must decide or write themselves.

A policy that is written is valid. A condition that cannot be written costs its matcher: without the
condition, the matcher would publish other devices, too.

It must not know the tools.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from drakit.settings import describe

__all__ = ("Converted", "Remark", "Result", "resource_name", "sharing")

_MAX_NAME = 40
_MAX_USERS = 1024
_NO_DISK = re.compile(r"/dev/(loop|zram)[^/]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """A line for people."""

    place: str
    text: str
    is_missing: bool = False
    """Whether a part of the input has no counterpart; otherwise there is something to check."""

    def __str__(self) -> str:
        kind = "not converted" if self.is_missing else "check"
        return f"{self.place}: {kind}: {self.text}" if self.place else f"{kind}: {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """The spec of a policy."""

    name: str
    """The name in the input. The policy's name is derived from it."""

    place: str
    spec: dict[str, Any]


@dataclass
class Result:
    """The result so far."""

    policies: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    remarks: list[Remark] = field(default_factory=list[Remark])

    @property
    def is_incomplete(self) -> bool:
        """Whether a part of the input has no counterpart."""
        return any(remark.is_missing for remark in self.remarks)

    def add(self, item: Converted | Remark) -> None:
        """Add a remark, or a policy that is checked first."""
        if isinstance(item, Remark):
            self.remarks.append(item)
            return
        from drakit_drivers.hostdev.policy import HostDevicePolicySpec

        spec = _without_disks(item.spec)
        if spec["match"] != item.spec["match"]:
            text = "hostdev publishes no disks; use a CSI driver (docs/admin/disks.md)"
            self.remarks.append(Remark(place=item.place, text=text, is_missing=True))
        if not spec["match"]:
            return
        try:
            HostDevicePolicySpec.model_validate(spec)
        except ValidationError as error:
            lines = describe(error, file="").splitlines()
            text = "; ".join(line.lstrip(": ") for line in lines)
            text = f"the policy would be invalid: {text}"
            self.remarks.append(Remark(place=item.place, text=text, is_missing=True))
            return
        self.policies[self._free_name(item.name)] = spec

    def _free_name(self, wanted: str) -> str:
        base = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")[:_MAX_NAME].strip("-")
        base = base or "devices"
        name, number = base, 1
        while name in self.policies:
            number += 1
            suffix = f"-{number}"
            name = f"{base[: _MAX_NAME - len(suffix)].rstrip('-')}{suffix}"
        return name


def _without_disks(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec without block devices, zram and loop devices excepted."""
    matchers: list[dict[str, Any]] = []
    for matcher in spec["match"]:
        if matcher["subsystem"] == "block":
            paths = [path for path in matcher.get("paths", ()) if _NO_DISK.fullmatch(path)]
            if not paths:
                continue
            matcher = {**matcher, "paths": paths}
        matchers.append(matcher)
    return {**spec, "match": matchers}


def resource_name(domain: str, name: str) -> str | None:
    """Return the name of an extended resource; None if a DeviceClass cannot have it."""
    valid = re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", name)
    return f"{domain}/{name}" if valid else None


def sharing(users: int, place: str, remarks: list[Remark]) -> dict[str, Any]:
    """Return the part of a spec for a number of users; append to the remarks if they are too
    many."""
    if users == 1:
        return {}
    if users > _MAX_USERS:
        remarks.append(
            Remark(
                place=place,
                text=f"{users} users: reduced to {_MAX_USERS}, the maximum of a policy",
                is_missing=True,
            )
        )
        users = _MAX_USERS
    return {"sharing": {"mode": "Users", "users": users}}
