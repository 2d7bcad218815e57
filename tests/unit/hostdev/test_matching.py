"""The devices that a matcher matches."""

from __future__ import annotations

import pytest

from drakit_drivers.hostdev import HostDevicePolicySpec
from drakit_drivers.hostdev.matching import is_matched
from tests.fakes.recordings import plug


@pytest.mark.parametrize(
    ("matcher", "matched"),
    [
        pytest.param({"paths": ["/dev/ttyUSB*"]}, True, id="path"),
        pytest.param({"paths": ["/dev/serial/by-id/usb-FTDI_*"]}, True, id="link"),
        pytest.param({"paths": ["/dev/ttyACM*", "/dev/ttyUSB0"]}, True, id="one-path-of-two"),
        pytest.param({"paths": ["/dev/ttyACM*"]}, False, id="other-path"),
        pytest.param({"usb": {"vendorID": "0403"}}, True, id="vendor"),
        pytest.param({"usb": {"vendorID": "0403", "productID": "6010"}}, False, id="product"),
        pytest.param({"usb": {"serial": "A50285BI"}}, True, id="serial"),
        pytest.param({"usb": {"serial": "A50285"}}, False, id="part-of-a-serial"),
        pytest.param({"usb": {"port": "1-3"}}, True, id="port"),
        pytest.param({"usb": {"port": "1-3.1"}}, False, id="other-port"),
        pytest.param({"pci": {"classID": "0c03"}}, True, id="class-of-the-controller"),
        pytest.param({"pci": {"vendorID": "8086", "deviceID": "ffff"}}, False, id="other-function"),
        pytest.param({"driver": "ftdi_sio"}, True, id="driver"),
        pytest.param({"driver": "ftdi"}, False, id="part-of-a-driver"),
        pytest.param({"udevProperties": {"ID_MODEL": "FT232*"}}, True, id="property"),
        pytest.param(
            {"udevProperties": {"ID_MODEL": "FT232*", "ID_BUS": "pci"}}, False, id="one-of-two"
        ),
        pytest.param({"udevProperties": {"NO_SUCH": "*"}}, False, id="property-that-is-missing"),
        pytest.param({"parent": {"subsystem": "pci", "driver": "xhci_hcd"}}, True, id="parent"),
        pytest.param({"parent": {"name": "1-3:*"}}, True, id="name-of-a-parent"),
        pytest.param(
            {"parent": {"subsystem": "pci", "driver": "ftdi_sio"}}, False, id="of-two-parents"
        ),
        pytest.param(
            {"usb": {"vendorID": "0403"}, "paths": ["/dev/ttyS*"]}, False, id="all-must-match"
        ),
        pytest.param({"subsystem": "misc", "usb": {"vendorID": "0403"}}, False, id="subsystem"),
    ],
)
def test_a_matcher_matches_completely(host, matcher, matched):
    plug(host, "ftdi")
    spec = HostDevicePolicySpec.model_validate({"match": [{"subsystem": "tty"} | matcher]})
    assert is_matched(spec.match, host.find("tty")["ttyUSB0"]) is matched


def test_one_of_several_matchers_is_enough(host):
    plug(host, "ftdi")
    match = [{"subsystem": "tty", "usb": {"vendorID": each}} for each in ("1a86", "0403")]
    spec = HostDevicePolicySpec.model_validate({"match": match})
    assert is_matched(spec.match, host.find("tty")["ttyUSB0"])
