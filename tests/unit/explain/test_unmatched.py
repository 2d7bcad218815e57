"""Why no device matches: slices that do not count, and selectors with a misspelt name or value."""

from dataclasses import replace

import pytest

from drakit_explain.devices import CapacityFacts, Version
from drakit_explain.model import PolicyFacts, PolicyReport, ReportFacts
from drakit_explain.reports import HOSTDEV
from drakit_explain.unmatched import why_it_fails
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


POLICY = PolicyFacts(
    name="stick",
    uid="p",
    generation=1,
    status={"conditions": [{"type": "Applied", "status": "Unknown", "reason": "NoNodes"}]},
)
OUTCOME = PolicyReport(name="stick", uid="p", observed_generation=1, matched=0, published=0)
DISK = "/dev/sda: it is a disk, and hostdev publishes no disk"
CONNECT = (
    "no node has a device that HostDevicePolicy stick matches: connect the device, and the pod "
    "starts, or check the matchers of the policy"
)


@pytest.mark.parametrize(
    ("policy", "outcomes", "why"),
    [
        pytest.param(replace(POLICY, status={}), [OUTCOME], CONNECT, id="nothing-is-connected"),
        pytest.param(replace(POLICY, status={}), [], CONNECT, id="an-outcome-is-omitted"),
        pytest.param(
            POLICY, [], "nodeSelector of HostDevicePolicy stick selects no ready node", id="no-node"
        ),
        pytest.param(
            POLICY,
            [replace(OUTCOME, matched=1, rejected=1, rejected_example=DISK)],
            f"HostDevicePolicy stick publishes no device: {DISK}",
            id="its-device-is-rejected",
        ),
        pytest.param(
            POLICY,
            [replace(OUTCOME, matched=1, published=1)],
            'no device has the value "stick" of hostdev.drakit.dev/policy: they have "kvm"',
            id="it-publishes-a-device",
        ),
    ],
)
def test_a_class_without_devices_is_explained_by_its_policy(policy, outcomes, why):
    mine = 'device.attributes["hostdev.drakit.dev"].policy == "stick"'
    kvm = replace(slice_on("n1", device("kvm", attributes={"policy": "kvm"})), driver=HOSTDEV)
    report = ReportFacts(
        name=f"n1.{HOSTDEV}", uid="r", node="n1", driver=HOSTDEV, policies=tuple(outcomes)
    )
    of_policy = replace(ANY, selectors=(mine,), owner="p")
    world = world_of(of_policy, node("n1"), kvm, claim(request()), policy, report)
    (reason,) = explain(POD, world).reasons
    assert reason.text.endswith(f"; {why}")
