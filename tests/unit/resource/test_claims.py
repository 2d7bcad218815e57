"""Projections of claims and node selectors."""

from __future__ import annotations

import pytest

from drakit_formats.resource.claim import base_request
from drakit_formats.resource.nodes import NodeLabelsUnknownError, node_selector, selects_node


def term(key: str, operator: str, *values: str, kind: str = "matchExpressions") -> dict:
    requirement = {"key": key, "operator": operator, "values": list(values)}
    return node_selector({"nodeSelectorTerms": [{kind: [requirement]}]})


@pytest.mark.parametrize(
    ("selector", "here"),
    [
        pytest.param(None, True, id="none-means-any"),
        pytest.param(term("metadata.name", "In", "node-1", kind="matchFields"), True, id="name"),
        pytest.param(term("metadata.name", "In", "node-2", kind="matchFields"), False, id="other"),
        pytest.param(term("zone", "In", "a", "b"), True, id="in"),
        pytest.param(term("zone", "NotIn", "a"), False, id="not-in"),
        pytest.param(term("rack", "NotIn", "a"), True, id="not-in-without-label"),
        pytest.param(term("zone", "Exists"), True, id="exists"),
        pytest.param(term("rack", "DoesNotExist"), True, id="does-not-exist"),
        pytest.param(term("slots", "Gt", "3"), True, id="greater"),
        pytest.param(term("slots", "Lt", "3"), False, id="less"),
        pytest.param(term("zone", "Gt", "3"), False, id="greater-than-text"),
        pytest.param(
            node_selector({"nodeSelectorTerms": [{}, {"matchFields": []}]}),
            False,
            id="an-empty-term-matches-nothing",
        ),
        pytest.param(node_selector({"nodeSelectorTerms": []}), False, id="no-term"),
    ],
)
def test_node_selectors(selector, here):
    assert selects_node(selector, name="node-1", labels={"zone": "a", "slots": "4"}) is here


def test_equal_terms_are_one():
    required = {"key": "zone", "operator": "In", "values": ["a"]}
    terms = [{"matchExpressions": [dict(required)]} for _ in range(3)]
    assert node_selector({"nodeSelectorTerms": [{}, *terms]}) == term("zone", "In", "a")


def test_a_selector_on_labels_needs_labels():
    by_name = term("metadata.name", "In", "node-1", kind="matchFields")
    assert selects_node(by_name, name="node-1", labels=None) is True
    with pytest.raises(NodeLabelsUnknownError):
        selects_node(term("zone", "In", "a"), name="node-1", labels=None)


def test_base_requests():
    assert [base_request(name) for name in ("main", "main/small")] == ["main", "main"]
