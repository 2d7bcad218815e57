"""Ginkgo's report is read as it is written, hooks that fail included."""

from e2e.upstream.report import specs


def body(**fields):
    return {
        "ContainerHierarchyTexts": ["[sig-node] [DRA]", "control plane"],
        "ContainerHierarchyLabels": [["sig-node", "DRA"], []],
        "LeafNodeType": "It",
        "LeafNodeText": "must deallocate after use",
        "LeafNodeLabels": ["Beta"],
        "State": "passed",
        "StartTime": "2026-11-24T00:29:10.123456789Z",
        "EndTime": "2026-11-24T00:29:12.623456789Z",
        **fields,
    }


def read(*bodies):
    return specs([{"SpecReports": list(bodies)}])


def test_a_spec_has_name_labels_state_and_time():
    (spec,) = read(body())
    assert spec.name == "control plane must deallocate after use"
    assert spec.labels == {"sig-node", "DRA", "Beta"}
    assert (spec.state, spec.seconds, spec.needs_driver) == ("passed", 2.5, False)


def test_the_name_has_no_tags_because_releases_order_them_differently():
    (spec,) = read(body(LeafNodeText="must [KubeletMinVersion:1.34] work [Beta] [Serial]"))
    assert spec.name == "control plane must work"


def test_a_spec_that_did_not_run_has_no_time():
    zero = "0001-01-01T00:00:00Z"
    (spec,) = read(body(State="skipped", StartTime=zero, EndTime=zero))
    assert (spec.ran, spec.seconds) == (False, 0)
