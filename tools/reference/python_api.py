"""
The page of the Python API: the public names of drakit and drakit.testing, with their docstrings.

It must not know what a name is for.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import drakit
import drakit.testing
from tools.reference import docstrings, markdown

GROUPS: Mapping[str, Sequence[str]] = {
    "Drivers": (
        "Driver",
        "DriverConfig",
        "DeviceParameters",
        "NoParameters",
        "DriverError",
        "ReleasePendingError",
        "Node",
    ),
    "Policies": (
        "DevicePolicy",
        "PolicyResource",
        "Policy",
        "PolicyOutcome",
        "PolicyConflict",
        "LeftOut",
        "LeftOutReason",
    ),
    "Devices": (
        "Device",
        "AttributeValue",
        "Version",
        "Capacity",
        "CapacityRange",
        "Topology",
        "Health",
        "Taint",
        "TaintEffect",
        "Inventory",
        "CounterSet",
    ),
    "Claims": ("ClaimReference", "AllocatedClaim", "AllocatedDevice", "HeldDevice", "HeldNode"),
    "Container edits": ("Edits", "DeviceNode", "Mount", "Hook", "NetDevice", "IntelRdt"),
    "Helpers": ("Duration", "parse_quantity"),
}

MADE_BY_OTHERS = ("Kit",)
"""Classes whose constructors are internal."""

_MISSING = dataclasses.MISSING


def page() -> str:
    """Return the page."""
    grouped = [name for names in GROUPS.values() for name in names]
    if sorted(grouped) != sorted(drakit.__all__):
        raise SystemExit(f"names without a group: {set(drakit.__all__) ^ set(grouped)}")
    return markdown.document(
        "Python API",
        description="The public names of the Python packages drakit and drakit.testing.",
        source="the docstrings of drakit and drakit.testing",
        body=[
            "This page describes the public names of the packages `drakit` and `drakit.testing`. All other modules are\n"
            "internal and can change in any release. [Write a Python driver](../vendors/python-driver.md) shows how to use\n"
            "the names.",
            "Import the names from the package: `from drakit import Device, Driver`. Pass the fields of dataclasses as keyword\n"
            "arguments.",
            "## drakit",
            *(
                block
                for title, names in GROUPS.items()
                for block in (f"### {title}", *(b for name in names for b in _name(drakit, name)))
            ),
            "## drakit.testing",
            "Install the extra `drakit[testing]` to use these names. [Conformance](../vendors/conformance.md) shows examples.",
            *(block for name in drakit.testing.__all__ for block in _name(drakit.testing, name)),
        ],
    )


def _name(package: Any, name: str) -> Iterator[str]:
    found = getattr(package, name)
    home = import_module(package._HOMES[name])
    yield f"#### {name}"
    if inspect.isclass(found) and found.__module__ == home.__name__:
        yield from _class(found)
    elif callable(found) and inspect.isfunction(inspect.unwrap(found)):
        yield _signature(found)
        yield markdown.docstring(inspect.getdoc(found))
    else:
        yield _code(_assignment(name, _alias(home, name)))
        yield markdown.docstring(docstrings.of_module(home).get(name))


def _assignment(name: str, value: str) -> str:
    """Return an assignment as ruff formats it."""
    value = value.replace("'", '"')
    if len(line := f"{name} = {value}") <= 100:
        return line
    if len(value) + 4 <= 100:
        return f"{name} = (\n    {value}\n)"
    head, _, items = value.removesuffix("]").partition("[")
    return "\n".join([f"{name} = {head}[", *(f"    {item}," for item in items.split(", ")), "]"])


def _alias(home: Any, name: str) -> str:
    """Return the right side of an alias as the source has it."""
    source = inspect.getsource(home)
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return _shortened(ast.unparse(value))
            case _:
                pass
    raise SystemExit(f"{name} is assigned nowhere in {home.__name__}")


def _shortened(text: str) -> str:
    # Annotations hold validators, which are no part of the contract.
    return re.sub(r"^Annotated\[(\w+), .*\]$", r"Annotated[\1, ...]", text)


# ---------------------------------------------------------------- classes


def _class(found: type) -> Iterator[str]:
    yield _code(f"class {found.__name__}{_bases(found)}")
    yield markdown.docstring(inspect.cleandoc(vars(found).get("__doc__") or ""))
    if dataclasses.is_dataclass(found):
        yield _fields(found)
    else:
        yield from _attributes(found)
        if found.__name__ not in MADE_BY_OTHERS and (create := vars(found).get("__init__")):
            yield "The constructor:"
            yield _signature(create, name=found.__name__)
    for name, member in vars(found).items():
        if not name.startswith("_"):
            yield from _member(found, name, member)


def _bases(found: type) -> str:
    names = [each.__name__ for each in found.__bases__ if each is not object]
    names = [name for name in names if name not in ("ABC", "Generic", "Protocol", "Settings")]
    return f"({', '.join(names)})" if names else ""


def _fields(found: type) -> str:
    return markdown.table(
        ("Field", "Type", "Default", "Meaning"),
        [
            (
                markdown.code(field.name),
                markdown.code(_annotation(field.type)),
                _default(field),
                markdown.prose(docstrings.of_attribute(found, field.name)),
            )
            for field in dataclasses.fields(found)
            if not field.name.startswith("_")
        ],
    )


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not _MISSING:
        return "empty"
    if field.default is _MISSING:
        return "required"
    if dataclasses.is_dataclass(field.default):
        return f"`{type(field.default).__name__}()`"
    return markdown.code(repr(field.default))


def _attributes(found: type) -> Iterator[str]:
    """Describe the documented attributes of a class that is no dataclass."""
    annotations = inspect.get_annotations(found)
    names = docstrings.own_names(found)
    if names:
        yield markdown.table(
            ("Attribute", "Type", "Default", "Meaning"),
            [
                (
                    markdown.code(name),
                    markdown.code(_annotation(annotations.get(name, ""))),
                    _value(found, name),
                    markdown.prose(docstrings.of_attribute(found, name)),
                )
                for name in names
            ],
        )


def _value(found: type, name: str) -> str:
    if name not in vars(found):
        return ""
    value = vars(found)[name]
    return markdown.code(value.__name__ if inspect.isclass(value) else repr(value))


def _member(owner: type, name: str, member: Any) -> Iterator[str]:
    text = inspect.getdoc(member)
    if isinstance(member, property):
        yield f"##### {owner.__name__}.{name}"
        yield _code(f"{name}: {_annotation(member.fget.__annotations__['return'])}")
    elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
        yield f"##### {owner.__name__}.{name}"
        yield _signature(member, name=name)
    else:
        return
    yield markdown.docstring(text)


# ---------------------------------------------------------------- signatures


def _signature(function: Any, *, name: str = "") -> str:
    kind = "@classmethod\n" if isinstance(function, classmethod) else ""
    plain = getattr(function, "__func__", function)
    signature = inspect.signature(plain)
    parameters = [
        each.replace(annotation=_quoted(each.annotation)) for each in signature.parameters.values()
    ]
    if parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    word = "async def" if inspect.iscoroutinefunction(plain) else "def"
    returned = (
        ""
        if signature.return_annotation is inspect.Signature.empty
        else f" -> {_annotation(signature.return_annotation)}"
    )
    arguments = _arguments(parameters)
    line = f"{word} {name or plain.__name__}({', '.join(arguments)}){returned}"
    if len(line) > 100:
        inside = "".join(f"    {each},\n" for each in arguments)
        line = f"{word} {name or plain.__name__}(\n{inside}){returned}"
    return _code(kind + line)


def _arguments(parameters: list[inspect.Parameter]) -> list[str]:
    found: list[str] = []
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not any(text.startswith("*") for text in found):
            found.append("*")
        found.append(str(each))
    return found


class _Plain:
    """An annotation that is shown as its text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _quoted(annotation: Any) -> Any:
    return annotation if annotation is inspect.Parameter.empty else _Plain(_annotation(annotation))


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"^ClassVar\[(.*)\]$", r"\1", text)


def _code(text: str) -> str:
    return f"```python\n{text}\n```"
