"""The API server of the real cluster, through one `kubectl proxy`."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.cluster.api import Cluster
from tests.situations.api import Api


@contextmanager
def proxied(cluster: Cluster) -> Iterator[Api]:
    """Run `kubectl proxy` and yield its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [cluster.program("kubectl"), "proxy", f"--port={port}"],
        env={"KUBECONFIG": str(cluster.kubeconfig)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        api = Api(port)
        end = time.monotonic() + 20
        while True:
            try:
                api.call("GET", "/version")
                break
            except OSError:
                assert process.poll() is None, "kubectl proxy ended"
                assert time.monotonic() < end, "kubectl proxy does not answer"
                time.sleep(0.05)
        yield api
    finally:
        process.terminate()
        process.wait(10)
