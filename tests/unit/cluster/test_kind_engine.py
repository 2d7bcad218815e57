"""The private Docker engine, without the parts that need root: record, command line, processes."""

import json
import os
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from e2e.cluster import choice
from e2e.cluster.api import ClusterError, Options
from e2e.cluster.kind import engine
from e2e.cluster.kind.provider import init_of
from e2e.cluster.local.provider import LocalCluster
from e2e.cluster.local.records import Process

NODE = "d145187950a95c7d81c27f7caafd4e05bddcb46fa028a4241997386d6f1ff59f"


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "ROOT", tmp_path)
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    return tmp_path


def record(root, *, pid: int, started: int | None = None) -> None:
    init = Process.of(pid) if started is None else Process(pid=pid, started=started)
    content = {"init": asdict(init), "docker_host": "unix:///engine.sock"}
    (root / "engine.json").write_text(json.dumps(content))


def test_the_users_own_docker_host_wins(root, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2375")
    record(root, pid=os.getpid())
    assert engine.use() is None
    assert os.environ["DOCKER_HOST"] == "tcp://elsewhere:2375"


def test_an_engine_whose_process_ended_is_none(root):
    record(root, pid=os.getpid(), started=1)
    assert engine.find() is None


def test_no_local_cluster_starts_beside_an_engine(root, monkeypatch):
    monkeypatch.setattr("e2e.cluster.local.requirements.check", lambda: None)
    record(root, pid=os.getpid())
    with pytest.raises(ClusterError, match="make kind-down"):
        LocalCluster("a").start(Options())


def test_no_engine_starts_beside_a_local_cluster(tmp_path, monkeypatch):
    names = SimpleNamespace(cluster="other", folder=tmp_path)
    (tmp_path / "boxes").mkdir()
    box = tmp_path / "boxes" / "control-plane.json"
    box.write_text(json.dumps(asdict(Process.of(os.getpid()))))
    local = SimpleNamespace(names=names, owner=Process.of(os.getpid()))
    monkeypatch.setattr("e2e.cluster.local.records.all_records", lambda: [local])
    with pytest.raises(ClusterError, match="the local cluster other runs"):
        engine.refuse_local_clusters()
    box.write_text(json.dumps({"pid": os.getpid(), "started": 1}))
    engine.refuse_local_clusters()


def test_choice_by_auto_takes_the_engines_docker(root, tmp_path, monkeypatch):
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\ntest "$DOCKER_HOST" = unix:///engine.sock\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DOCKER_HOST", "")
    monkeypatch.delenv("DOCKER_HOST")
    assert not choice.docker_answers()
    record(root, pid=os.getpid())
    assert choice.docker_answers()


def process(pid: int, numbers: str, group: str) -> tuple[int, str, str]:
    return pid, f"Name:\tx\nNSpid:\t{numbers}\n", f"4:memory:{group}\n0::{group}\n"


def test_a_nodes_first_process_is_found_whatever_namespace_the_engine_has():
    group = f"/drakit-kind/{NODE}"
    processes = [
        process(10, "10\t3\t1", "/drakit-kind/another"),
        process(30, "30\t5\t40\t1", f"{group}/kubelet/pod"),
        process(20, "20\t4\t1", group),
        process(25, "25\t6\t9", group),
    ]
    assert init_of(NODE, processes) == 20
    assert init_of(NODE, [process(20, "20\t1", f"/docker-{NODE}.scope")]) == 20
