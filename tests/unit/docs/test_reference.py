"""The generated pages have what the code declares, and all of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from drakit_drivers.hostdev.policy import OWN_ATTRIBUTES
from drakit_explain.codes import Code
from drakit_nodeplugin.reasons import ClaimReason, NodeReason
from tests.unit.docs.listings import ROOT
from tools.reference import __main__ as reference
from tools.reference import attributes, cli, configuration, markdown, metrics, values

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


def test_the_page_of_commands_has_short_options():
    page = cli.page()
    for option in ("-n, --namespace", "-o, --output", "-A, --all-namespaces"):
        assert f"| `{option}" in page


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


def test_every_label_of_a_metric_is_described():
    page = metrics.page()
    assert "`drakit_claim_errors_total` | counter" in page
    assert "`operation`: `prepare`, `unprepare`" in page


def test_an_attribute_without_a_text_is_an_error(monkeypatch):
    monkeypatch.delitem(attributes.HOSTDEV, "serial")
    with pytest.raises(SystemExit, match="serial"):
        attributes.page()


def test_a_text_of_no_attribute_is_an_error(monkeypatch):
    monkeypatch.setitem(attributes.SIMULATED, "colour", "The colour.")
    with pytest.raises(SystemExit, match="colour"):
        attributes.page()


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


def test_a_setting_is_described_on_one_page_only():
    page = configuration.page()
    assert "### devices" not in page
    assert "[`nodeplugin.devices`](values.md#nodeplugin)" in page
    assert page.count("| `intelRdt` |") == 1  # backends and device plugins have the same fields


@pytest.mark.parametrize("name", reference.PAGES)
def test_no_row_of_a_table_lacks_its_meaning(name):
    page = reference.PAGES[name]()
    assert "| Meaning" in page
    assert not re.findall(r"^\|.*\|  \|$", page, re.MULTILINE)


def test_the_committed_pages_are_compared_with_the_generated_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    (tmp_path / "cli.md").write_text("# Commands\n")
    assert reference.differences("cli.md", "# Commands\n") == []
    assert "+New.\n" in reference.differences("cli.md", "# Commands\nNew.\n")
    assert reference.differences("gone.md", "# Page\n")


def test_the_comment_above_a_value_is_its_meaning(tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text(
        "# Of another key.\n\nouter:\n  # How many.\n  # An example:\n  #   two: 2\n  inner: {}\n"
    )
    schema = {"properties": {"outer": {"properties": {"inner": {"type": "object"}}}}}
    outer, inner = values.read(file, schema)
    assert (outer.path, outer.comment, outer.is_group) == ("outer", "", True)
    assert (inner.path, inner.comment) == ("outer.inner", "How many. An example:")
    assert (inner.default, inner.example) == ({}, "two: 2")


def test_a_docstring_becomes_markdown():
    text = "Use :meth:`.Kit.start` or ``x``::\n\n    a = 1\n\n:raises ValueError: it is\n  not."
    assert markdown.docstring(text) == (
        "Use `Kit.start` or `x`:\n\n```python\na = 1\n```\n\n- Raises `ValueError`: it is not."
    )


def test_a_list_in_a_docstring_stays_a_list():
    text = "Words:\n\n* ``One``: the\n  first.\n* ``Two``: the second.\n\nThe end."
    assert markdown.docstring(text) == (
        "Words:\n\n- `One`: the first.\n- `Two`: the second.\n\nThe end."
    )


def test_a_path_of_a_page_becomes_a_link():
    assert markdown.links("see docs/admin/install.md") == (
        "see [Install drakit](../admin/install.md)"
    )
    assert markdown.links("(docs/reference/cdi.md#names)") == ("([CDI files](cdi.md#names))")


def stubs(page: str) -> dict[str, ast.ClassDef]:
    """The classes of a page, as their stubs declare them."""
    found = re.findall(r"^```python\n(class .*?)^```", page, re.M | re.S)
    return {
        node.name: node for text in found if isinstance(node := parsed(text).body[0], ast.ClassDef)
    }


def test_a_class_is_shown_as_a_stub_with_the_constructor_that_it_has():
    shown = {
        name: {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        for page in ("python-api.md", "python-testing.md")
        for name, node in stubs(reference.PAGES[page]()).items()
    }
    assert shown["Driver"] == {"__init__"}
    assert shown["FakeKubelet"] == {"__init__"}
    # A protocol has none; that of a dataclass are its fields, and the kit is made by `open_kit`.
    assert shown["Node"] == shown["Device"] == shown["Kit"] == set()


def test_a_name_is_never_shown_as_a_function_that_it_is_not():
    for page in ("python-api.md", "python-testing.md"):
        assert not re.findall(r"^(?:async )?def [A-Z]", reference.PAGES[page](), re.M)


def test_the_messages_of_the_backend_api_are_those_of_the_contract():
    """Each declaration of the page is in the contract as it is shown there, except for comments."""
    contract = (ROOT / "proto/drakit_proto/backend/v1/backend.proto").read_text()
    plain = re.sub(r"\s+", " ", re.sub(r"^ *//.*\n", "", contract, flags=re.M))
    shown = re.findall(r"^```proto\n(.*?)^```", reference.PAGES["backend-api.md"](), re.M | re.S)
    assert len(shown) == len(re.findall(r"^message ", contract, re.M))
    for text in shown:
        assert re.sub(r"\s+", " ", text).strip() in plain, text
