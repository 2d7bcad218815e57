"""Images that are written without an engine."""

import hashlib
import json
import tarfile

import pytest

from e2e.archive import Image, image_names, write_image, write_images


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


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"files": {"/usr/bin/thing": (b"other", 0o755)}}, id="content"),
        pytest.param({"files": {"/usr/bin/thing": (b"program", 0o700)}}, id="mode"),
        pytest.param({"entrypoint": ["/bin/other"]}, id="entrypoint"),
        pytest.param({"user": ""}, id="user"),
    ],
)
def test_a_change_changes_the_bytes(tmp_path, change):
    assert digest(write(tmp_path / "a.tar")) != digest(write(tmp_path / "b.tar", **change))


def test_digests_in_the_archive_are_those_of_its_files(tmp_path):
    with tarfile.open(write(tmp_path / "a.tar")) as archive:
        manifest = json.load(archive.extractfile("manifest.json"))[0]
        config = archive.extractfile(manifest["Config"]).read()
        layer = archive.extractfile(manifest["Layers"][0]).read()
    assert manifest["Config"] == f"{hashlib.sha256(config).hexdigest()}.json"
    parsed = json.loads(config)
    assert parsed["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    assert parsed["config"] == {"Entrypoint": ["/bin/thing"], "Env": ["HOME=/"], "User": "7:7"}


def test_a_layer_has_parents_before_children_and_links(tmp_path):
    with tarfile.open(write(tmp_path / "a.tar")) as archive:
        layer_name = json.load(archive.extractfile("manifest.json"))[0]["Layers"][0]
        with tarfile.open(fileobj=archive.extractfile(layer_name)) as layer:
            found = {member.name: member for member in layer}
    assert list(found) == ["bin", "tmp", "usr", "usr/bin", "usr/bin/thing", "bin/thing"]
    assert found["usr/bin/thing"].mode == 0o755
    assert found["bin/thing"].linkname == "../usr/bin/thing"
    assert found["tmp"].mode == 0o1777


def test_files_of_the_machine_are_copied(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"program")
    by_path = write(tmp_path / "a.tar", files={"/usr/bin/thing": (source, 0o755)})
    assert digest(by_path) == digest(write(tmp_path / "b.tar"))


def test_names_are_read_back_and_a_failure_leaves_no_file(tmp_path):
    assert image_names(write(tmp_path / "a.tar")) == ["localhost/thing:dev"]
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "b.tar", files={"/x": (tmp_path / "missing", 0o644)})
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_several_images_share_one_layer(tmp_path):
    layer, path = tmp_path / "layer.tar", tmp_path / "images.tar"
    layer.write_bytes(b"layer")
    images = [
        Image(names=["one:1", "one:2"], entrypoint=["/one"]),
        Image(names=["two:1"], user="7:7"),
    ]
    write_images(path, images, layer=layer)
    assert image_names(path) == ["one:1", "one:2", "two:1"]
    with tarfile.open(path) as archive:
        manifest = json.load(archive.extractfile("manifest.json"))
        assert {tuple(image["Layers"]) for image in manifest} == {(f"{digest(layer)}.tar",)}
        configs = [json.load(archive.extractfile(image["Config"])) for image in manifest]
        assert configs[0]["config"]["Entrypoint"] == ["/one"]
        assert configs[1]["config"]["User"] == "7:7"
        assert len(archive.getnames()) == 4
