"""The pages about host devices name attributes, reasons and devices as the code has them."""

from __future__ import annotations

import re
from typing import get_args, get_type_hints

import pytest
import yaml

from drakit_drivers.hostdev.dangerous import danger_of_descriptors
from drakit_drivers.hostdev.policy_devices import Doubt
from drakit_formats.resource.objects import RULE_VERSIONS
from tests.fakes.usb_descriptors import configuration, device, interface
from tests.unit.cli.test_host_devices import node
from tests.unit.docs.listings import ROOT, listing, listings

__all__ = ("node",)

TASK = (ROOT / "docs/admin/host-devices.md").read_text()
REFERENCE = (ROOT / "docs/reference/host-device-policy.md").read_text()


def section(page: str, title: str) -> str:
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_attributes_in_the_recipes_exist():
    reference = (ROOT / "docs/reference/attributes.md").read_text()
    published = set(re.findall(r"^  (\w+): ", reference.partition("## simulated")[0], re.M))
    pages = [
        (ROOT / f"docs/use/{name}.md").read_text() for name in ("cel-recipes", "device-recipes")
    ]
    pages += [path.read_text() for path in (ROOT / "examples/hostdev").glob("*-pod.yaml")]
    named = re.findall(r'attributes\["hostdev.drakit.dev"\]\.\??(\w+)', "".join(pages))
    assert named
    assert set(named) <= published


def test_the_recipes_show_the_policies_of_the_examples():
    page = (ROOT / "docs/use/device-recipes.md").read_text()
    shown = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.S)]
    files = re.findall(r"kubectl apply -f (\S+\.yaml)", page)
    assert shown == [yaml.safe_load((ROOT / file).read_text()) for file in files]
    assert shown


def test_the_recipes_show_the_pods_of_the_examples():
    page = (ROOT / "docs/use/device-recipes.md").read_text()
    shown = re.findall(r'```yaml title="([^"]+)"\n(.*?)```', page, re.S)
    assert shown
    for file, text in shown:
        example = (ROOT / "examples/hostdev" / file).read_text()
        assert list(yaml.safe_load_all(text)) == list(yaml.safe_load_all(example))


def test_the_page_names_the_usb_classes_that_are_dangerous():
    text = section(REFERENCE, "Dangerous devices")
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
    for message in quoted(section(TASK, "Troubleshooting"), r"\| log: `([^`]+)`"):
        assert f'"{message}"' in code("driver")


def test_the_driver_returns_the_reasons_of_the_page_on_block_devices():
    listed = section(REFERENCE, "Devices that are not published")
    table = listed.partition("| Reason for a block device")[2]
    firsts = "\n".join(
        line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")
    )
    reasons = quoted(firsts, r"`([^`]+)`")
    for fragment in (part.strip() for reason in reasons for part in reason.split("...")):
        # "it is" is put before a variable: "it is {use}".
        assert re.sub(r"^it is ", "", fragment) in code("block_usage", "host")


def test_the_page_lists_the_reasons_that_the_driver_uses():
    listed = section(REFERENCE, "Devices that are not published")
    table = listed.partition("| Reason for a block device")[0]
    used = re.findall(r'(?:Refusal\(|reason=)\s*"(\w+)"', code("policy_devices", "host", "driver"))
    assert set(quoted(table, r"^\| `(\w+)`")) == set(used)


def test_the_page_names_the_taints_of_the_driver():
    kinds = get_args(get_type_hints(Doubt)["kind"])
    assert set(quoted(REFERENCE, r"`hostdev\.drakit\.dev/(\w+)`")) == set(kinds)


REASONS = re.findall(r"^\| `(?:Accepted|Applied|Conflicting)` \| `\w+` \| `(\w+)`", REFERENCE, re.M)


@pytest.mark.parametrize("reason", sorted(set(REASONS)))
def test_the_operator_sets_the_reasons_of_the_conditions(reason):
    source = (ROOT / "operator/drakit_operator/policies/status.py").read_text()
    assert f'"{reason}"' in source


def test_the_versions_of_device_taint_rules_are_those_that_drakit_reads():
    page = (ROOT / "docs/admin/maintenance.md").read_text()
    versions = quoted(page, r"^\| 1\.\d+ \| `resource\.k8s\.io/(\w+)`")
    assert set(versions) == set(RULE_VERSIONS)


TUTORIAL = "docs/start/serial-adapter.md"


def test_the_tutorial_shows_what_the_commands_print_about_a_recorded_adapter(node):
    policy = yaml.safe_load(listing(TUTORIAL, "serial.yaml"))
    printed = [node.run("devices", "--subsystem", "tty")[1]]
    printed.append(node.run("devices", "--policy", "/dev/ttyUSB0")[1])
    suggested = yaml.safe_load(printed[-1])["spec"]["match"]
    assert policy["spec"]["match"] == suggested
    node.store(**{policy["metadata"]["name"]: policy["spec"]})
    printed.append(node.run("devices", "--subsystem", "tty")[1])
    shown = ["\n".join(text.split()) for text in listings(TUTORIAL, "text")]
    assert [text for text in printed if "\n".join(text.split()) not in shown] == []


def test_the_pod_of_the_tutorial_uses_the_policy():
    policy = yaml.safe_load(listing(TUTORIAL, "serial.yaml"))
    template, deployment = yaml.safe_load_all(listing(TUTORIAL, "reader.yaml"))
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == f"{policy['metadata']['name']}.drakit.dev"
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["supplementalGroups"] == [policy["spec"]["container"]["gid"]]
    (script,) = [each["command"][-1] for each in pod["containers"]]
    assert set(re.findall(r"HOSTDEV_\w+", script)) == {f"HOSTDEV_{request['name'].upper()}"}
