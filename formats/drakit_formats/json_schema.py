"""
Checks values against JSON schemas, such as those that pydantic generates for a driver's parameters.

Values come from tenants, and schemas from administrators. Therefore, a check has a budget in steps,
patterns take linear time, and messages contain no values: they may be secrets. A keyword that is
not supported, such as ``if``, accepts every value, and so does the rest of a value that exceeds the
budget: a value that fits is never refused.

Does not depend on drivers, or on the objects that contain the values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias, cast

from pydantic_core import SchemaError as CoreSchemaError
from pydantic_core import SchemaValidator, core_schema

from drakit_formats.resource.objects import Object

MAX_STEPS = 20_000
"""Steps of a check: a value of 10 KiB, which the API server accepts, has at most 5,000 parts."""

CHEAP = 16
"""Comparisons with an allowed value, or with a known key, that count as one step; and the steps of
a pattern that is used for the first time."""

MAX_DEPTH = 64
"""Nested schemas; a schema can refer to itself."""

MAX_PROBLEMS = 5
"""Problems that are named: a message with all of them would be too long for a terminal."""

MAX_NAMES = 10
"""Keys and values of a schema that a message names."""

MAX_PART = 64
"""Characters of a key, a value or a pattern in a message."""

Part: TypeAlias = "str | int"
Path: TypeAlias = "tuple[Part, ...]"

_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "object": ("an object", lambda value: isinstance(value, dict)),
    "array": ("a list", lambda value: isinstance(value, list)),
    "string": ("a string", lambda value: isinstance(value, str)),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "null": ("null", lambda value: value is None),
    "number": ("a number", lambda value: _is_number(value)),
    "integer": ("an integer", lambda value: _is_number(value) and value == value // 1),
}

_BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("at least", lambda value, limit: value >= limit),
    "maximum": ("at most", lambda value, limit: value <= limit),
    "exclusiveMinimum": ("more than", lambda value, limit: value > limit),
    "exclusiveMaximum": ("less than", lambda value, limit: value < limit),
}

_SIZES: Mapping[str, tuple[type, str, str]] = {
    "minLength": (str, "at least", "characters"),
    "maxLength": (str, "at most", "characters"),
    "minItems": (list, "at least", "entries"),
    "maxItems": (list, "at most", "entries"),
    "minProperties": (dict, "at least", "keys"),
    "maxProperties": (dict, "at most", "keys"),
}


class _SpentError(Exception):
    """A check has no steps left."""


class JsonSchema:
    """A schema."""

    def __init__(self, schema: Object) -> None:
        self._schema = schema
        self._patterns: dict[str, SchemaValidator | None] = {}

    def problems(self, value: object, *, required: Collection[str] | None = None) -> list[str]:
        """
        Return what does not fit, each with the path of the field: at most `MAX_PROBLEMS`.

        :param required: the only keys at the top level that can be missing by mistake. The others
            may be in another value, with which this one is merged.
        """
        check = _Check(self._schema, self._patterns, required)
        found: list[str] = []
        with suppress(_SpentError):
            found.extend(islice(check.value(self._schema, value, ()), MAX_PROBLEMS + 1))
        if len(found) > MAX_PROBLEMS:
            found[MAX_PROBLEMS:] = ["and more"]
        return [*found, *check.known_keys()]


_ANY: Object = {"$ref": "#/$defs/schema"}
_TEXTS: Object = {"type": "array", "items": {"type": "string"}}

SCHEMA = JsonSchema(
    {
        **_ANY,
        "$defs": {
            "schema": {
                "type": ["object", "boolean"],
                "properties": {
                    **{
                        key: {"type": "object", "additionalProperties": _ANY}
                        for key in ("$defs", "definitions", "properties", "patternProperties")
                    },
                    **{
                        key: {"type": "array", "items": _ANY}
                        for key in ("prefixItems", "anyOf", "oneOf", "allOf")
                    },
                    "items": _ANY,
                    "additionalProperties": _ANY,
                    "propertyNames": _ANY,
                    **{key: {"type": "number"} for key in _BOUNDS},
                    **{key: {"type": "integer"} for key in _SIZES},
                    **{key: {"type": "string"} for key in ("$ref", "pattern")},
                    "enum": {"type": "array"},
                    "required": _TEXTS,
                    "type": {"anyOf": [{"type": "string"}, _TEXTS]},
                },
            }
        },
    }
)
"""The schema of schemas: what a check must be able to rely on."""


def _compiled(pattern: str) -> SchemaValidator | None:
    """Return what matches strings in linear time; None if the pattern needs backtracking."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, strict=True))
    except CoreSchemaError:
        return None


