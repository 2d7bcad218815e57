"""ResourceSlices in other versions of the API, and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drakit_formats.resource.objects import VERSIONS, from_version, to_version

SLICE = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceSlice",
    "metadata": {"name": "s", "resourceVersion": "7", "unknown": 1},
    "spec": {
        "driver": "x.example.com",
        "nodeName": "node-1",
        "pool": {"name": "node-1", "generation": 1, "resourceSliceCount": 1},
        "devices": [
            {
                "name": "a",
                "attributes": {"x": {"int": 1}},
                "taints": [{"key": "k"}],
                "new": {"b": 1},
            },
            {"name": "b"},
        ],
        "newer": [1],
    },
}


def test_v1beta2_has_the_shape_of_v1():
    assert to_version(SLICE, "v1beta2") == SLICE | {"apiVersion": "resource.k8s.io/v1beta2"}


def test_v1beta1_has_devices_below_basic():
    made = to_version(SLICE, "v1beta1")
    assert made["apiVersion"] == "resource.k8s.io/v1beta1"
    assert made["metadata"] == SLICE["metadata"]
    assert made["spec"] == SLICE["spec"] | {
        "devices": [
            {
                "name": "a",
                "basic": {
                    "attributes": {"x": {"int": 1}},
                    "taints": [{"key": "k"}],
                    "new": {"b": 1},
                },
            },
            {"name": "b", "basic": {}},
        ]
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_there_and_back_nothing_is_lost(version):
    before = repr(SLICE)
    assert from_version(to_version(SLICE, version)) == SLICE
    assert repr(SLICE) == before


def test_items_of_a_list_need_the_version_of_the_list():
    item = to_version(SLICE, "v1beta1")
    del item["apiVersion"]
    assert from_version(item, "v1beta1") == SLICE


@pytest.mark.parametrize("spec", [{}, {"devices": None}, {"devices": []}, {"sharedCounters": [1]}])
def test_a_slice_without_devices_stays_as_it_is(spec):
    body = {"kind": "ResourceSlice", "spec": spec}
    assert to_version(body, "v1beta1")["spec"] == spec
    assert from_version(body, "v1beta1")["spec"] == spec


@pytest.mark.parametrize("version", ["v1alpha3", "v2", ""])
def test_another_version_is_an_error(version):
    with pytest.raises(ValueError, match="are unknown"):
        to_version(SLICE, version)


json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
field_names = st.text(min_size=1, max_size=6).filter(lambda name: name not in ("name", "basic"))


@settings(derandomize=True, database=None)
@given(st.lists(st.dictionaries(field_names, json, max_size=4), max_size=4))
def test_whatever_a_device_has_goes_along(devices):
    named = [{"name": f"d{n}", **device} for n, device in enumerate(devices)]
    body = {"apiVersion": "resource.k8s.io/v1", "spec": {"devices": named}}
    for version in VERSIONS:
        assert from_version(to_version(body, version)) == body
