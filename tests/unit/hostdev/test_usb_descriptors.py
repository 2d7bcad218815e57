"""Descriptors decide whether a USB device is dangerous: all configurations, all settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drakit_drivers.hostdev.dangerous import MAX_DESCRIPTOR_BYTES, danger_of_descriptors
from tests.fakes.usb_descriptors import (
    DANGEROUS,
    FTDI,
    HARMLESS,
    KEYBOARD,
    configuration,
    device,
    hid,
    interface,
)

MALFORMED = "has malformed USB descriptors"
FILLER = bytes((255, 0x24)) + bytes(253)


def inside(junk: bytes) -> bytes:
    """A device with these bytes after its harmless interface."""
    return device(configuration(interface(0, 0xFF), junk))


def test_a_class_of_the_device_counts_as_one_of_an_interface():
    made = device(configuration(interface(0, 0xFF)), kind=(0xE0, 1, 1))
    assert "class e0" in (danger_of_descriptors(made) or "")


@pytest.mark.parametrize("protocol", [0, 3, 255])
def test_another_protocol_of_the_boot_subclass_is_harmless(protocol):
    assert danger_of_descriptors(device(configuration(hid(0, 1, protocol)))) is None


@pytest.mark.parametrize("name", [*HARMLESS, *DANGEROUS])
def test_a_file_that_is_cut_off_at_any_byte_is_never_harmless(name):
    descriptors = HARMLESS.get(name) or DANGEROUS[name][0]
    for end in range(len(descriptors)):
        assert danger_of_descriptors(descriptors[:end]) == MALFORMED


@pytest.mark.parametrize(
    "descriptors",
    [
        pytest.param(b"", id="empty"),
        pytest.param(FTDI[18:], id="without-the-device-descriptor"),
        pytest.param(FTDI + FTDI, id="two-devices"),
        pytest.param(KEYBOARD + b"\x00\x00", id="damage-after-a-dangerous-interface"),
        pytest.param(FTDI[:18], id="without-a-configuration"),
        pytest.param(device(count=0), id="no-configuration-announced"),
        pytest.param(device(FTDI[18:], count=2), id="configuration-missing"),
        pytest.param(device(FTDI[18:], FTDI[18:], count=1), id="configuration-too-many"),
        pytest.param(FTDI + b"\x02\x24", id="longer-than-its-configuration"),
        pytest.param(FTDI[:20] + b"\x09" + FTDI[21:], id="shorter-than-its-interface"),
        pytest.param(inside(b"\x00"), id="one-excess-byte"),
        pytest.param(inside(b"\x00\x05"), id="length-zero"),
        pytest.param(inside(b"\x01\x05"), id="length-one"),
        pytest.param(inside(b"\x00\x00" * 1000), id="zeros-without-end"),
        pytest.param(inside(b"\x09\x04\x00"), id="longer-than-the-rest"),
        pytest.param(inside(b"\x05\x04\x00\x00\x00"), id="interface-that-is-too-short"),
        pytest.param(inside(b"\x02\x24" * 10_000), id="more-descriptors-than-any-device-has"),
        pytest.param(b"\x11" + FTDI[1:17] + FTDI[18:], id="device-that-is-too-short"),
    ],
)
def test_malformed_descriptors_are_dangerous(descriptors):
    assert danger_of_descriptors(descriptors) == MALFORMED


def test_the_kernel_s_maximum_is_read_and_no_byte_more():
    full = [
        configuration(*[FILLER] * 256, bytes((246, 0x24)) + bytes(244), value=n) for n in range(8)
    ]
    assert {len(each) for each in full} == {65_535}
    assert len(device(*full)) == MAX_DESCRIPTOR_BYTES
    assert danger_of_descriptors(device(*full)) is None
    assert danger_of_descriptors(device(*full, FTDI[18:])) == MALFORMED


@given(before=st.lists(st.binary(max_size=64)), after=st.lists(st.binary(max_size=64)))
def test_no_descriptor_of_another_type_hides_an_interface(before, after):
    def others(bodies):
        return b"".join(bytes((2 + len(body), 0x24)) + body for body in bodies)

    storage = interface(0, 8, 6, 0x50)
    made = device(configuration(others(before), storage, others(after)))
    assert "class 08" in (danger_of_descriptors(made) or "")
