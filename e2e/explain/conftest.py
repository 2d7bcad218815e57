"""The API server and the operator's helper program, for all explanations of a session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Semaphore

import pytest

from drakit_explain.cel.helper import Helper
from e2e.cluster.api import Cluster
from e2e.explain.api import proxied
from e2e.images.go import cel_program
from tests.situations.api import Api, Body
from tests.situations.explaining import Explaining
from tests.situations.scene import CLUSTER_WIDE, LABEL, Heartbeats

COMMANDS_AT_ONCE = 4
COMMAND_SECONDS = 60


@pytest.fixture(scope="session")
def api(cluster: Cluster) -> Iterator[Api]:
    with proxied(cluster) as api:
        for plural in CLUSTER_WIDE:  # remnants of an interrupted session
            api.delete_all(plural, labels=LABEL)
        yield api


@pytest.fixture(scope="session")
def explaining(cluster: Cluster, api: Api) -> Iterator[Explaining]:
    program = cel_program(cluster.minor)
    command = partial(_explained, cluster.kubeconfig, program, Semaphore(COMMANDS_AT_ONCE))
    with Helper(program) as helper:
        yield Explaining(api, helper, program=program, command=command)


def _explained(
    kubeconfig: Path, program: Path, turns: Semaphore, namespace: str, target: str
) -> tuple[int, Body]:
    """Run ``kubectl drakit explain`` in a separate process."""
    argv = [sys.executable, "-m", "drakit_cli.kubectl.main", "explain", target]
    with turns:
        done = subprocess.run(
            [*argv, f"--namespace={namespace}", "--output=json"],
            env={**os.environ, "KUBECONFIG": str(kubeconfig), "DRAKIT_CEL": str(program)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="session")
def heartbeats(api: Api) -> Iterator[Heartbeats]:
    with Heartbeats(api) as heartbeats:
        yield heartbeats