def _resolved(root: Object, reference: str) -> Any:
    """Return the schema to which a reference points; one that accepts everything if there is
    none."""
    start, *parts = reference.split("/")
    found: Any = root if start == "#" else True
    for part in parts:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name) if isinstance(found, list) else name]
        except (LookupError, TypeError, ValueError):
            return True
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Check:
    """One check of a value."""

    def __init__(
        self,
        root: Object,
        patterns: dict[str, SchemaValidator | None],
        required: Collection[str] | None,
    ) -> None:
        self._root = root
        self._patterns = patterns
        self._required = required
        self._steps = 0
        self._depth = 0
        self._known: dict[Path, list[str]] = {}
        """The keys of the objects with unknown keys, by their paths."""

    def known_keys(self) -> Iterator[str]:
        """Name the known keys of the objects that have unknown ones."""
        for path, keys in islice(self._known.items(), MAX_PROBLEMS):
            of = f" of {shown(path)}" if path else ""
            yield f"known keys{of}: {_listed(keys) or 'none'}"

    def value(self, schema: Any, value: Any, path: Path) -> Iterator[str]:
        self._spend(1)
        if self._depth > MAX_DEPTH:
            raise _SpentError
        if schema is False:
            yield _sentence(path, "is not allowed")
        if not isinstance(schema, dict):
            return
        self._depth += 1
        try:
            yield from self._of(cast("Object", schema), value, path)
        finally:
            self._depth -= 1

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise _SpentError

    def _of(self, schema: Object, value: Any, path: Path) -> Iterator[str]:
        if "$ref" in schema:
            yield from self.value(_resolved(self._root, schema["$ref"]), value, path)
        wrong = False
        for problem in self._plain(schema, value):
            wrong = True
            yield _sentence(path, problem)
        if wrong:
            return
        if isinstance(value, dict):
            yield from self._object(schema, cast("Object", value), path)
        elif isinstance(value, list):
            yield from self._list(schema, cast("list[Any]", value), path)
        for each in schema.get("allOf", ()):
            yield from self.value(each, value, path)
        for key in ("anyOf", "oneOf"):  # an approximation of oneOf that accepts more
            if key in schema:
                yield from self._any(schema[key], value, path)

    def _plain(self, schema: Object, value: Any) -> Iterator[str]:
        """Check what does not concern the parts of a value."""
        kinds = schema.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        known = [_TYPES[kind] for kind in kinds if kind in _TYPES]
        if known and not any(fits(value) for _, fits in known):
            yield f"must be {' or '.join(word for word, _ in known)}"
            return
        allowed = [schema["const"]] if "const" in schema else schema.get("enum")
        self._spend(len(allowed or ()) // CHEAP)
        if allowed is not None and not any(_equal(value, each) for each in allowed):
            yield f"must be {'one of ' * (len(allowed) > 1)}{_listed(allowed)}"
            return
        if _is_number(value):
            for key, (words, holds) in _BOUNDS.items():
                if key in schema and not holds(value, schema[key]):
                    yield f"must be {words} {schema[key]}"
        for key, (kind, words, parts) in _SIZES.items():
            if key in schema and isinstance(value, kind):
                size, limit = len(value), schema[key]
                if size < limit if key.startswith("min") else size > limit:
                    yield f"must have {words} {limit} {parts}"
        pattern = schema.get("pattern") if isinstance(value, str) else None
        if pattern is not None and not self._matches(pattern, value):
            yield f"must match {_cut(pattern)}"

    def _matches(self, pattern: str, value: str) -> bool:
        if pattern not in self._patterns:
            self._spend(CHEAP)
            self._patterns[pattern] = _compiled(pattern)
        compiled = self._patterns[pattern]
        return compiled is None or compiled.isinstance_python(value)

    def _object(self, schema: Object, value: Object, path: Path) -> Iterator[str]:
        properties: Object = schema.get("properties", {})
        patterns: Object = schema.get("patternProperties", {})
        for key in schema.get("required", ()):
            lenient = not path and self._required is not None and key not in self._required
            if key not in value and not lenient:
                yield _sentence((*path, key), "is required")
        rest: Any = schema.get("additionalProperties", True)
        for key, each in value.items():
            self._spend(len(patterns) + len(properties) // CHEAP)
            below = (*path, key)
            known = [properties[key]] if key in properties else []
            known += [body for name, body in patterns.items() if self._matches(name, key)]
            if "propertyNames" in schema:
                yield from self.value(schema["propertyNames"], key, below)
            if not known and rest is False:
                self._known[path] = [*properties, *patterns]
                yield _sentence(below, "is not a known key")
                continue
            for body in known or [rest]:
                yield from self.value(body, each, below)

    def _list(self, schema: Object, value: list[Any], path: Path) -> Iterator[str]:
        first: Sequence[Any] = schema.get("prefixItems", ())
        for number, each in enumerate(value):
            body = first[number] if number < len(first) else schema.get("items", True)
            yield from self.value(body, each, (*path, number))

    def _any(self, schemas: Sequence[Any], value: Any, path: Path) -> Iterator[str]:
        """Report the problems of the alternative that was meant, if none fits."""
        found: list[tuple[Any, list[str]]] = []
        for each in schemas:
            known = dict(self._known)
            problems = list(islice(self.value(each, value, path), MAX_PROBLEMS))
            if not problems:
                self._known = known
                return
            found.append((each, problems))
            self._known = known
        meant = [one for one in found if self._is_meant(one[0], value)]
        if len(meant) == 1:
            yield from self.value(meant[0][0], value, path)
        else:
            yield _sentence(path, "fits none of the allowed forms")

    def _is_meant(self, schema: Any, value: Any) -> bool:
        """Return whether a value has the type, and the fixed fields, of an alternative."""
        while isinstance(schema, dict) and "$ref" in schema:
            self._spend(1)
            schema = _resolved(self._root, cast("Object", schema)["$ref"])
        if not isinstance(schema, dict):
            return False
        body = cast("Object", schema)
        if any(True for _ in self._plain({"type": body.get("type", [])}, value)):
            return False
        fixed: dict[str, Any] = {
            name: each["const"]
            for name, each in body.get("properties", {}).items()
            if isinstance(each, dict) and "const" in each
        }
        return not isinstance(value, dict) or all(
            _equal(cast("Object", value).get(name), each) for name, each in fixed.items()
        )


# ---------------------------------------------------------------- messages


def _sentence(path: Path, problem: str) -> str:
    return f"{shown(path)}: {problem}" if path else problem


def shown(path: Sequence[Part]) -> str:
    """Return the path of a field as users write it."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += (
                f"{'.' * bool(text)}{_cut(part if part and part.isprintable() else ascii(part))}"
            )
    return text


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(_cut(_literal(each)) for each in names[:MAX_NAMES]) + more


def _literal(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_PART else f"{text[:MAX_PART]}..."


def _equal(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)
