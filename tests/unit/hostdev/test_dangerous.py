"""Devices that let a container take over the node are refused, however a policy names them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from drakit_drivers.hostdev import HostDevicePolicySpec, HostDevices
from drakit_drivers.hostdev.dangerous import is_dangerous, matches_everything
from tests.fakes.node import StaticNode
from tests.fakes.sysfs import FakeHost
from tests.fakes.sysfs import policy as spec

DANGEROUS = (
    "mem", "kmem", "port", "kmsg", "watchdog", "watchdog0", "uinput", "snapshot", "mtd0", "mtd0ro",
    "mtdblock1", "ipmi0", "ipmi/0", "ipmidev/0", "cpu/0/msr", "cpu/11/msr", "mapper/control",
    "console", "tty0", "tty1", "tty63", "vcs", "vcsa1",
)  # fmt: skip
HARMLESS = (
    "kvm", "fuse", "net/tun", "null", "zero", "urandom", "tty", "ttyS0", "ttyUSB0", "ttyACM1",
    "video0", "dri/renderD128", "mapper/vg-lv", "sda", "zram0", "input/event0", "memory",
    "vhost-net",
)  # fmt: skip


def policy(path: str, *, dangerous: bool = False) -> HostDevicePolicySpec:
    fields = spec("mem", "/dev/fine", path, allow={"dangerous": dangerous})
    return HostDevicePolicySpec.model_validate(fields)


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_dangerous_device_needs_allow_dangerous(name):
    with pytest.raises(ValidationError, match=f"/dev/{name} .*set allow.dangerous: true"):
        policy(f"/dev/{name}")
    assert policy(f"/dev/{name}", dangerous=True)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_device_that_is_not_on_the_list_needs_no_permission(name):
    assert not is_dangerous(f"/dev/{name}")
    assert policy(f"/dev/{name}")


@pytest.mark.parametrize("glob", ["watchdog*", "watchdog?", "mtd[0-9]", "cpu/*/msr", "ipmi*"])
def test_a_glob_that_matches_only_dangerous_devices_is_refused(glob):
    with pytest.raises(ValidationError, match=r"set allow\.dangerous: true"):
        policy(f"/dev/{glob}")


@pytest.mark.parametrize(
    ("glob", "everything"),
    [
        ("*", True),
        ("?*", True),
        ("*?", True),
        ("[!x]*", True),
        ("*/*", True),
        ("m*", False),
        ("*0", False),
        ("*/tun", False),
        ("disk/by-id/*", False),
        ("tty[!S]*", False),
    ],
)
def test_a_glob_that_matches_everything_needs_allow_dangerous(glob, everything):
    assert matches_everything(f"/dev/{glob}") is everything
    if everything:
        with pytest.raises(ValidationError, match="matches every device"):
            policy(f"/dev/{glob}")
    assert policy(f"/dev/{glob}", dangerous=True)


@pytest.fixture
def machine(host: FakeHost) -> FakeHost:
    host.device("virtual/mem/mem", "1:1", subsystem="mem", node=True)
    host.device("virtual/mem/zero", "1:5", subsystem="mem", node=True)
    host.device("virtual/tty/console", "5:1", subsystem="tty", node=True, active="tty0 ttyS0")
    host.device("virtual/tty/tty7", "4:7", subsystem="tty", node=True)
    host.device("platform/serial/tty/ttyS0", "4:64", subsystem="tty", node=True)
    host.device("platform/serial/tty/ttyS1", "4:65", subsystem="tty", node=True)
    return host


async def names(host: FakeHost, *, dangerous: bool = False) -> set[str]:
    allow = {"dangerous": dangerous}
    policies = {
        "mem": spec("mem", "/dev/m*", "/dev/z*", "/dev/alias", allow=allow),
        "tty": spec("tty", "/dev/tty*", "/dev/c*", allow=allow),
    }
    stream = HostDevices(host.config(policies), StaticNode(name="node-1")).devices()
    found = {device.name for device in (await anext(stream)).devices}
    await stream.aclose()
    return found


async def test_a_glob_does_not_publish_dangerous_devices_among_others(machine, caplog):
    """The serial port that the kernel uses as its console is as dangerous as /dev/console."""
    caplog.set_level("INFO")
    assert await names(machine) == {"mem-zero", "tty-ttys1"}
    refused = {record.path: record.reason for record in caplog.records if hasattr(record, "reason")}
    assert set(refused) == {"/dev/mem", "/dev/console", "/dev/tty7", "/dev/ttyS0"}
    assert all("allow.dangerous is not set" in reason for reason in refused.values())


async def test_a_link_does_not_hide_a_dangerous_device(machine):
    machine.udev_entry("c1:1", "S:alias")
    assert "mem-mem" not in await names(machine)


async def test_allow_dangerous_publishes_them(machine):
    assert await names(machine, dangerous=True) == {
        *("mem-mem", "mem-zero"),
        *("tty-console", "tty-tty7", "tty-ttys0", "tty-ttys1"),
    }
