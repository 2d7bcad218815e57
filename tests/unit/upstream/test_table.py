"""The page about the specs: each result has its reason, and the committed page is current."""

import pytest

from e2e.upstream.report import Spec
from e2e.upstream.table import PAGE, Note, TableError, counted, keep, page, results
from tests.unit.upstream.test_report import body, read

NOTE = Note(spec="control plane must .* after use", verdict="failed", reason="kubernetes#1")


DRIVER = [["Feature:DynamicResourceAllocation"]]


def spec(name: str, state: str, **fields) -> Spec:
    (made,) = read(body(ContainerHierarchyTexts=[], LeafNodeText=name, State=state, **fields))
    return made


@pytest.fixture
def folder(tmp_path):
    driven = read(body(ContainerHierarchyLabels=DRIVER))
    other = [spec("other", "passed"), spec("driven", "skipped", ContainerHierarchyLabels=DRIVER)]
    keep("1.36", {"kubelet": driven, "control-plane": other}, tmp_path)
    driven = read(body(ContainerHierarchyLabels=DRIVER, State="failed"))
    keep("1.37", {"kubelet": driven, "control-plane": [spec("new", "passed")]}, tmp_path)
    return tmp_path


def test_a_spec_that_did_not_pass_needs_a_note(folder):
    with pytest.raises(TableError, match=r"must deallocate after use of 1\.37 is failed"):
        results(folder, [])


def test_a_note_about_a_spec_that_passed_is_to_be_removed(folder):
    with pytest.raises(TableError, match=r"must deallocate after use of 1\.36 is passed"):
        results(folder, [NOTE])
    unused = Note(spec="never .*", verdict="failed", reason="-")
    with pytest.raises(TableError, match=r"remove the notes .*: never"):
        results(folder, [Note(**{**vars(NOTE), "minors": ("1.37",)}), unused])


def test_the_page_has_a_line_for_each_spec_that_did_not_pass_in_a_release(folder):
    found = results(folder, [Note(**{**vars(NOTE), "minors": ("1.37",)})])
    text = page(found)
    _, _, listed = text.partition("\n1.36 passed; 1.37 failed (kubernetes#1):\n")
    assert listed.startswith("\n```text\ncontrol plane must deallocate after use\n```\n")
    assert "\nnew\n" not in text
    assert "## Specs without a driver" not in text
    assert "\ndriven\n" not in text, "the other part runs it"
    assert "| Specs of a cluster with drakit as the driver | 1.37 | 0 | 1 | 0 |" in text
    assert counted(found["1.36"].values(), "control-plane") == {"passed": 1}


def test_the_page_is_that_of_the_last_results():
    assert PAGE.read_text() == page(results()), "run python -m e2e.upstream.table"
