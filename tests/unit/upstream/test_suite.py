"""The suite's module, its images, and the operator's log."""

import pytest

from e2e.images.cache import ImageError
from e2e.upstream.images import wanted_images
from e2e.upstream.program import EDITS, edited_text, minors, module_file, required_version
from e2e.upstream.run import complaints


@pytest.mark.parametrize("minor", minors())
def test_each_suite_is_that_of_its_minor_release(minor):
    assert required_version(module_file(minor)).startswith(f"v{minor}.")


def test_an_unknown_release_is_refused_with_the_known_ones():
    with pytest.raises(ImageError, match=r"no suite of Kubernetes 1\.9; .*: 1\.36"):
        module_file("1.9")


def test_an_edit_without_its_place_is_an_error():
    text = "".join(f"\t{old}\n" for old, _ in EDITS)
    edited = edited_text(text, name="deploy.go")
    assert "kubeletplugin." not in edited
    assert "app.WithBackendListener(d.listen(" in edited
    with pytest.raises(ImageError, match=r"deploy\.go has 0 places with 'kubeletplugin\.GRPC"):
        edited_text(edited, name="deploy.go")
    with pytest.raises(ImageError, match="has 2 places"):
        edited_text(text * 2, name="deploy.go")


def test_images_are_taken_from_the_suites_list():
    listed = [
        "registry.k8s.io/e2e-test-images/agnhost:2.63.0",
        "registry.k8s.io/e2e-test-images/agnhost:2.55",
        "registry.k8s.io/pause:3.10.2",
        "registry.k8s.io/etcd:3.6.8-0",
        "other.example/agnhost:2.6",
    ]
    wanted = wanted_images(listed)
    assert wanted["agnhost"] == [listed[1], listed[0]]
    assert wanted["pause"] == [listed[2]]
    assert wanted["busybox"] == []


def test_warnings_of_the_operator_are_complaints():
    calm = '{"level": "INFO", "msg": "started"}'
    loud = '{"level": "WARNING", "msg": "too many events about one object"}'
    assert complaints(f"{calm}\n{loud}\nnot JSON\n") == [loud]
