"""
The pages of the Python API: the public names of drakit and drakit.testing, with their docstrings.
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
        "ParameterVersion",
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
        "RejectedDevice",
        "RejectionReason",
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
        "NodeAllocatableResource",
    ),
    "Claims": (
        "ClaimReference",
        "AllocatedClaim",
        "AllocatedDevice",
        "ClaimData",
        "ClaimOwner",
        "ClaimConsumer",
        "ClaimConfig",
        "OtherDevice",
        "HeldDevice",
        "HeldNode",
    ),
    "Results of prepare": ("PreparedDevice", "Condition", "ConditionStatus", "NetworkData"),
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
        description="The public names of the Python package drakit, for drivers.",
        source="the docstrings of drakit",
        body=[
            "Drivers import these names from the package: `from drakit import Device, Driver`. Pass the fields of\n"
            "dataclasses as keyword arguments. [The driver contract](../vendors/driver-contract.md) shows how the\n"
            "names work together, and [Python API for tests](python-testing.md) describes `drakit.testing`. All\n"
            "other modules are internal and can change in any release.",
            *(
                block
                for title, names in GROUPS.items()
                for block in (f"## {title}", *(b for name in names for b in _name(drakit, name)))
            ),
        ],
    )


def testing_page() -> str:
    """Return the page of drakit.testing."""
    return markdown.document(
        "Python API for tests",
        description="The public names of the Python package drakit.testing.",
        source="the docstrings of drakit.testing",
        body=[
            "This page is the reference of the package `drakit.testing`, which the extra `drakit[testing]` installs.\n"
            "[Conformance](../vendors/conformance.md) has examples.",
            *(block for name in drakit.testing.__all__ for block in _name(drakit.testing, name)),
        ],
    )


def _name(package: Any, name: str) -> Iterator[str]:
    found = getattr(package, name)
    home = import_module(package._HOMES[name])
    yield f"### {name}"
    if inspect.isclass(found) and found.__module__ == home.__name__:
        yield from _class(found)
    elif callable(found) and inspect.isfunction(inspect.unwrap(found)):
        yield _signature(found)
        yield _text(inspect.getdoc(found))
    else:
        yield _code(_assignment(name, _alias(home, name)))
        yield _text(docstrings.of_module(home).get(name))


def _assignment(name: str, value: str) -> str:
    """Return an assignment in the format of ruff."""
    value = value.replace("'", '"')
    if len(line := f"{name} = {value}") <= 100:
        return line
    if len(value) + 4 <= 100:
        return f"{name} = (\n    {value}\n)"
    head, _, items = value.removesuffix("]").partition("[")
    return "\n".join([f"{name} = {head}[", *(f"    {item}," for item in items.split(", ")), "]"])


def _alias(home: Any, name: str) -> str:
    """Return the right side of an alias from the source."""
    source = inspect.getsource(home)
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return _shortened(ast.unparse(value))
            case _:
                pass
    raise SystemExit(f"{name} is assigned nowhere in {home.__name__}")


def _shortened(text: str) -> str:
    # Annotations contain validators, which are not part of the contract.
    return re.sub(r"^Annotated\[(\w+), .*\]$", r"Annotated[\1, ...]", text)


# ---------------------------------------------------------------- classes


def _class(found: type) -> Iterator[str]:
    yield _code(_stub(found))
    yield _text(inspect.cleandoc(vars(found).get("__doc__") or ""))
    for name, member in vars(found).items():
        if not name.startswith("_"):
            yield from _member(found, name, member)


def _field_names(found: type) -> list[str]:
    """Return the fields of a dataclass, or the documented attributes of another class."""
    if dataclasses.is_dataclass(found):
        return [field.name for field in dataclasses.fields(found) if field.name[0] != "_"]
    return docstrings.own_names(found)


def _stub(found: type) -> str:
    """Return the class with its fields and its constructor in the form of a stub file."""
    # A field with a self-explanatory name has no docstring.
    declared = ((line, docstrings.of_attribute(found, name)) for name, line in _declarations(found))
    fields = markdown.members(declared, "#", "    ")
    create = [f"    {line}" for line in _constructor(found)]
    lines = [*fields, *([""] if fields and create else []), *create]
    head = f"class {found.__name__}{_bases(found)}:"
    return "\n".join([head, *lines]) if lines else f"{head} ..."


def _bases(found: type) -> str:
    names = [each.__name__ for each in found.__bases__ if each is not object]
    names = [name for name in names if name not in ("ABC", "Generic", "Settings")]
    return f"({', '.join(names)})" if names else ""


def _declarations(found: type) -> Iterator[tuple[str, str]]:
    """Yield the name and the declaration of each field."""
    if dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            if not field.name.startswith("_"):
                yield (
                    field.name,
                    f"{field.name}: {_quotes(_annotation(field.type))}{_default(field)}",
                )
        return
    # Attributes that the constructor assigns have the types of its parameters.
    create = vars(found).get("__init__")
    annotations = inspect.get_annotations(create) if create else {}
    annotations |= inspect.get_annotations(found)
    for name in _field_names(found):
        known = f": {_annotation(annotations[name])}" if name in annotations else ""
        yield name, f"{name}{known}{_value(found, name)}"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not _MISSING:
        made: Any = field.default_factory()
        return f" = {made!r}" if isinstance(made, dict | list) else f" = {type(made).__name__}()"
    if field.default is _MISSING:
        return ""
    if dataclasses.is_dataclass(field.default):
        return f" = {type(field.default).__name__}()"
    return f" = {_quotes(repr(field.default))}"


def _value(found: type, name: str) -> str:
    if name not in vars(found):
        return ""
    value = vars(found)[name]
    return f" = {value.__name__ if inspect.isclass(value) else _quotes(repr(value))}"


def _quotes(text: str) -> str:
    return text.replace("'", '"')


def _constructor(found: type) -> Iterator[str]:
    # A protocol does not have its own constructor. The parameters of a dataclass are its fields.
    create = vars(found).get("__init__")
    if dataclasses.is_dataclass(found) or getattr(found, "_is_protocol", False) or create is None:
        return
    if found.__name__ not in MADE_BY_OTHERS:
        yield f"{_declaration(create, receiver=True)}: ..."


def _member(owner: type, name: str, member: Any) -> Iterator[str]:
    text = inspect.getdoc(member)
    if isinstance(member, property):
        yield f"#### {owner.__name__}.{name}"
        yield _code(f"{name}: {_annotation(member.fget.__annotations__['return'])}")
    elif isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
        yield f"#### {owner.__name__}.{name}"
        yield _signature(member, name=name)
    else:
        return
    yield _text(text)


# ---------------------------------------------------------------- signatures


def _signature(function: Any, *, name: str = "") -> str:
    return _code(_declaration(function, name=name))


def _declaration(function: Any, *, name: str = "", receiver: bool = False) -> str:
    kind = "@classmethod\n" if isinstance(function, classmethod) else ""
    plain = getattr(function, "__func__", function)
    signature = inspect.signature(plain)
    parameters = [
        each.replace(annotation=_quoted(each.annotation)) for each in signature.parameters.values()
    ]
    if parameters and parameters[0].name in ("self", "cls") and not receiver:
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
    return kind + line


def _arguments(parameters: list[inspect.Parameter]) -> list[str]:
    found: list[str] = []
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not any(text.startswith("*") for text in found):
            found.append("*")
        found.append(str(each))
    return found


class _Plain:
    """An annotation that is shown as its source."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _quoted(annotation: Any) -> Any:
    return annotation if annotation is inspect.Parameter.empty else _Plain(_annotation(annotation))


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"^ClassVar\[(.*)\]$", r"\1", text)


def _text(docstring: str | None) -> str:
    return markdown.links(markdown.docstring(docstring))


def _code(text: str) -> str:
    return markdown.code_block("python", [text])
