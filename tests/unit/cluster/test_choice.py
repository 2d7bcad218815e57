"""The provider of the cluster is selected, and an error names what is missing."""

import stat

import pytest

from e2e.cluster import choice
from e2e.cluster.api import ClusterError
from e2e.cluster.kind import engine
from e2e.cluster.local import binaries, names, records
from e2e.cluster.local.names import Names
from e2e.cluster.local.records import Process, Record


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Put a `docker` on the PATH that exits with the given code."""
    monkeypatch.setenv("CLUSTER", "auto")
    monkeypatch.delenv("KUBERNETES", raising=False)
    monkeypatch.setattr(engine, "ROOT", tmp_path / "no-engine")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(script: str) -> None:
        program = tmp_path / "docker"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    return make


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Choose local clusters, whose programs need not be built and whose records are ours."""
    monkeypatch.setenv("CLUSTER", "local")
    for module in (names, records):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(binaries, "programs", lambda *, minor: tmp_path / minor)
    return tmp_path


def test_the_choice_by_hand_wins(docker, monkeypatch):
    docker("exit 0")
    monkeypatch.setenv("CLUSTER", "local")
    assert choice.cluster("a").provider == "local"
    monkeypatch.setenv("CLUSTER", "minikube")
    with pytest.raises(ClusterError, match="not auto, kind or local"):
        choice.cluster("a")


@pytest.mark.parametrize(
    ("environment", "argument", "minor"),
    [
        pytest.param("", None, "1.37", id="without-a-choice-the-default"),
        pytest.param("1.36", None, "1.36", id="the-environment-chooses"),
        pytest.param("1.36", "1.35", "1.35", id="the-caller-overrides-the-environment"),
    ],
)
def test_a_cluster_starts_the_chosen_kubernetes(local, monkeypatch, environment, argument, minor):
    monkeypatch.setenv("KUBERNETES", environment)
    chosen = choice.cluster("a", minor=argument)
    assert chosen.program("kubelet") == str(local / minor / "kubelet")


def test_a_cluster_keeps_the_kubernetes_that_it_was_started_with(local, monkeypatch):
    Record(
        names=Names(cluster="a", port_place=0, subnet_place=0),
        phase="up",
        kept=True,
        owner=Process(pid=1, started=2),
        nodes=0,
        version="v1.36.3",
    ).write()
    monkeypatch.delenv("KUBERNETES", raising=False)
    assert choice.cluster("a").program("kubelet") == str(local / "1.36" / "kubelet")
    assert choice.cluster("b").program("kubelet") == str(local / "1.37" / "kubelet")


@pytest.mark.parametrize("provider", ["local", "kind"])
def test_an_unknown_kubernetes_is_refused_with_the_known_ones(docker, monkeypatch, provider):
    monkeypatch.setenv("CLUSTER", provider)
    monkeypatch.setenv("KUBERNETES", "1.30")
    with pytest.raises(ClusterError, match=r"Kubernetes 1\.30; KUBERNETES can be: 1\.34, 1\.35,"):
        choice.cluster("a")
