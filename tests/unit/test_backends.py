"""The records of backends' drivers: what a node plugin knows of them after a restart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drakit_nodeplugin.host.drivers import (
    forget_driver,
    known_drivers,
    refusal_of,
    remember_driver,
)

HERE, THERE = Path("/srv/backends"), Path("/srv/other-backends")


def test_a_driver_is_known_until_it_is_forgotten(tmp_path):
    for name in ("gpu.example.com", "nic.example.com", "gpu.example.com"):
        remember_driver(tmp_path, name, HERE)
    assert known_drivers(tmp_path, HERE) == ["gpu.example.com", "nic.example.com"]
    forget_driver(tmp_path, "gpu.example.com", HERE)
    forget_driver(tmp_path, "gpu.example.com", HERE)
    assert known_drivers(tmp_path, HERE) == ["nic.example.com"]
    assert {p.name for p in (tmp_path / "nic.example.com").iterdir()} == {"backend.json"}


def test_two_releases_know_the_backends_of_their_own_directories(tmp_path):
    remember_driver(tmp_path, "gpu.example.com", HERE)
    remember_driver(tmp_path, "nic.example.com", THERE)
    assert known_drivers(tmp_path, HERE) == ["gpu.example.com"]
    assert known_drivers(tmp_path, THERE) == ["nic.example.com"]


def test_a_driver_belongs_to_the_directory_in_which_its_backend_was_seen_last(tmp_path):
    remember_driver(tmp_path, "gpu.example.com", HERE)
    remember_driver(tmp_path, "gpu.example.com", THERE)
    assert known_drivers(tmp_path, HERE) == []
    forget_driver(tmp_path, "gpu.example.com", HERE)
    assert known_drivers(tmp_path, THERE) == ["gpu.example.com"]
    forget_driver(tmp_path, "gpu.example.com", THERE)
    assert known_drivers(tmp_path, THERE) == []


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda record: record.write_text(""), id="an-empty-file"),
        pytest.param(lambda record: record.write_text("\x00" * 40), id="zeros"),
        pytest.param(lambda record: record.write_text("[]"), id="a-list"),
        pytest.param(Path.mkdir, id="it-cannot-be-read-now"),
    ],
)
def test_a_driver_whose_record_is_damaged_is_known_by_its_directory(tmp_path, spoil, caplog):
    (tmp_path / "gpu.example.com").mkdir()
    spoil(tmp_path / "gpu.example.com" / "backend.json")
    assert known_drivers(tmp_path, HERE) == ["gpu.example.com"]
    assert "record of a backend cannot be read" in caplog.text


def test_a_directory_without_a_drivers_name_is_skipped(tmp_path):
    (tmp_path / "No Driver").mkdir()
    (tmp_path / "No Driver" / "backend.json").write_text("{}")
    assert known_drivers(tmp_path, HERE) == []
    assert known_drivers(tmp_path / "no-such-directory", HERE) == []


def test_a_record_of_a_later_version_is_known_and_stays(tmp_path):
    """After a rollback its claims are still to be unprepared."""
    (tmp_path / "gpu.example.com").mkdir()
    record = tmp_path / "gpu.example.com" / "backend.json"
    record.write_text('{"driver": "gpu.example.com", "version": 2, "more": []}')
    assert known_drivers(tmp_path, HERE) == ["gpu.example.com"]
    assert '"more"' in record.read_text()


@pytest.mark.parametrize("umask", [0o000, 0o777], ids=["umask-000", "umask-777"])
def test_records_are_for_root_alone(tmp_path, umask):
    directory, earlier = tmp_path / "gpu.example.com", tmp_path / "nic.example.com"
    earlier.mkdir(mode=0o755)
    (earlier / "backend.json").write_text("{}")
    before = os.umask(umask)
    try:
        remember_driver(tmp_path, directory.name, HERE)
        remember_driver(tmp_path, earlier.name, HERE)
    finally:
        os.umask(before)
    for folder in (directory, earlier):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "backend.json").stat().st_mode & 0o777 == 0o600


def test_a_node_hosts_at_most_64_backends():
    hosted = [f"driver-{number}.example.com" for number in range(64)]
    own = ["gpu.example.com", "nic.example.com"]
    assert refusal_of("new.example.com", own=own, hosted=hosted[:63]) is None
    refusal = refusal_of("new.example.com", own=own, hosted=hosted)
    assert refusal == "the node plugin already hosts 64 backends, the maximum"
    assert refusal_of(hosted[63], own=own, hosted=hosted) is None, "one that is hosted stays"
    refusal = refusal_of("nic.example.com", own=own, hosted=hosted[:1])
    assert refusal == "the node plugin hosts driver nic.example.com itself"
