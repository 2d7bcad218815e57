"""
A control plane without nodes that serves drakit's kinds, and the operator as a local process.

Tests write Nodes, ResourceSlices and NodeDeviceReports, in place of kubelets and node plugins. The
control plane runs in addition to the session's cluster.
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
from e2e.cluster.gates import defaults, gates_of_tests
from e2e.images.go import cel_program
from e2e.kit import wait_for

STOP_SECONDS = 10
"""How long a stopped operator has to release its Lease, so that the next one leads."""


@contextmanager
def control_plane(suffix: str, **gates: bool) -> Generator[Cluster]:
    """
    Run a control plane with drakit's kinds and without objects of them.

    Those of `gates` that the release knows are added to the feature gates of all tests. The
    operator may write only the objects that its page lists.
    """
    chosen = cluster_of_tests(suffix)
    known = {name: on for name, on in gates.items() if name in defaults(chosen.minor)}
    chosen.start(Options(nodes=0, gates={**gates_of_tests(chosen.minor), **known}))
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
    """Run the operator with settings in one process. Its log, the file `log` in the folder, is
    printed afterwards."""
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
