"""Folders by content: made once, completely or not at all, and removed in the end."""

from __future__ import annotations

import os
import time

import pytest

from e2e.images.cache import ImageError, digest, kept, run


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAKIT_CACHE", str(tmp_path))
    return tmp_path


def test_a_name_depends_on_each_part_and_where_it_ends(tmp_path):
    file = tmp_path / "file"
    file.write_text("b")
    assert digest("a", file) == digest("a", "b") == digest("a", b"b")
    assert digest("ab", "c") != digest("a", "bc")


def test_what_is_kept_is_made_once():
    places = [kept("things", "key", lambda folder: (folder / "one").touch())]
    places.append(kept("things", "key", lambda folder: (folder / "two").touch()))
    assert places[0] == places[1]
    assert [path.name for path in places[0].iterdir()] == ["one"]


def test_what_fails_halfway_is_not_there(cache):
    def fail(folder):
        (folder / "half").touch()
        raise ImageError("the network is away")

    with pytest.raises(ImageError, match="network"):
        kept("things", "key", fail)
    assert [path.name for path in (cache / "things").iterdir()] == [".lock"]


def test_what_a_killed_process_left_half_done_is_removed(cache):
    (cache / "things" / ".new-1" / "content").mkdir(parents=True)
    kept("things", "key", lambda folder: None)
    assert sorted(path.name for path in (cache / "things").iterdir()) == [".lock", "key"]


def test_the_oldest_go_first_but_not_those_of_the_last_hour(cache):
    for age_hours, key in ((4, "old"), (3, "older-than-an-hour"), (0, "new")):
        place = kept("things", key, lambda folder: None)
        then = time.time() - age_hours * 3600
        os.utime(place, (then, then))
    kept("things", "newest", lambda folder: None, keep=1)
    left = {path.name for path in (cache / "things").iterdir() if not path.name.startswith(".")}
    assert left == {"new", "newest"}


def test_a_program_that_fails_is_quoted():
    with pytest.raises(ImageError, match=r"asking failed \(code 3\):\n  what is wrong"):
        run(["sh", "-c", "echo what is wrong >&2; exit 3"], what="asking", timeout_seconds=10)
