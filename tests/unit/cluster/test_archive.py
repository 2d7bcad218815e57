"""Images that are written without an engine."""

import hashlib

import pytest

from e2e.archive import image_names, write_image


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(path, **changes):
    arguments = {
        "name": "localhost/thing:dev",
        "files": {"/usr/bin/thing": (b"program", 0o755)},
        "links": {"/bin/thing": "../usr/bin/thing"},
        "entrypoint": ["/bin/thing"],
        "env": {"HOME": "/"},
        "user": "7:7",
    }
    write_image(path, **{**arguments, **changes})
    return path


def test_the_same_content_gives_the_same_bytes(tmp_path):
    assert digest(write(tmp_path / "a.tar")) == digest(write(tmp_path / "b.tar"))


def test_names_are_read_back_and_a_failure_leaves_no_file(tmp_path):
    assert image_names(write(tmp_path / "a.tar")) == ["localhost/thing:dev"]
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "b.tar", files={"/x": (tmp_path / "missing", 0o644)})
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
