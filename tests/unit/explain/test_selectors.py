"""Which devices simple CEL means; and that anything else is called unknown."""

import pytest

from drakit.explain import DeviceFacts, DeviceID, SliceFacts, current_devices, match_devices
from drakit.explain.selectors import Test, parse

KVM = DeviceFacts(
    name="kvm-0", attributes={"h.dev/policy": "kvm", "h.dev/minor": 232, "h.dev/ok": True}
)
ODD = DeviceFacts(name="odd", attributes={"h.dev/policy": None})
SLICE = SliceFacts(name="s", uid="1", driver="h.dev", pool="n1", devices=(KVM, ODD))


def names(published):
    return {each.identity.device for each in published}


@pytest.mark.parametrize(
    "expression",
    [
        pytest.param("", id="empty"),
        pytest.param('device.driver != "x"', id="not-equal"),
        pytest.param('device.driver == "x" || device.driver == "y"', id="disjunction"),
        pytest.param('(device.driver == "x")', id="parentheses"),
        pytest.param('device.driver == "x" &&', id="conjunction-without-end"),
        pytest.param('device.driver == "x" & device.driver == "x"', id="single-ampersand"),
        pytest.param('device.driver == "a\\"b"', id="escapes"),
        pytest.param('device.attributes["d"].a > 3', id="comparison"),
        pytest.param('device.attributes["d"].a == 3.5', id="float"),
        pytest.param('device.attributes["d"].a == 3u', id="unsigned"),
        pytest.param('device.attributes["d"].a == 0x10', id="hexadecimal"),
        pytest.param('device.attributes["d"].a == trueish', id="identifier-like-bool"),
        pytest.param(
            'device.capacity["d"].memory.compareTo(quantity("1Gi")) >= 0', id="capacity-quantity"
        ),
        pytest.param('device.driver == "x" ? true : false', id="conditional"),
        pytest.param('device.driver == "x" // done', id="comment"),
    ],
)
def test_what_is_not_simple_is_not_understood(expression):
    assert parse(expression) is None


@pytest.mark.parametrize(
    ("expression", "tests"),
    [
        pytest.param('device.driver == "x"', [("driver", "x")], id="driver"),
        pytest.param("device.driver=='x'", [("driver", "x")], id="single-quotes-no-spaces"),
        pytest.param('device.attributes["a.b"].c == -4', [("a.b/c", -4)], id="negative-integer"),
        pytest.param('device.attributes["a.b"]["c"] == true', [("a.b/c", True)], id="index-form"),
        pytest.param(
            '\n device.driver == "x" &&\n device.attributes["d"].a == false\n',
            [("driver", "x"), ("d/a", False)],
            id="conjunction-over-lines",
        ),
    ],
)
def test_simple_conjunctions_are_understood(expression, tests):
    assert parse(expression) == tuple(Test(*each) for each in tests)


@pytest.mark.parametrize(
    ("expressions", "certain", "possible"),
    [
        pytest.param([], {"kvm-0", "odd"}, set(), id="no-selector-means-all"),
        pytest.param(['device.driver == "h.dev"'], {"kvm-0", "odd"}, set(), id="driver"),
        pytest.param(['device.driver == "other"'], set(), set(), id="other-driver"),
        pytest.param(
            ['device.attributes["h.dev"].policy == "kvm"'], {"kvm-0"}, {"odd"}, id="unknown-type"
        ),
        pytest.param(['device.attributes["h.dev"].minor == 232'], {"kvm-0"}, set(), id="integer"),
        pytest.param(['device.attributes["h.dev"].ok == 1'], set(), set(), id="true-is-not-1"),
        pytest.param(['device.attributes["x"].policy == "kvm"'], set(), set(), id="other-domain"),
        pytest.param(
            ['device.driver == "h.dev"', "f(device)"],
            set(),
            {"kvm-0", "odd"},
            id="one-not-understood-makes-all-unknown",
        ),
        pytest.param(
            ['device.driver == "other"', "f(device)"],
            set(),
            set(),
            id="false-wins-over-not-understood",
        ),
    ],
)
def test_devices_are_sorted_by_what_is_certain(expressions, certain, possible):
    matches = match_devices(current_devices([SLICE]), expressions)
    assert (names(matches.certain), names(matches.possible)) == (certain, possible)


def test_only_the_highest_generation_of_a_pool_counts():
    old = SliceFacts(name="o", uid="2", driver="h.dev", pool="n1", generation=1, devices=(KVM,))
    new = SliceFacts(name="n", uid="3", driver="h.dev", pool="n1", generation=2, devices=(ODD,))
    other = SliceFacts(name="p", uid="4", driver="h.dev", pool="n2", generation=1, devices=(KVM,))
    matches = match_devices(current_devices([old, new, other]), [])
    assert {each.identity for each in matches.certain} == {
        DeviceID("h.dev", "n1", "odd"),
        DeviceID("h.dev", "n2", "kvm-0"),
    }


def test_devices_of_a_pool_that_is_being_rewritten_are_never_certain():
    def part(name, generation, device):
        return SliceFacts(
            name=name,
            uid=name,
            driver="h.dev",
            pool="n1",
            generation=generation,
            pool_slices=2,
            devices=(device,),
        )

    old, new, rest = part("o", 1, KVM), part("n", 2, ODD), part("r", 2, KVM)
    half_written = match_devices(current_devices([old, new]), [])
    assert (names(half_written.certain), names(half_written.possible)) == (set(), {"kvm-0", "odd"})
    written = match_devices(current_devices([old, new, rest]), [])
    assert (names(written.certain), names(written.possible)) == ({"kvm-0", "odd"}, set())


def test_a_slice_that_could_not_be_read_may_hold_any_device():
    device = DeviceFacts(name="", attributes={})
    unread = SliceFacts(name="u", uid="2", driver="", pool="", pool_slices=2, devices=(device,))
    matches = match_devices(current_devices([unread]), ['device.driver == "h.dev"'])
    assert (len(matches.certain), len(matches.possible)) == (0, 1)
