"""
The features by which tests on a cluster are selected: `make e2e FEATURES=claims,health`.

Each test has the mark `feature` with one or more of these names. Does not depend on pytest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ("FEATURES", "UnknownFeatureError", "names_of", "selected")

FEATURES = {
    "backends": "backends in other processes and languages",
    "cdi": "CDI files, and containerd's reading of them",
    "claims": "claims: prepared, shared, stale, with parameters and admin access",
    "cluster": "the tests' own clusters",
    "deviceplugins": "device plugins hosted by the node plugin",
    "devices": "host devices in pods",
    "endpoints": "drivers that stop and return",
    "explain": "explanations of waiting and broken pods, by the operator and kubectl drakit",
    "faults": "nodes, kubelets, plugins and networks that fail",
    "hostdev": "policies for host devices, and their discovery",
    "health": "device health, taints and eviction",
    "monitoring": "Prometheus: metrics, the dashboard's queries and alerts",
    "operator": "the operator as a program: replicas, writes",
    "pages": "the commands of the tested pages",
    "release": "the chart: install, update, uninstall, probes, mounts",
    "simulated": "simulated devices: partitions, shares, taints",
    "vendors": "drivers of vendors, and the packages that they make",
    "versions": "older versions of the API and feature gates that are off",
}


class UnknownFeatureError(ValueError):
    """A feature that no test can have. The message lists the known features."""

    def __init__(self, names: Iterable[str]) -> None:
        unknown = ", ".join(sorted(names))
        super().__init__(f"no feature {unknown}; features are {', '.join(sorted(FEATURES))}")


def names_of(*texts: str) -> frozenset[str]:
    """
    Split names that are separated by commas.

    :raises UnknownFeatureError: one of them is unknown.
    """
    names = frozenset(name.strip() for text in texts for name in text.split(",") if name.strip())
    if unknown := names - FEATURES.keys():
        raise UnknownFeatureError(unknown)
    return names


def selected(
    features: Collection[str], *, wanted: Collection[str], excluded: Collection[str]
) -> bool:
    """Return whether a test with these features runs. If no feature is wanted, all tests run."""
    mine = set(features)
    return not mine & set(excluded) and (not wanted or bool(mine & set(wanted)))
