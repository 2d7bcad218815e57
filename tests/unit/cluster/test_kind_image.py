"""The content of kind's node image: images, files and tars. Building it needs root."""

import pytest

from e2e.cluster.api import ClusterError
from e2e.cluster.kind import image, image_tree
from e2e.cluster.kind.image_tree import Programs


@pytest.fixture
def programs(tmp_path):
    return Programs(local=tmp_path / "local-1", kind=tmp_path / "kind-1")


@pytest.mark.parametrize("change", [image_tree.containerd_config, image_tree.sandbox_image])
def test_a_configuration_of_another_form_is_an_error(change):
    with pytest.raises(ClusterError, match="kind's containerd configuration does not set"):
        change("version = 9\n")


def test_the_key_depends_on_programs_and_files(programs, tmp_path, monkeypatch):
    files = tmp_path / "node"
    files.mkdir()
    (files / "cni.sh").write_text("one")
    monkeypatch.setattr(image, "NODE_FILES", files)
    key = image._key(programs)
    assert image._key(programs) == key
    assert image._key(Programs(local=tmp_path / "local-2", kind=programs.kind)) != key
    assert image._key(Programs(local=programs.local, kind=tmp_path / "kind-2")) != key
    (files / "cni.sh").write_text("two")
    assert image._key(programs) != key
