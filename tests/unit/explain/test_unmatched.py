"""Why no device matches: slices that do not count, and selectors with a misspelt name or value."""

from dataclasses import replace

import pytest

from drakit_explain.devices import CapacityFacts, Place, Version
from drakit_explain.unmatched import why_it_fails
from drakit_formats.resource.nodes import node_selector
from tests.fakes.world import ANY, POD, claim, device, explain, node, request, slice_on, world_of

MODEL = {"model": "NVIDIA A100-SXM4-40GB"}
CLASS = replace(ANY, selectors=('device.driver == "d"',))
OLD = slice_on("n1", device("g0"), device("g1"))
NOWHERE = node_selector(
    {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]}
)


@pytest.mark.parametrize(
    ("slices", "why"),
    [
        pytest.param(
            [replace(OLD, pool_slices=2)],
            "2 that match are in ResourceSlice s-n1 of a pool with 1 of 2 slices; they count when "
            "the driver has published all of them",
            id="an-incomplete-pool",
        ),
        pytest.param(
            [OLD, replace(slice_on("n1"), name="new", generation=2)],
            "2 that match are in ResourceSlice s-n1 of generation 1, but the scheduler only uses "
            "generation 2 of pool n1, which has no such device; check the log of the driver",
            id="an-empty-newest-generation",
        ),
        pytest.param(
            [slice_on("gone", device("g0"))],
            "1 device that matches is in ResourceSlice s-gone of node gone, which does not exist; "
            "delete the slice if the node does not return",
            id="a-node-that-is-deleted",
        ),
        pytest.param(
            [replace(slice_on("net", device("g0")), place=Place(selector=NOWHERE))],
            "1 device that matches is in ResourceSlice s-net whose node selector matches no node; "
            "correct it in the driver, or the labels of the nodes",
            id="a-node-selector-without-nodes",
        ),
        pytest.param(
            [replace(slice_on("gone", device("g0")), driver="e"), slice_on("n1")],
            "no slice of driver d has devices, so check that the driver is running",
            id="slices-of-another-driver",
        ),
    ],
)
def test_slices_that_do_not_count_are_named_with_what_they_have(slices, why):
    world = world_of(CLASS, node("n1"), claim(request()), *slices)
    (reason,) = explain(POD, world).reasons
    assert reason.code == "NoDevicePublished"
    assert 'request "r" of claim "mine"' in reason.text
    assert f"; {why}" in reason.text


@pytest.mark.parametrize(
    ("selector", "why"),
    [
        ('device.driver == "dd"', "no slice of driver dd has devices, but driver d publishes some"),
        (
            'device.attributes["d"].model == "A100"',
            'no device has the value "A100" of d/model: they have "NVIDIA A100-SXM4-40GB"',
        ),
        (
            """'model' in device.attributes['x'] && device.attributes['x'].model == 'A100'""",
            "no device has x/model, but some have d/model",
        ),
        ('"modle" in device.attributes["d"]', "no device has d/modle, but some have d/model"),
        ('"lanes" in device.attributes["d"]', "no device has d/lanes"),
        ('"vram" in device.capacity["d"]', "no device has d/vram, but some have d/ram"),
        (
            "device.allowMultipleAllocations",
            "check the selectors of class and request, and the attributes of the devices",
        ),
    ],
)
def test_a_selector_that_selects_nothing_names_what_no_device_has(selector, why):
    ram = CapacityFacts(name="ram", value="40Gi")
    devices = slice_on("n1", device("g0", attributes=MODEL, capacity=[ram]))
    world = world_of(ANY, node("n1"), devices, claim(request(selectors=(selector,))))
    (reason,) = explain(POD, world).reasons
    assert reason.text.endswith(f"; {why}")


OVERLOAD = "its selector fails: no such overload"


@pytest.mark.parametrize(
    ("failure", "selector", "correct"),
    [
        (
            OVERLOAD,
            'device.attributes["d"].firmware >= "1.2.0"',
            'firmware is a version, which is compared with compareTo: device.attributes["d"]'
            '.firmware.compareTo(semver("1.2.0")) >= 0',
        ),
        (
            "its selector does not compile: found no matching overload for '_>_'",
            'device.capacity["d"].ram > quantity("20Gi")',
            'ram is a quantity, which is compared with compareTo: device.capacity["d"].ram'
            '.compareTo(quantity("20Gi")) > 0',
        ),
        (
            OVERLOAD,
            'device.capacity["d"].ram == "20Gi"',
            'ram is a quantity, which is compared with compareTo: device.capacity["d"].ram'
            '.compareTo(quantity("20Gi")) == 0',
        ),
        (OVERLOAD, 'device.attributes["d"].model == "A100"', ""),
        ("its selector fails: no such key: x", 'device.attributes["d"].firmware >= "1.2.0"', ""),
    ],
)
def test_a_version_or_quantity_that_is_compared_like_a_string(failure, selector, correct):
    facts = device("g0", attributes={"firmware": Version("1.3.0"), **MODEL})
    assert why_it_fails(failure, [selector], facts, "d") == correct
