"""The generated pages have what the code declares, and all of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml

from drakit_drivers.hostdev.policy import OWN_ATTRIBUTES, HostDevicePolicySpec
from drakit_explain.codes import Code
from drakit_nodeplugin.reasons import ClaimReason, NodeReason
from tests.unit.docs.listings import ROOT, listing
from tools.reference import __main__ as reference
from tools.reference import attributes, configuration, values

NODE_PLUGIN = ROOT / "nodeplugin" / "drakit_nodeplugin"
WRITERS = {"Bar", "Diagnostic", "RefusedError", "emit", "record", "report"}
"""Functions and classes whose `reason`, or first argument, is the reason of an Event."""


def parsed(source: str) -> ast.Module:
    """Parse a module; CPython 3.11 may fail once after another thread recursed (gh-106905)."""
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def written() -> Iterator[tuple[Path, str]]:
    """Find the reasons that the node plugin's code gives to a writer of Events."""
    for path in sorted(NODE_PLUGIN.rglob("*.py")):
        for node in ast.walk(parsed(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name not in WRITERS:
                continue
            given = [each.value for each in node.keywords if each.arg == "reason"]
            for value in given or node.args[:1]:
                match value:
                    case ast.Constant(value=str(text)) if re.fullmatch(r"([A-Z][a-z]+)+", text):
                        yield path, text
                    case _:
                        pass


def test_every_reason_that_is_written_is_in_the_closed_set():
    found = {reason for _, reason in written()}
    assert len(found) >= 10
    assert found <= {*get_args(NodeReason), *get_args(ClaimReason)}


def test_every_reason_of_the_closed_set_is_written():
    source = "".join(path.read_text() for path in NODE_PLUGIN.rglob("*.py"))
    for reason in (*get_args(NodeReason), *get_args(ClaimReason)):
        # Once in the set itself.
        assert source.count(f'"{reason}"') >= 2, reason


@pytest.mark.parametrize(
    ("headings", "reasons"),
    [
        (("Events about pods, claims and templates", "Events about pools"), list(map(str, Code))),
        (("Events about preparing claims",), get_args(ClaimReason)),
        (("Events about the Node",), get_args(NodeReason)),
    ],
)
def test_every_reason_has_a_text(headings, reasons):
    page = (ROOT / "docs/reference/events.md").read_text()
    sections = dict(text.split("\n", 1) for text in page.split("\n## ")[1:])
    rows = "".join(sections[heading] for heading in headings)
    assert sorted(re.findall(r"^\| `(\w+)` \|", rows, re.M)) == sorted(reasons)
    assert not re.findall(r"\| +\|", rows)


def test_the_table_of_symptoms_names_each_reason_that_has_a_section():
    page = (ROOT / "docs/use/troubleshooting.md").read_text()
    table, _, sections = page.partition("## Before you begin")
    listed = {*re.findall(r"`(\w+)`", table)}
    known = {*map(str, Code), *get_args(ClaimReason)}
    shown = {reason for reason in known if re.search(rf"\bWarning +{reason} ", sections)}
    assert shown, "the sections show Events"
    assert shown <= listed
    assert {each for each in listed if each in known} == listed - {
        *("FailedResourceClaimCreation", "FailedScheduling", "FailedPrepareDynamicResources"),
        *("ContainerCreating", "CreateContainerError", "Running", "Terminating"),
        "DeviceTaintManagerEviction",
    }


def test_no_policy_can_use_the_name_of_an_attribute_of_the_page():
    assert attributes.HOSTDEV.keys() == OWN_ATTRIBUTES


@pytest.mark.parametrize(
    ("title", "key", "value"),
    [
        (title, key, value)
        for title, file in configuration.FILES.items()
        for key, value in file.values.items()
    ],
)
def test_a_key_and_the_value_that_describes_it_have_the_same_default(title, key, value):
    default: Any = yaml.safe_load((values.CHART / "values.yaml").read_text())
    for part in value.split("."):
        default = default[part]
    if isinstance(default, dict):
        # Empty means the default, and only the chart knows DeviceClasses.
        default = {k: v for k, v in default.items() if v != "" and k != "extendedResources"}
    first, _, rest = key.partition(".")
    given = {} if default == "" else {first: {rest: default} if rest else default}
    model = configuration.FILES[title].model
    required = {"drivers": [{"driver": "hostdev"}]} if title == "Node plugin" else {}
    assert first in {field.alias for field in model.model_fields.values()}
    assert model.model_validate(required | given) == model.model_validate(required)


@pytest.mark.parametrize("name", reference.PAGES)
def test_no_row_of_a_table_lacks_its_meaning(name):
    page = reference.PAGES[name]()
    assert "| Meaning" in page or re.search(r"^```(yaml|python|text)$", page, re.MULTILINE)
    assert not re.findall(r"^\|.*\|  \|$", page, re.MULTILINE)


@pytest.mark.parametrize("name", ["configuration.md", "host-device-policy.md"])
def test_each_field_of_a_page_has_its_meaning_above_it(name):
    page = reference.PAGES[name]().partition("\n## Matching")[0]
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    fields = 0
    for lines in (block.splitlines() for block in blocks):
        for above, line in pairwise(["", *lines]):
            if re.match(r"\s*\w+:", line):
                fields += 1
                assert above.lstrip().startswith("#"), line
    assert fields > 40


def test_the_page_of_values_shows_all_of_the_file():
    page = (ROOT / "docs/reference/values.md").read_text()
    shown: dict[str, Any] = {}
    for block in re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        shown |= yaml.safe_load(block)
    assert shown == yaml.safe_load((values.CHART / "values.yaml").read_text())


# ------------------------------------------------------------ complete objects


def fields(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the fields of a schema by their paths."""
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from fields(inner, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")


def given(body: Any, path: str = "") -> Iterator[str]:
    """Yield the fields that an object has."""
    if isinstance(body, dict):
        for name, inner in body.items():
            yield f"{path}.{name}"
            yield from given(inner, f"{path}.{name}")
    elif isinstance(body, list):
        for each in body:
            yield from given(each, f"{path}[]")


@pytest.mark.parametrize(
    ("page", "title", "definition"),
    [
        ("slices", "report.yaml", "nodedevicereports"),
        ("host-device-policy", "policy.yaml", "hostdevicepolicies"),
    ],
)
def test_the_complete_object_of_a_page_is_valid_and_has_every_field(page, title, definition):
    body = yaml.safe_load(listing(f"docs/reference/{page}.md", title))
    crd = yaml.safe_load((ROOT / f"charts/drakit/crds/{definition}.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    jsonschema.validate(body, schema)
    parts = {name: schema["properties"][name] for name in ("spec", "status")}
    missing = set(fields({"properties": parts})) - set(given(body))
    assert missing <= {".status.kopf"}, "only the operator's own state is left out"


def test_the_complete_policy_is_valid():
    spec = yaml.safe_load(listing("docs/reference/host-device-policy.md", "policy.yaml"))["spec"]
    assert HostDevicePolicySpec.model_validate(spec)
