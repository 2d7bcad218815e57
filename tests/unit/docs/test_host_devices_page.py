"""docs/admin/host-devices.md names attributes, keys and refused devices as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

from drakit_drivers.hostdev import HostDevicePolicySpec
from drakit_drivers.hostdev.dangerous import DANGEROUS_NODES
from drakit_drivers.hostdev.matchers import Matcher
from drakit_drivers.hostdev.selection import select
from drakit_drivers.hostdev.sysfs import HostDevice, UsbParent
from drakit_drivers.hostdev.usb_descriptors import danger_of_descriptors
from tests.fakes.sysfs import as_policies, policy
from tests.fakes.usb_descriptors import configuration, device, interface
from tests.unit.docs.listings import ROOT

TEXT = (ROOT / "docs/admin/host-devices.md").read_text()
ADAPTER = HostDevice(
    subsystem="tty",
    kernel_name="ttyUSB0",
    path="/dev/ttyUSB0",
    type="c",
    major=188,
    minor=0,
    directory=Path("/sys/devices/ttyUSB0"),
    links=(
        "/dev/serial/by-id/usb-Silicon_Labs_CP2102N_0001-if00-port0",
        "/dev/serial/by-path/pci-0000:00:14.0-usb-0:2.3:1.0-port0",
    ),
    serial="0001",
    driver="cp210x",
    numa_node=0,
    usb=UsbParent(
        vendor_id="10c4",
        product_id="ea60",
        port="1-2.3",
        manufacturer="Silicon Labs",
        product="CP2102N",
        serial="0001",
        interface=0,
    ),
)


def section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The rows of a table without head, rule and sub-headings."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row] for row in cells]


def test_the_attributes_of_the_page_exist():
    reference = (ROOT / "docs/reference/attributes.md").read_text()
    published = {row[0] for row in rows(reference.partition("## simulated")[0])}
    table = section("Select devices by attributes")
    named = {
        name
        for line in table.splitlines()
        if line.startswith("| ")
        for name in re.findall(r"`([^`]+)`", line)
    }
    assert named
    assert named <= published


def test_the_page_lists_all_keys_of_a_policy_and_of_a_matcher():
    text = section("Write a policy")
    of_policy, _, of_matcher = text.partition("### Match devices")
    shown = {row[0]: row[1] for row in rows(of_policy)}
    fields = {
        field.alias or name: field for name, field in HostDevicePolicySpec.model_fields.items()
    }
    assert set(shown) == {"enabled", *fields}
    for name, field in fields.items():
        assert (shown[name] == "required") == field.is_required()
        if isinstance(field.default, str):
            assert shown[name] == field.default
    matcher = {field.alias or name for name, field in Matcher.model_fields.items()}
    table = of_matcher.partition("Use narrow matchers")[0]
    assert {row[0] for row in rows(table)} == matcher


def test_each_example_of_the_page_exists():
    names = re.findall(r"examples/hostdev/([a-z-]+\.yaml)", TEXT)
    assert names
    assert all((ROOT / "examples/hostdev" / name).exists() for name in names)


def test_the_name_of_the_adapter_is_that_of_the_page():
    policies = as_policies({"serial": policy("tty", "/dev/ttyUSB*")})
    (name,) = select(policies, [ADAPTER], refuse=lambda policy, host: None).devices
    assert f"`{name}`" in TEXT


def test_the_page_lists_the_dangerous_device_nodes_with_their_reasons():
    table = section("Dangerous devices").partition("For other devices")[0]
    listed = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:3] == "| `"]
    found = [(tuple(re.findall(r"`([^`]+)`", globs)), danger) for globs, danger in listed]
    assert found == list(DANGEROUS_NODES.items())


def test_the_page_names_the_usb_classes_that_are_dangerous():
    text = section("Dangerous devices")
    for kind in range(256):
        made = device(configuration(interface(0, kind)))
        is_listed = f" {kind:02x} (" in text or kind == 9  # hubs
        assert bool(danger_of_descriptors(made)) is is_listed, f"{kind:02x}"


def code(*modules: str) -> str:
    """The text of modules of the driver, with the parts of a string put together."""
    folder = ROOT / "nodeplugin/drakit_drivers/hostdev"
    text = " ".join((folder / f"{module}.py").read_text() for module in modules)
    return re.sub(r'"\s+f?"', "", text)


def quoted(table: str, pattern: str) -> list[str]:
    found = [name for line in table.splitlines() for name in re.findall(pattern, line)]
    assert found
    return found


def test_the_node_plugin_logs_the_messages_of_the_page():
    for message in quoted(section("Verify and troubleshoot"), r"\| log: `([^`]+)`"):
        assert f'"{message}"' in code("reports")


def test_the_driver_returns_the_reasons_of_the_page_on_block_devices():
    page = (ROOT / "docs/admin/disks.md").read_text()
    table = page.partition("## Find out why a block device is missing")[2].partition("\n## ")[0]
    firsts = "\n".join(
        line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")
    )
    reasons = quoted(firsts, r"`([^`]+)`")
    for fragment in (part.strip() for reason in reasons for part in reason.split("...")):
        # "it is" is put before a variable: "it is {use}".
        assert re.sub(r"^it is ", "", fragment) in code("block_devices", "host")
