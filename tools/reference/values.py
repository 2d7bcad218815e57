"""
The page of the chart's values: keys, defaults and comments of values.yaml, and types of its schema.

A comment is directly above its key. Lines that are indented after the ``#`` are an example.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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

OBVIOUS = ("boolean", "string", "map", "path")
"""Types that a default shows."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One key of values.yaml."""

    path: str
    comment: str
    is_group: bool
    line: int
    """The index of the key's line in values.yaml."""

    comment_lines: int
    """The number of lines of the comment above the key."""

    end: int
    """The index of the line after the value."""


def page() -> str:
    """Return the page."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = read(CHART / "values.yaml", schema)
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    structures = ", ".join(f"[`{path}`]({where})" for path, where in STRUCTURES.items())
    body = [
        "This page shows `values.yaml` of the chart `charts/drakit`: every value with its default and, where the default\n"
        "does not show it, its type. The chart rejects other keys. [Install drakit](../admin/install.md) shows how to set\n"
        "values. A duration is a string with units, such as `10s`, `2m`, `1m30s` or `1h`, and must be greater than zero.",
        markdown.paragraph(f"These values have fields that another page describes: {structures}."),
    ]
    scalars = [each for each in values if "." not in each.path and not each.is_group]
    body += ["## Names and images"]
    body += [_block([each], lines, schema, commented=True) for each in scalars]
    for group in (each for each in values if "." not in each.path and each.is_group):
        members = [each for each in values if each.path.startswith(f"{group.path}.")]
        body += [f"## {group.path}", markdown.paragraph(_text(group.comment))]
        body += [_block([group, *members], lines, schema)]
    return markdown.document(
        "Chart values",
        description="Every value of the drakit Helm chart, with its type, default and meaning.",
        source="charts/drakit/values.yaml and values.schema.json",
        body=body,
    )


def _block(
    values: Sequence[Value],
    lines: Sequence[str],
    schema: Mapping[str, Any],
    *,
    commented: bool = False,
) -> str:
    """Return the part of values.yaml with a key and the keys below it, with their types."""
    first, last = values[0], values[-1]
    shown = list(lines[first.line - (first.comment_lines if commented else 0) : last.end])
    for value in values:
        kind = "" if value.is_group else type_text(lookup(schema, value.path), schema)
        if kind and kind not in OBVIOUS:
            line = value.line - last.end + len(shown)
            shown[line] += f"  # {kind.replace('`', '')}"
    return markdown.code_block("yaml", ["\n".join(shown).strip()])


def _text(comment: str) -> str:
    return markdown.links(markdown.escaped(comment))


def read(path: Path, schema: Mapping[str, Any]) -> list[Value]:
    """Read all keys in order, with their comments."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    root = cast("yaml.MappingNode", yaml.compose(text))
    found: list[Value] = []

    def visit(node: yaml.MappingNode, above: str) -> None:
        for key, value in node.value:
            name = f"{above}{key.value}"
            comment = _comment(lines, key.start_mark.line)
            # Without properties, an admin chooses the keys of a map.
            is_group = "properties" in _resolved(lookup(schema, name), schema)
            # A block collection ends where the next token begins, after empty lines and comments.
            end = value.end_mark.line + (value.end_mark.column > 0)
            while not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#"):
                end -= 1
            found.append(
                Value(
                    path=name,
                    comment=" ".join(each for each in comment if not each.startswith("  ")),
                    is_group=is_group,
                    line=key.start_mark.line,
                    comment_lines=len(comment),
                    end=end,
                )
            )
            if is_group:
                visit(value, f"{name}.")

    visit(root, "")
    return found


def _comment(lines: list[str], line: int) -> list[str]:
    """Return the comment directly above a line. Indented lines in it are an example."""
    found: list[str] = []
    for above in reversed(lines[:line]):
        match = re.fullmatch(r"\s*# ?(.*)", above)
        if match is None:
            break
        found.insert(0, match[1])
    return found


def lookup(schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the schema of a key."""
    found: Mapping[str, Any] = schema
    for name in path.split("."):
        found = _resolved(found, schema)["properties"][name]
    return found


def type_text(part: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return a type in the form that readers need."""
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
