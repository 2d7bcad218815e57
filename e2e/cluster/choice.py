"""
Selects the provider of the cluster (kind if Docker responds, otherwise this machine) and the minor
release of Kubernetes, or takes both from the environment.
"""

import os
import subprocess
from pathlib import Path

from .api import Cluster, ClusterError, UnsupportedError
from .kind import engine
from .local import binaries
from .local.names import default_cluster

REPOSITORY = Path(__file__).parent.parent.parent

DOCKER_SECONDS = 5


def cluster(name: str | None = None, *, minor: str | None = None) -> Cluster:
    """
    Return the cluster with this name (by default, that of this clone), whether or not it is
    running.

    :param minor: the minor release of Kubernetes with which it starts, such as 1.37; by default,
        that of the environment variable KUBERNETES.
    """
    minor = minor or os.environ.get("KUBERNETES") or binaries.DEFAULT_MINOR
    binaries.module_file(minor)
    name = name or os.environ.get("CLUSTER_NAME") or default_cluster(REPOSITORY)
    provider = os.environ.get("CLUSTER") or "auto"
    if provider == "auto":
        provider = "kind" if docker_answers() else "local"
    if provider == "local":
        from .local.provider import LocalCluster

        return LocalCluster(name, minor=minor)
    if provider == "kind":
        if minor != binaries.DEFAULT_MINOR:
            raise UnsupportedError(provider, f"run Kubernetes {minor}")
        from .kind.provider import KindProvider

        return KindProvider(name)
    raise ClusterError(f"CLUSTER={provider} is not auto, kind or local")


def cluster_of_tests(suffix: str, *, minor: str | None = None) -> Cluster:
    """
    Return one of the clusters of the tests. Each process of pytest-xdist has separate clusters.

    :param suffix: the end of the name; CLUSTER_NAME names the cluster with the empty suffix.
    :param minor: as for :func:`cluster`.
    """
    base = os.environ.get("CLUSTER_NAME") or f"{default_cluster(REPOSITORY)}-e2e"
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    return cluster("-".join(part for part in (base, suffix, worker) if part), minor=minor)


def docker_answers() -> bool:
    """Return whether a Docker engine responds, including that of `make kind-up`."""
    engine.use()
    try:
        done = subprocess.run(
            ["docker", "info"], capture_output=True, timeout=DOCKER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
