"""
The version and the feature gates of the API server, as it reports them.

The gates are in its metrics, which only administrators may read. Scheduler and kubelets have gates
of their own, which nothing in the API shows.

It must not know what needs a gate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from drakit_cli.kubectl.gather import Gap, unread
from drakit_daemon.kube import ApiError, Session
from drakit_explain.cel.gates import PATH, GatesUnknownError, gates_of, read_all_gates
from drakit_explain.selectors import FeatureGates

PREFIXES = ("DRA", "DynamicResourceAllocation", "ResourceHealthStatus")
"""Names, or their beginnings, of the feature gates that concern devices."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Facts about an API server."""

    version: str = ""
    """Such as ``v1.36.3``; empty if unknown."""

    gates: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Feature gates that concern devices; empty if they may not be read."""

    of_selectors: FeatureGates = field(default_factory=FeatureGates)
    """Those of `gates` that change what a selector means; unknown ones count as enabled."""

    gaps: tuple[Gap, ...] = ()

    @property
    def minor(self) -> tuple[int, int] | None:
        """Major and minor version; None if unknown."""
        found = _VERSION.match(self.version)
        return (int(found[1]), int(found[2])) if found else None


async def find_capabilities(session: Session) -> Capabilities:
    """Ask the API server; what it does not answer is a gap."""
    gaps: list[Gap] = []
    version = ""
    gates: dict[str, bool] = {}
    try:
        version = str((await session.get("/version")).get("gitVersion") or "")
    except ApiError as error:
        effect = "the command cannot check whether drakit's releases support it"
        gaps.append(unread("version", "/version", error, effect))
    of_selectors = FeatureGates()
    try:
        read = await read_all_gates(session)
        gates = {name: read[name] for name in sorted(read) if name.startswith(PREFIXES)}
        of_selectors = gates_of(read)
    except (ApiError, GatesUnknownError) as error:
        effect = "those that its Kubernetes version enables by default are assumed"
        gaps.append(unread("feature gates", PATH, error, effect))
    return Capabilities(version=version, gates=gates, of_selectors=of_selectors, gaps=tuple(gaps))
