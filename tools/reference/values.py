"""
The page of the chart's values: keys, defaults and comments of values.yaml, types of its schema.

A comment stands directly above its key. Its lines that are indented after the ``#`` are an example,
which the page shows below the table.

It must not know what the chart does with a value.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from tools.reference import markdown

CHART = Path(__file__).resolve().parents[2] / "charts" / "drakit"

STRUCTURES = {
    "hostdev.policies": "host-device-policy.md#fields",
    "backends.allowed": "configuration.md#allowedbackend",
    "devicePlugins.plugins": "configuration.md#allowedplugin",
    "nodeplugin.drivers": "configuration.md#driverentry",
    "operator.config": "configuration.md#operator",
}
"""Values whose fields are described on another page."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One key of values.yaml."""

    path: str
    default: Any
    comment: str
    example: str
    is_group: bool


def page() -> str:
    """Return the page."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = read(CHART / "values.yaml", schema)
    body = [
        "This page lists every value of the chart `charts/drakit`. The chart rejects other keys.\n"
        "[Install drakit](../admin/install.md) shows how to set values.",
        "A duration is a string with units, such as `10s`, `2m`, `1m30s` or `1h`, and must be greater than zero. The keys\n"
        "in a table are relative to the heading above it.",
    ]
    scalars = [each for each in values if "." not in each.path and not each.is_group]
    body += ["## Names and images", *_section(scalars, schema, prefix="")]
    for group in (each for each in values if "." not in each.path and each.is_group):
        members = [each for each in values if each.path.startswith(f"{group.path}.")]
        body += [f"## {group.path}", markdown.paragraph(_text(group.comment))]
        body += _section(members, schema, prefix=f"{group.path}.")
    return markdown.document(
        "Chart values",
        description="Every value of the drakit Helm chart, with its type, default and meaning.",
        source="charts/drakit/values.yaml and values.schema.json",
        body=body,
    )


MAX_DEFAULT = 60
"""Characters of a default within a table; a longer one follows the table."""


def _section(values: list[Value], schema: Mapping[str, Any], *, prefix: str) -> Iterator[str]:
    yield markdown.table(
        ("Key", "Type", "Default", "Meaning"),
        [
            (
                markdown.code(value.path.removeprefix(prefix)),
                "" if value.is_group else type_text(lookup(schema, value.path), schema),
                "" if value.is_group else _default(value),
                _meaning(value),
            )
            for value in values
        ],
    )
    for value in values:
        if _is_long(value):
            default = yaml.safe_dump(value.default, sort_keys=False, default_flow_style=None)
            yield f"The default of `{value.path}`:"
            yield f"```yaml\n{default.strip()}\n```"
        if value.example:
            key = value.path.rpartition(".")[2]
            example = textwrap.indent(value.example, "  ")
            yield f"An example of `{value.path}`:"
            yield f"```yaml\n{key}:\n{example}\n```"


def _meaning(value: Value) -> str:
    text = _text(value.comment)
    if where := STRUCTURES.get(value.path):
        text += f" See [the fields]({where})."
    return text.strip()


def _text(comment: str) -> str:
    return markdown.links(markdown.escaped(comment))


def _default(value: Value) -> str:
    return "see below" if _is_long(value) else markdown.code(json.dumps(value.default))


def _is_long(value: Value) -> bool:
    return not value.is_group and len(json.dumps(value.default)) > MAX_DEFAULT


def read(path: Path, schema: Mapping[str, Any]) -> list[Value]:
    """Read all keys in their order, with their comments."""
    text = path.read_text(encoding="utf-8")
    root = cast("yaml.MappingNode", yaml.compose(text))
    found: list[Value] = []

    def visit(node: yaml.MappingNode, above: str) -> None:
        for key, value in node.value:
            name = f"{above}{key.value}"
            comment, example = _comment(text.splitlines(), key.start_mark.line)
            # Without properties, a map has keys that an admin chooses.
            is_group = "properties" in _resolved(lookup(schema, name), schema)
            default = None if is_group else yaml.SafeLoader("").construct_object(value, deep=True)
            found.append(
                Value(
                    path=name, default=default, comment=comment, example=example, is_group=is_group
                )
            )
            if is_group:
                visit(value, f"{name}.")

    visit(root, "")
    return found


def _comment(lines: list[str], line: int) -> tuple[str, str]:
    """Return the comment directly above a line: its text and its example."""
    found: list[str] = []
    for above in reversed(lines[:line]):
        match = re.fullmatch(r"\s*# ?(.*)", above)
        if match is None:
            break
        found.insert(0, match[1])
    example = [each for each in found if each.startswith("  ")]
    text = [each for each in found if not each.startswith("  ")]
    return " ".join(text), textwrap.dedent("\n".join(example))


def lookup(schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the schema of a key."""
    found: Mapping[str, Any] = schema
    for name in path.split("."):
        found = _resolved(found, schema)["properties"][name]
    return found


def type_text(part: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return a type as a reader needs it."""
    name = part.get("$ref", "").rpartition("/")[2]
    if name in ("duration", "positiveDuration"):
        return "duration"
    if name in ("absolutePath", "optionalPath", "hostPath", "socketDirectory"):
        return "path"
    part = _resolved(part, schema)
    if "enum" in part:
        return "one of " + ", ".join(markdown.code(str(each)) for each in part["enum"])
    if "oneOf" in part:
        return " or ".join(type_text(each, schema) for each in part["oneOf"])
    kinds = part.get("type", "string")
    kind, *more = [kinds] if isinstance(kinds, str) else kinds
    text = {"array": "list", "object": "map"}.get(kind, kind)
    if kind == "array" and "items" in part:
        text = f"list of {_plural(type_text(part['items'], schema))}"
    if kind in ("integer", "number"):
        text += _bounds(part)
    return f"{text} or null" if "null" in more else text


def _plural(text: str) -> str:
    head, space, rest = text.partition(" or ")
    if head.startswith("integer"):
        head = head.replace("integer", "integers", 1)
    elif head in ("string", "map", "path"):
        head += "s"
    return f"{head}{space}{_plural(rest) if rest else ''}"


def _bounds(part: Mapping[str, Any]) -> str:
    low, high = part.get("minimum"), part.get("maximum")
    if low is not None and high is not None:
        return f", {low} to {high}"
    return "" if low is None else f", at least {low}"


def _resolved(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = part.get("$ref", "").rpartition("/")[2]
    return _resolved(schema["definitions"][name], schema) if name else part
