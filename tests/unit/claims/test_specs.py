"""The CDI files of claims: written files are read back, and a failure affects only its claim."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drakit.device import Edits
from drakit_formats.cdi import InvalidEditsError, lint_directories
from drakit_nodeplugin.state.cdi_files import ClaimSpecs

DRIVER = "camera.example.com"
A, B, C = (f"3f0d9a52-7c1c-4ad3-a7de-0f6bb5d1fd7{n}" for n in "abc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "cdi"


@pytest.fixture
def specs(folder: Path) -> ClaimSpecs:
    return ClaimSpecs(DRIVER, folder)


def file_of(folder: Path, uid: str) -> Path:
    return folder / f"{DRIVER}-claim_{uid}.json"


def edits(value: str = "x") -> list[Edits]:
    return [Edits(env={"CAM": value}), Edits()]


def test_the_file_holds_the_text_as_it_was_built_which_the_linter_accepts(specs, folder):
    texts = {uid: specs.build(uid, edits("größe 😀 \x7f \u2028")) for uid in (A, B)}
    assert specs.place(texts) == {}
    assert file_of(folder, A).read_text() == specs.read(A) == texts[A]
    assert specs.uids() == {A, B}
    assert lint_directories([folder]) == []
    spec = json.loads(texts[A])
    assert spec["kind"] == f"{DRIVER}/claim"
    assert [device["name"] for device in spec["devices"]] == [f"{A}-0", f"{A}-1"]
    assert specs.cdi_id(A, 1) == f"{DRIVER}/claim={A}-1"
    assert specs.place({A: "no JSON at all"}) == {}
    assert file_of(folder, A).read_text() == "no JSON at all"
    assert specs.read(A) == "", "it is damaged"


def test_a_file_that_was_changed_is_put_right_and_others_are_left_alone(specs, folder):
    texts = {uid: specs.build(uid, edits()) for uid in (A, B)}
    specs.place(texts)
    untouched = file_of(folder, B).stat().st_ino
    file_of(folder, A).write_text("{}")
    assert specs.place(texts) == {}
    assert specs.read(A) == texts[A]
    assert file_of(folder, B).stat().st_ino == untouched


def test_a_claim_whose_file_cannot_be_written_or_removed_fails_alone(specs, folder):
    assert (specs.uids(), specs.read(A), specs.unlink([A])) == (set(), None, {}), "no directory"
    file_of(folder, B).mkdir(parents=True)
    failed = specs.place(dict.fromkeys((A, B, C), "{}"))
    assert set(failed) == {B}
    assert isinstance(failed[B], OSError)
    assert file_of(folder, A).read_text() == file_of(folder, C).read_text() == "{}"
    assert set(specs.unlink([A, B, C])) == {B}
    assert specs.read(A) is None


@pytest.mark.parametrize("uid", ["../a", "a/b", "a\0b", "x" * 300, "größe"])
def test_a_uid_that_no_file_can_have_fails_where_it_is_written_only(specs, uid):
    assert specs.unlink([uid]) == {}
    assert specs.read(uid) is None
    assert set(specs.place({uid: "{}", A: "{}"})) == {uid}
    assert specs.uids() == {A}


def test_a_uid_that_is_no_name_for_cdi_is_refused_with_a_sentence(specs):
    with pytest.raises(InvalidEditsError, match="CDI device name 'a b-0'"):
        specs.build("a b", edits())


def test_files_of_others_are_neither_listed_nor_cleaned(specs, folder):
    specs.place({A: "{}"})
    others = ["vendor.json", f"{DRIVER}-other_1.json", f"x{DRIVER}-claim_1.json"]
    for name in others:
        (folder / name).write_text("{}")
    (folder / f".{DRIVER}-claim_{B}.json.0123abcd.drakit").write_text("half")
    specs.clean()
    assert specs.uids() == {A}
    assert sorted(os.listdir(folder)) == sorted([*others, file_of(folder, A).name])
