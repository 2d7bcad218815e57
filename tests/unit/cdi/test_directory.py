"""CDI files: whole or not there, and nobody else's touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from drakit.device import Edits
from drakit_formats.cdi import DamagedSpecError, SpecDirectory, build_spec

SPEC: dict = build_spec("a.b/claim", [("x", Edits(env={"A": "b"}))])
NAME = "a.b-claim_1.json"


@pytest.fixture
def directory(tmp_path: Path) -> SpecDirectory:
    return SpecDirectory(tmp_path / "run" / "cdi")


def test_a_spec_is_written_and_read(directory):
    assert directory.write(NAME, SPEC)
    assert directory.read(NAME) == SPEC
    assert (directory.path / NAME).stat().st_mode & 0o777 == 0o644
    assert directory.path.stat().st_mode & 0o777 == 0o755
    assert os.listdir(directory.path) == [NAME]


def test_the_umask_does_not_hide_a_file_from_the_runtime(directory):
    before = os.umask(0o077)
    try:
        directory.path.mkdir(parents=True)
        directory.write(NAME, SPEC)
    finally:
        os.umask(before)
    assert (directory.path / NAME).stat().st_mode & 0o777 == 0o644


def test_an_identical_file_is_left_alone(directory):
    directory.write(NAME, SPEC)
    before = (directory.path / NAME).stat().st_ino
    assert not directory.write(NAME, SPEC)
    assert (directory.path / NAME).stat().st_ino == before


def test_a_changed_file_is_replaced_as_a_whole(directory):
    directory.write(NAME, SPEC)
    with (directory.path / NAME).open() as reader:
        assert directory.write(NAME, {"kind": "other"})
        assert "a.b/claim" in reader.read()
    assert directory.read(NAME) == {"kind": "other"}


def test_a_text_is_written_and_read_as_it_is(directory):
    assert directory.write_text(NAME, '{"kind":\n"größe"}')
    assert (directory.path / NAME).read_bytes() == '{"kind":\n"größe"}'.encode()
    assert directory.read_text(NAME) == '{"kind":\n"größe"}'
    assert not directory.write_text(NAME, '{"kind":\n"größe"}')


def test_a_file_longer_than_it_was_at_first_glance_is_read_whole(directory, monkeypatch):
    directory.write_text(NAME, "x" * 1000)
    monkeypatch.setattr(os, "fstat", lambda descriptor: os.stat_result([0] * 10))
    assert directory.read_text(NAME) == "x" * 1000


def test_a_file_of_other_bytes_is_replaced(directory):
    directory.write_text(NAME, "{}")
    for data in (b"", b"{", b"{}}", b"\xff"):
        (directory.path / NAME).write_bytes(data)
        assert directory.write_text(NAME, "{}")
        assert directory.read_text(NAME) == "{}"


def test_bytes_that_are_no_text_are_read_as_something_else(directory):
    directory.path.mkdir(parents=True)
    (directory.path / NAME).write_bytes(b'{"a": "\xff"}')
    assert directory.read_text(NAME) == '{"a": "\ufffd"}'


@pytest.mark.parametrize("durable", [True, False])
def test_only_a_durable_write_is_flushed(tmp_path, monkeypatch, durable):
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    SpecDirectory(tmp_path, durable=durable).write(NAME, SPEC)
    assert bool(flushed) == durable


def test_a_directory_that_goes_away_is_made_again(directory, monkeypatch):
    directory.write(NAME, SPEC)
    real = os.rename
    gone: list[None] = []

    def rename(source, target):
        if not gone:
            gone.append(shutil.rmtree(directory.path))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    assert directory.write(NAME, {"kind": "other"})
    assert directory.read(NAME) == {"kind": "other"}


def test_a_failed_write_leaves_nothing(directory):
    (directory.path / NAME).mkdir(parents=True)  # a rename cannot replace it
    with pytest.raises(OSError):
        directory.write(NAME, SPEC)
    assert os.listdir(directory.path) == [NAME]


def test_a_temporary_file_cleaned_away_by_another_process_is_made_again(directory, monkeypatch):
    real = os.fsync
    cleaned: list[None] = []

    def fsync(descriptor):
        real(descriptor)
        if not cleaned:
            cleaned.append(directory.clean_temporary("a.b-"))

    monkeypatch.setattr(os, "fsync", fsync)
    assert directory.write(NAME, SPEC)
    assert cleaned
    assert directory.read(NAME) == SPEC


def test_missing_files_and_directory_are_fine(directory):
    assert directory.read(NAME) is None
    assert directory.read_text(NAME) is None
    directory.remove(NAME)
    directory.clean_temporary("")
    assert directory.names("") == ()


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_damaged_file_is_named(directory, content):
    directory.path.mkdir(parents=True)
    (directory.path / NAME).write_text(content)
    with pytest.raises(DamagedSpecError, match=NAME):
        directory.read(NAME)
    assert directory.write(NAME, SPEC)


def test_only_own_files_are_listed_cleaned_and_removed(directory):
    directory.write(NAME, SPEC)
    foreign = ["vendor.json", "a.b-claim_2.yaml", ".vendor.json.12345678.tmp", "spec.temp"]
    left = [f".{NAME}.0123abcd.drakit", ".c.d-claim_1.json.0123abcd.drakit"]
    for name in foreign + left:
        (directory.path / name).write_text("{}")
    directory.clean_temporary("a.b-")
    assert directory.names("a.b-claim_") == (NAME,)
    directory.remove(NAME)
    assert sorted(os.listdir(directory.path)) == sorted([*foreign, left[1]])


@pytest.mark.parametrize("name", ["../a.json", "a/b.json", ".a.json", "a.yaml", "", ".json"])
def test_a_name_that_could_leave_the_directory_is_refused(directory, name):
    calls = (directory.read, directory.read_text, directory.remove)
    for call in (*calls, lambda n: directory.write(n, SPEC)):
        with pytest.raises(ValueError, match="not a valid name for a CDI file"):
            call(name)
