"""Selects the provider of the cluster: kind if Docker answers, otherwise this machine; or a manual
choice."""

import os
import subprocess
from pathlib import Path

from .api import Cluster, ClusterError
from .kind import engine
from .local.names import default_cluster

REPOSITORY = Path(__file__).parent.parent.parent

DOCKER_SECONDS = 5


def cluster(name: str | None = None) -> Cluster:
    """The cluster of that name (by default, this clone's), running or not."""
    name = name or os.environ.get("CLUSTER_NAME") or default_cluster(REPOSITORY)
    provider = os.environ.get("CLUSTER") or "auto"
    if provider == "auto":
        provider = "kind" if docker_answers() else "local"
    if provider == "local":
        from .local.provider import LocalCluster

        return LocalCluster(name)
    if provider == "kind":
        from .kind.provider import KindProvider

        return KindProvider(name)
    raise ClusterError(f"CLUSTER={provider} is not auto, kind or local")


def docker_answers() -> bool:
    """Whether a Docker engine answers, the one of `make kind-up` too; one that hangs does not."""
    engine.use()
    try:
        done = subprocess.run(
            ["docker", "info"], capture_output=True, timeout=DOCKER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
