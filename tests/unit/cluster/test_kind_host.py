"""The comparison of this machine before and after an engine, and what is restored."""

import os

import pytest

from e2e.cluster.kind import host
from e2e.cluster.kind.host import differences


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A /dev and sysctls in a folder; the rest of the machine is left as it is."""
    monkeypatch.setattr(host, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(host, "SYSCTLS", tmp_path / "sys")
    monkeypatch.setattr(host, "FOLDERS", (str(tmp_path / "modules"),))
    for part in ("_links", "_routes", "_firewall", "_cgroups", "_processes"):
        monkeypatch.setattr(host, part, lambda: iter(()))
    (tmp_path / "dev" / "net").mkdir(parents=True)
    (tmp_path / "sys" / "kernel").mkdir(parents=True)
    (tmp_path / "sys" / "kernel" / "panic").write_text("0\n")
    (tmp_path / "dev" / "tun").write_text("")
    (tmp_path / "dev" / "tun").chmod(0o600)
    return tmp_path


def test_changes_are_undone(machine):
    before = host.snapshot()
    (machine / "sys" / "kernel" / "panic").write_text("10\n")
    (machine / "dev" / "tun").chmod(0o666)
    (machine / "dev" / "log").symlink_to("/run/systemd/journal/dev-log")
    (machine / "dev" / "hugepages").mkdir()
    (machine / "modules").mkdir()
    assert len(differences(before, host.snapshot())) == 5

    host.restore(before)
    assert differences(before, host.snapshot()) == []
    assert (machine / "sys" / "kernel" / "panic").read_text() == "0"
    assert os.listdir(machine / "dev" / "net") == []
