"""
A control plane without nodes that serves drakit's kinds, and the operator as a process beside it.

Tests write Nodes, ResourceSlices and NodeDeviceReports as kubelets and node plugins do. It runs
beside the session's cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drakit_formats import crds
from e2e.closed_list import undocumented
from e2e.cluster.api import Cluster, Options
from e2e.cluster.choice import REPOSITORY, cluster_of_tests
from e2e.cluster.gates import gates_of_tests
from e2e.images.go import cel_program
from e2e.kit import wait_for

STOP_SECONDS = 10
"""Time in which an operator that is stopped releases its Lease, so that the next one leads."""


@contextmanager
def control_plane(suffix: str, **gates: bool) -> Generator[Cluster]:
    """Start a control plane in the body, with drakit's kinds and no objects of them, and with
    these feature gates beside those of all tests. The operator may write only objects that its page
    lists."""
    chosen = cluster_of_tests(suffix)
    chosen.start(Options(nodes=0, gates={**gates_of_tests(chosen.minor), **gates}))
    chosen.kubectl("apply", "-f", str(REPOSITORY / "charts/drakit/crds"))
    for plural in (crds.DRIVERS, crds.MAINTENANCES, crds.POLICIES, crds.REPORTS):
        condition = ("wait", "--for=condition=Established", f"crd/{plural}.{crds.GROUP}")
        chosen.kubectl(*condition, "--timeout=30s")
    wait_for("the kinds", lambda: chosen.kubectl("get", "ddr,hdp,ndr", check=False).returncode == 0)
    yield chosen
    written = undocumented(chosen.audit())
    chosen.stop()
    assert chosen.leftovers() == []
    assert written == set()


@contextmanager
def operator(
    server: Cluster, folder: Path, *, kubeconfig: Path | None = None, **settings: Any
) -> Generator[None]:
    """Run the operator with settings in one process in the body; its log, the file `log` of the
    folder, is printed afterwards."""
    config, log = folder / "operator.yaml", folder / "log"
    listen = {"probes": "127.0.0.1:0", "metrics": "127.0.0.1:0"}
    config.write_text(json.dumps({"listen": listen, **settings}))
    named = {
        "POD_NAME": "operator",
        "POD_NAMESPACE": "default",
        "DRAKIT_CEL": str(cel_program(server.minor)),
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "drakit_operator", "--config", str(config)),
                *("--kubeconfig", str(kubeconfig or server.kubeconfig)),
            ],
            env=os.environ | named,
            stdout=output,
            stderr=output,
        )
    try:
        yield
        assert process.poll() is None
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(log.read_text()[-8000:])
