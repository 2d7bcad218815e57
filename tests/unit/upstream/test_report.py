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


def test_the_label_of_the_feature_tells_that_a_driver_is_needed():
    (spec,) = read(body(ContainerHierarchyLabels=[["Feature:DynamicResourceAllocation"], None]))
    assert spec.needs_driver


def test_the_namespace_is_the_one_that_the_framework_destroyed():
    steps = [{"Message": 'Destroying namespace "dra-5317" for this suite.'}]
    (spec,) = read(body(SpecEvents=steps))
    assert spec.namespaces == {"dra-5317"}


def test_a_failure_has_its_message():
    (spec,) = read(body(State="failed", Failure={"Message": "timed out\n"}))
    assert (spec.state, spec.failure) == ("failed", "timed out")


def test_a_spec_that_did_not_run_has_no_time():
    zero = "0001-01-01T00:00:00Z"
    (spec,) = read(body(State="skipped", StartTime=zero, EndTime=zero))
    assert (spec.ran, spec.seconds) == (False, 0)


def test_a_spec_that_skips_itself_ran():
    (spec,) = read(body(State="skipped", Failure={"Message": "2 nodes required"}))
    assert spec.ran


def test_only_hooks_that_fail_are_reported():
    hook = {"ContainerHierarchyTexts": None, "LeafNodeType": "AfterSuite", "LeafNodeText": ""}
    (spec,) = read(body(**hook), body(**hook, State="failed"))
    assert (spec.name, spec.state) == ("AfterSuite", "failed")
