"""Devices that let a container take over the node are refused, however a policy names them."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from drakit import Inventory
from drakit_drivers.hostdev import HostDevicePolicySpec, HostDevices
from drakit_drivers.hostdev.dangerous import DANGEROUS_NODES, danger_of_path, matches_everything
from drakit_drivers.hostdev.matching import matches
from tests.fakes.hostdev import inventory
from tests.fakes.node import StaticNode
from tests.fakes.sysfs import FakeHost
from tests.fakes.sysfs import policy as spec

DANGEROUS = (
    "mem", "kmem", "port", "kmsg", "watchdog", "watchdog0", "uinput", "snapshot", "mtd0", "mtd0ro",
    "mtdblock1", "ipmi0", "ipmi/0", "ipmidev/0", "cpu/0/msr", "cpu/11/msr", "mapper/control",
    "console", "tty0", "tty1", "tty63", "vcs", "vcsa1", "efi_capsule_loader", "cuse", "usbmon0",
    "usbmon12", "tpm0", "tpm10", "vfio/vfio", "vfio/noiommu-0", "uio0", "mei0", "dax1.0",
    "cxl/mem0", "userio", "vduse/control", "loop-control", "rfkill", "nvme-fabrics", "mptctl",
    "mpt3ctl", "xen/privcmd", "hpilo/d0ccb0",
)  # fmt: skip
HARMLESS = (
    "kvm", "fuse", "net/tun", "null", "zero", "urandom", "tty", "ttyS0", "ttyUSB0", "ttyACM1",
    "video0", "dri/renderD128", "mapper/vg-lv", "sda", "zram0", "input/event0", "memory",
    "vhost-net", "tpmrm0", "tpmrm1", "vfio/12", "vfio/devices/vfio0", "hidraw0", "snd/seq",
    "bus/usb/001/002", "i2c-1", "gpiochip0", "ptmx", "dma_heap/system", "infiniband/uverbs0",
)  # fmt: skip


def policy(path: str, *, dangerous: bool = False) -> HostDevicePolicySpec:
    fields = spec("mem", "/dev/fine", path, allow={"dangerous": "Always" if dangerous else "Never"})
    return HostDevicePolicySpec.model_validate(fields)


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_dangerous_device_needs_allow_dangerous(name):
    with pytest.raises(
        ValidationError, match=f"/dev/{name} is dangerous: it .*; .*set allow.dangerous: Always"
    ):
        policy(f"/dev/{name}")
    assert policy(f"/dev/{name}", dangerous=True)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_device_that_is_not_on_the_list_needs_no_permission(name):
    assert danger_of_path(f"/dev/{name}") is None
    assert policy(f"/dev/{name}")


def test_each_row_has_its_own_reason_and_no_glob_is_in_two_rows():
    globs = [glob for row in DANGEROUS_NODES for glob in row]
    assert len(set(globs)) == len(globs)
    assert len(set(DANGEROUS_NODES.values())) == len(DANGEROUS_NODES)


@pytest.mark.parametrize("glob", [glob for row in DANGEROUS_NODES for glob in row])
def test_the_table_has_globs_as_in_policies(glob):
    paths = [f"/dev/{glob}", *(f"/dev/{name}" for name in (*DANGEROUS, *HARMLESS))]
    paths += [re.sub(r"\[(.)[^]]*\]", r"\1", path).replace("*", "7") for path in paths]
    alone = [path for path in paths if matches(f"/dev/{glob}", path)]
    assert alone
    assert all(danger_of_path(path) for path in alone)
    assert re.fullmatch(r"[][a-z0-9/_*-]+", glob)


def test_a_star_of_the_table_stays_within_one_component():
    assert danger_of_path("/dev/watchdog1")
    assert danger_of_path("/dev/watchdog/1") is None


@pytest.mark.parametrize("glob", ["watchdog*", "watchdog?", "mtd[0-9]", "cpu/*/msr", "ipmi*"])
def test_a_glob_that_matches_only_dangerous_devices_is_refused(glob):
    with pytest.raises(ValidationError, match=r"set allow\.dangerous: Always"):
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


async def published(host: FakeHost, *, dangerous: bool = False, allowed: bool = True) -> Inventory:
    """Return the published inventory if the policies and the chart allow dangerous devices, or do
    not."""
    allow = {"dangerous": "Always" if dangerous else "Never"}
    policies = {
        "mem": spec("mem", "/dev/m*", "/dev/z*", "/dev/alias", allow=allow),
        "tty": spec("tty", "/dev/tty*", "/dev/c*", allow=allow),
    }
    config = host.config(policies, allowDangerous=allowed)
    return await inventory(HostDevices(config, StaticNode(name="node-1")))


def names(made: Inventory) -> set[str]:
    return {device.name for device in made.devices}


def reasons(made: Inventory) -> dict[str, str]:
    assert {each.reason for each in made.rejected} <= {"Dangerous"}
    return {each.device: each.message for each in made.rejected}


async def test_a_glob_does_not_publish_dangerous_devices_among_others(machine):
    """The serial port that the kernel uses as its console is as dangerous as /dev/console."""
    made = await published(machine)
    assert names(made) == {"mem-zero", "tty-ttys1"}
    remedy = "to publish it, set allow.dangerous: Always in its policy"
    assert reasons(made) == {
        "/dev/mem": f"it is dangerous: it accesses the node's memory or I/O ports; {remedy}",
        "/dev/console": f"it is dangerous: it is a console of the node; {remedy}",
        "/dev/tty7": f"it is dangerous: it is a console of the node; {remedy}",
        "/dev/ttyS0": f"it is dangerous: it is the kernel's console; {remedy}",
    }


async def test_a_link_does_not_hide_a_dangerous_device(machine):
    machine.udev_entry("c1:1", "S:alias")
    machine.link("alias", "mem")
    assert "mem-mem" not in names(await published(machine))


async def test_allow_dangerous_publishes_them(machine):
    made = await published(machine, dangerous=True)
    assert names(made) == {
        *("mem-mem", "mem-zero"),
        *("tty-console", "tty-tty7", "tty-ttys0", "tty-ttys1"),
    }
    assert reasons(made) == {}


@pytest.mark.parametrize("dangerous", [False, True])
async def test_without_the_chart_s_value_no_policy_can_publish_them(machine, dangerous):
    made = await published(machine, dangerous=dangerous, allowed=False)
    assert names(made) == {"mem-zero", "tty-ttys1"}
    in_policy = "" if dangerous else "allow.dangerous: Always in its policy and "
    remedy = f"; to publish it, set {in_policy}hostdev.allowDangerous: true in the chart's values"
    found = reasons(made)
    assert found.keys() == {"/dev/mem", "/dev/console", "/dev/tty7", "/dev/ttyS0"}
    assert all(reason.endswith(remedy) for reason in found.values())


ANY_MOUNT = {"container": {"mounts": [{"hostPath": "/etc/kubernetes", "containerPath": "/k"}]}}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        pytest.param(
            spec("mem", "/dev/zero", "/dev/mem"),
            "match[0].paths[1]: /dev/mem is dangerous: it accesses the node's memory or I/O ports",
            id="path",
        ),
        pytest.param(
            spec("mem", "/dev/*"),
            "match[0].paths[0]: /dev/* matches every device; name the devices that pods can claim",
            id="any-path",
        ),
        pytest.param(
            {"match": [{"subsystem": "mem"}]},
            "match[0]: matches every device of mem; describe the devices that pods can claim, for "
            "example by paths",
            id="subsystem",
        ),
        pytest.param(
            {**spec("mem", "/dev/zero"), **ANY_MOUNT},
            "container.mounts[0].hostPath: /etc/kubernetes is not under /lib/firmware, "
            "/run/udev/data, /usr/lib/firmware, /usr/share",
            id="mount",
        ),
    ],
)
async def test_without_the_chart_s_value_a_policy_that_needs_it_publishes_nothing(
    machine, fields, problem
):
    """Even harmless devices are not published: without allow.dangerous, the policy would be
    invalid."""
    policies = {
        "bad": {**fields, "allow": {"dangerous": "Always"}},
        "good": spec("tty", "/dev/ttyS1"),
    }
    made: dict[bool, Inventory] = {}
    for allowed in (False, True):
        config = machine.config(policies, allowDangerous=allowed)
        made[allowed] = await inventory(HostDevices(config, StaticNode(name="node-1")))
    assert names(made[False]) == {"good-ttys1"}
    assert names(made[True]) >= {"bad-zero", "good-ttys1"}
    text = (
        f"{problem}; to publish its devices, set hostdev.allowDangerous: true in the chart's values"
    )
    assert {each.message for each in made[False].rejected} == {f"its policy is refused: {text}"}
    problems = {each.policy: each.problem for each in made[False].policies}
    assert problems == {"bad": text, "good": ""}
    assert {each.problem for each in made[True].policies} == {""}
