"""
``kubectl drakit version``: the versions on this machine and in the cluster.

Does not depend on sessions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from drakit_cli.kubectl.gather import minor_of
from drakit_cli.kubectl.output import Output
from drakit_cli.kubectl.releases import Releases, Workload
from drakit_explain.cel.gates import DEFAULT_GATES
from drakit_explain.cel.helper import find_release

MAX_SKEW = 1
"""Maximum version skew between the kubectl plugin and a release, in minor versions."""

_OF_WORKLOAD = ("namespace", "release", "component", "version")


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """The versions, and warnings about incompatible versions."""

    plugin: str
    allocators: tuple[str, ...]
    """The minor versions of Kubernetes whose compiler and allocator are installed on this
    machine."""

    kubernetes: str = ""
    workloads: tuple[Workload, ...] = ()
    gaps: tuple[str, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """The reasons why results can be wrong or undecided."""
        return list(self._warn())

    def _warn(self) -> Iterator[str]:
        if (cluster := minor_of(self.kubernetes)) is not None:
            minor = f"{cluster[0]}.{cluster[1]}"
            if minor not in self.allocators:
                yield (
                    f"the allocator of Kubernetes {minor} is not installed, so explanations of "
                    f"pods that wait for devices are undecided"
                )
        mine = minor_of(self.plugin)
        for each in self.workloads:
            theirs = minor_of(each.version)
            if mine is None or theirs is None:
                continue
            if mine[0] != theirs[0] or abs(mine[1] - theirs[1]) > MAX_SKEW:
                yield (
                    f"the plugin is version {self.plugin}, and {each.component} of release "
                    f"{each.release} in namespace {each.namespace} is version {each.version}: use "
                    f"a plugin that is at most one minor version apart"
                )

    def body(self) -> dict[str, Any]:
        """Return the versions as JSON."""
        return {
            "plugin": {"version": self.plugin, "allocators": list(self.allocators)},
            "kubernetes": self.kubernetes,
            "releases": [
                {key: getattr(each, key) for key in _OF_WORKLOAD} for each in self.workloads
            ],
            "warnings": self.warnings,
            "notEvaluated": list(self.gaps),
        }

    def show(self, output: Output) -> None:
        """Print the versions."""
        output.line(f"Plugin: {self.plugin}")
        installed = ", ".join(self.allocators) or "none"
        output.line(f"Kubernetes' allocators on this machine: {installed}")
        if self.kubernetes:
            output.line(f"Kubernetes: {self.kubernetes.removeprefix('v')}")
        if self.workloads:
            output.line()
            output.table(
                [key.upper() for key in _OF_WORKLOAD],
                [[getattr(each, key) for key in _OF_WORKLOAD] for each in self.workloads],
            )
        for warning in self.warnings:
            output.line()
            output.line(f"Warning: {warning}.", color="unsure")
        output.lines("Not evaluated", self.gaps)


def own_versions() -> Versions:
    """Return the versions on this machine."""
    return Versions(
        plugin=version("drakit"),
        allocators=tuple(each for each in DEFAULT_GATES if find_release(each) is not None),
    )


def all_versions(own: Versions, kubernetes: str, releases: Releases) -> Versions:
    """
    Add the versions in the cluster.

    :param kubernetes: the version that the API server reports.
    """
    gaps = [str(gap) for gap in releases.gaps if gap.kind in ("deployments", "daemonsets")]
    return replace(own, kubernetes=kubernetes, workloads=releases.workloads, gaps=tuple(gaps))
