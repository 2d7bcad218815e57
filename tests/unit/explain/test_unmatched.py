"""The reasons why no device matches: slices that are not used, and selectors with a misspelt name
or value."""

from dataclasses import replace

import pytest

from drakit_explain.devices import CapacityFacts, ListValue, Version
from drakit_explain.model import PolicyFacts
from drakit_explain.reports import HOSTDEV
from drakit_explain.unmatched import why_it_fails, why_unmatched
from tests.fakes.world import ANY, POD, claim, device, explain, node, request, slice_on, world_of

MODEL = {"model": "NVIDIA A100-SXM4-40GB", "numa": 0}


def test_slices_of_another_driver_are_not_named():
    slices = [replace(slice_on("gone", device("g0")), driver="e"), slice_on("n1")]
    any_of_d = replace(ANY, selectors=('device.driver == "d"',))
    (reason,) = explain(POD, world_of(any_of_d, node("n1"), claim(request()), *slices)).reasons
    assert "; no slice of driver d has devices, so check that the driver is running" in reason.text


@pytest.mark.parametrize(
    ("selector", "why"),
    [
        (
            """'model' in device.attributes['x'] && device.attributes['x'].model == 'A100'""",
            "no device has x/model, but some have d/model",
        ),
        ('"lanes" in device.attributes["d"]', "no device has d/lanes"),
        (
            'device.attributes["d"].numa == "0"',
            'd/numa is not a string, so compare it without quotes (device.attributes["d"].numa == '
            "0)",
        ),
        (
            'device.attributes["d"].numa == "many"',
            'no device has the value "many" of d/numa: they have 0',
        ),
        (
            "device.attributes['d'].model in ['x'] || device.attributes['d'].model == 'A100'",
            'no device has the value "A100" of d/model: they have "NVIDIA A100-SXM4-40GB"',
        ),
        (
            "(device.attributes['d'].model == 'A100' || device.attributes['d'].model == '"
            f"{MODEL['model']}') && device.attributes['d'].numa == 7",
            "check the selectors of class and request, and the attributes of the devices",
        ),
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


def test_a_string_is_not_compared_with_a_list():
    ports = {"ports": ListValue("strings", ("a", "b"))}
    world = world_of(ANY, slice_on("n1", device("g0", attributes=ports)))
    asked = request(selectors=('device.attributes["d"].ports == "c"',))
    assert "they have" not in why_unmatched(asked, world)


def test_the_attributes_of_all_devices_are_compared():
    others = [device(f"e{number}", attributes={"other": 1}) for number in range(300)]
    slices = [
        replace(slice_on("n0", *others), driver="e"),
        slice_on("n1", device("g0", attributes=MODEL)),
    ]
    selector = 'device.driver == "d" && device.attributes["d"].numa == 7'
    world = world_of(ANY, node("n0"), node("n1"), *slices, claim(request(selectors=(selector,))))
    (reason,) = explain(POD, world).reasons
    assert "no device has" not in reason.text


OVERLOAD = "its selector fails: no such overload"


@pytest.mark.parametrize(
    ("failure", "selector", "correct"),
    [
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


NOTHING = "2 of 2 nodes apply generation 1; no node has a device that it matches"
SELECTORS = 'no device has the value "stick" of hostdev.drakit.dev/policy: they have "kvm"'


@pytest.mark.parametrize(
    ("reason", "status", "why"),
    [
        pytest.param(
            "NoDeviceMatched",
            {"devices": 0},
            f"HostDevicePolicy stick publishes no device: {NOTHING}",
            id="nothing-is-connected",
        ),
        pytest.param("Progressing", {}, SELECTORS, id="nodes-have-not-answered"),
        pytest.param("DevicesRejected", {"devices": 1}, SELECTORS, id="it-publishes-a-device"),
    ],
)
def test_a_class_without_devices_is_explained_by_the_status_of_its_policy(reason, status, why):
    mine = 'device.attributes["hostdev.drakit.dev"].policy == "stick"'
    kvm = replace(slice_on("n1", device("kvm", attributes={"policy": "kvm"})), driver=HOSTDEV)
    applied = {"type": "Applied", "reason": reason, "message": NOTHING}
    policy = PolicyFacts(
        name="stick", uid="p", generation=1, status={"conditions": [applied], **status}
    )
    of_policy = replace(ANY, selectors=(mine,), owner="p")
    (reason,) = explain(POD, world_of(of_policy, node("n1"), kvm, claim(request()), policy)).reasons
    assert reason.text.endswith(f"; {why}")
