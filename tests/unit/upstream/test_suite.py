"""The suite's module, its images, and the operator's log."""

import pytest

from e2e.images.cache import ImageError
from e2e.upstream.program import (
    EDITS,
    METADATA_EDIT,
    edited_text,
    minors,
    module_file,
    required_version,
)


@pytest.mark.parametrize("minor", minors())
def test_each_suite_is_that_of_its_minor_release(minor):
    assert required_version(module_file(minor)).startswith(f"v{minor}.")


def test_an_unknown_release_is_refused_with_the_known_ones():
    with pytest.raises(ImageError, match=r"no suite of Kubernetes 1\.9; .*: 1\.36"):
        module_file("1.9")


@pytest.mark.parametrize("edits", [EDITS, (*EDITS, METADATA_EDIT)])
def test_an_edit_without_its_place_is_an_error(edits):
    text = "".join(f"\t{old}\n" for old, _ in edits)
    edited = edited_text(text, name="deploy.go")
    assert "kubeletplugin." not in edited
    assert "app.WithBackendListener(d.listen(" in edited
    with pytest.raises(ImageError, match=r"deploy\.go has 0 places with 'kubeletplugin\.GRPC"):
        edited_text(edited, name="deploy.go")
    with pytest.raises(ImageError, match="has 2 places"):
        edited_text(text * 2, name="deploy.go")
