"""Records of a cluster: its processes, its state, its lock."""

import os
import subprocess
import sys

import pytest

from e2e.cluster.api import ClusterError
from e2e.cluster.local import records
from e2e.cluster.local.names import Names
from e2e.cluster.local.records import Process, Record


def test_a_process_is_alive_until_it_ends():
    with subprocess.Popen(["sleep", "60"]) as child:
        process = Process.of(child.pid)
        assert process.alive
        assert process.signal(9)
        assert process.wait(5)  # a zombie: nobody has waited for it yet
        assert not process.alive
        assert not process.signal(9)


def test_an_id_that_was_reused_is_another_process():
    me = Process.of(os.getpid())
    stranger = Process(pid=me.pid, started=me.started + 1)
    assert not stranger.alive
    assert not stranger.signal(0)


def test_a_record_is_read_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr("e2e.cluster.local.names.ROOT", tmp_path)
    record = Record(
        names=Names(cluster="a", port_place=1, subnet_place=2),
        phase="up",
        kept=True,
        owner=Process(pid=1, started=2),
        nodes=3,
        gates={"Gate": True},
        runtime_config={"resource.k8s.io/v1": False},
        version="v1.36.3",
    )
    record.write()
    assert records.read(record.names.folder) == record


def test_a_lock_is_held_by_one_and_freed_by_death():
    script = (
        "from e2e.cluster.local.records import lock\n"
        "with lock('unit-test', timeout_seconds=0):\n"
        "    print('held', flush=True); input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(ClusterError, match="another process still works on unit-test"),
            records.lock("unit-test", timeout_seconds=0),
        ):
            pass
        holder.kill()
        holder.wait(5)
        with records.lock("unit-test", timeout_seconds=0):
            pass
