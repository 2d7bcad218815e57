"""
Records every Event of a cluster while something runs: namespaces take their Events with them.

It must not know whose Events they are.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.api import Cluster, ClusterError

STOP_SECONDS = 10


@contextmanager
def recorded(cluster: Cluster, path: Path) -> Generator[None]:
    """Write all changes of Events to a file; a watch that ends early is an error."""
    argv = [
        *(cluster.program("kubectl"), "get", "events.v1.events.k8s.io", "--all-namespaces"),
        *("--watch", "--output-watch-events", "--output=json"),
    ]
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    with path.open("wb") as output, subprocess.Popen(argv, stdout=output, env=env) as watch:
        try:
            yield
            if watch.poll() is not None:
                raise ClusterError(f"the watch of Events ended early, with code {watch.returncode}")
        finally:
            watch.terminate()
            watch.wait(STOP_SECONDS)
