"""The API server and the operator's helper program, for all explanations of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from drakit_explain.cel.helper import Helper
from e2e.cluster.api import Cluster
from e2e.explain.api import Api, proxied
from e2e.explain.explaining import Explaining
from e2e.explain.scene import CLUSTER_WIDE, LABEL, Heartbeats
from e2e.images.go import cel_program


@pytest.fixture(scope="session")
def api(cluster: Cluster) -> Iterator[Api]:
    with proxied(cluster) as api:
        for plural in CLUSTER_WIDE:  # what an interrupted session left behind
            api.delete_all(plural, labels=LABEL)
        yield api


@pytest.fixture(scope="session")
def explaining(cluster: Cluster, api: Api) -> Iterator[Explaining]:
    program = cel_program()
    with Helper(program) as helper:
        yield Explaining(api, helper, kubeconfig=cluster.kubeconfig, program=program)


@pytest.fixture(scope="session")
def heartbeats(api: Api) -> Iterator[Heartbeats]:
    with Heartbeats(api) as heartbeats:
        yield heartbeats
