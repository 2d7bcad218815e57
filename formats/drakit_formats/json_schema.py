"""
Checks values against JSON schemas, such as those that pydantic generates for a driver's parameters.

Values come from tenants, and schemas from administrators. Therefore, a check has a limited number
of steps, patterns take linear time, and messages contain no values, which may be secrets. An
unsupported keyword, such as ``if``, accepts every value. If the check of a value reaches its step
limit, the rest of the value is also accepted, so that a valid value is never rejected.

Does not depend on drivers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, cast

from pydantic_core import SchemaError as CoreSchemaError
from pydantic_core import SchemaValidator, core_schema

from drakit_formats.resource.objects import Object

MAX_STEPS = 20_000
"""Maximum number of steps in a check. A value of 10 KiB, which the API server accepts, has at most
5,120 parts."""

CHEAP = 16
"""How many comparisons with an allowed value or a known key cost one step. It is also how many
steps a comparison with a pattern costs, because the pattern may have to be compiled."""

MAX_PATTERNS = 1024
"""Maximum number of patterns to cache."""

MAX_DEPTH = 64
"""Maximum nesting depth of schemas, because a schema can refer to itself."""

MAX_PROBLEMS = 5
"""Maximum number of problems to report. A message with more would be too long for a terminal."""

MAX_NAMES = 10
"""Maximum number of a schema's keys or values to list in a message."""

MAX_PART = 64
MAX_PATH = 256
"""Maximum length of a key, value, pattern or path in a message."""

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
    "maxProperties": (dict, "at most", "keys"),
}

_ANY: Object = {"$ref": "#"}
_TEXTS: Object = {"type": "array", "items": {"type": "string"}}
_KEYWORDS: Mapping[str, Object] = {
    **{
        key: {"type": "object", "additionalProperties": _ANY}
        for key in ("$defs", "properties", "patternProperties")
    },
    **{key: {"type": "array", "items": _ANY} for key in ("prefixItems", "anyOf", "oneOf", "allOf")},
    **dict.fromkeys(("items", "additionalProperties"), _ANY),
    **{key: {"type": "number"} for key in _BOUNDS},
    **{key: {"type": "integer"} for key in _SIZES},
    **{key: {"type": "string"} for key in ("$ref", "pattern")},
    "enum": {"type": "array"},
    "required": _TEXTS,
    "type": {"anyOf": [{"type": "string"}, _TEXTS]},
}
"""The supported keywords, and the types that a check relies on."""


class _SpentError(Exception):
    """The check has used all its steps."""


class _Problem(NamedTuple):
    """A part of a value that does not match the schema."""

    path: Path
    text: str
    known: Sequence[str] | None = None
    """The known keys, if the part is an unknown key."""

    keyword: str = ""
    """The keyword ``type`` or ``const``, if the part does not match it."""


class JsonSchema:
    """A JSON schema that checks values."""

    def __init__(self, schema: Object) -> None:
        self._schema = schema

    def problems(
        self,
        value: object,
        *,
        required: Collection[str] | None = None,
        max_steps: int = MAX_STEPS,
    ) -> list[str]:
        """
        Return at most `MAX_PROBLEMS` problems with a value, each with the path of the field.

        :param required: the only top-level keys that are reported if they are missing. The other
            required keys may be in another value that is merged with this one.
        """
        found: list[_Problem] = []
        with suppress(_SpentError):
            problems = _Check(self._schema, required, max_steps).value(self._schema, value)
            found.extend(islice(problems, MAX_PROBLEMS + 1))
        named = found[:MAX_PROBLEMS]
        known = {each.path[:-1]: each.known for each in named if each.known is not None}
        return [
            *(_sentence(each.path, each.text) for each in named),
            *(["and more"] if len(found) > len(named) else ()),
            *(
                f"known keys{f' of {shown(path)}' if path else ''}: {listed(keys) or 'none'}"
                for path, keys in known.items()
            ),
        ]


SCHEMA = JsonSchema({"type": ["object", "boolean"], "properties": _KEYWORDS})
"""The schema for JSON schemas themselves."""


@lru_cache(MAX_PATTERNS)
def _compiled(pattern: str) -> SchemaValidator | None:
    """Return a validator that matches strings in linear time, or None if the pattern needs
    backtracking."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, strict=True))
    except CoreSchemaError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


class _Check:
    """One check of a value."""

    def __init__(self, root: Object, required: Collection[str] | None, steps: int) -> None:
        self._root = root
        self._required = required
        self._steps = steps

    def value(self, schema: Any, value: Any, path: Path = (), depth: int = 0) -> Iterator[_Problem]:
        self._spend(1)
        if depth > MAX_DEPTH:
            raise _SpentError
        if schema is False:
            yield _Problem(path, "is not allowed")
        if not isinstance(schema, dict):
            return
        body = cast("Object", schema)
        if "$ref" in body:
            yield from self.value(self._resolved(body["$ref"]), value, path, depth + 1)
        if plain := list(self._plain(body, value, path)):
            yield from plain
            return
        if isinstance(value, dict):
            yield from self._object(body, cast("Object", value), path, depth + 1)
        elif isinstance(value, list):
            first: Sequence[Any] = body.get("prefixItems", ())
            for number, part in enumerate(cast("list[Any]", value)):
                inner = first[number] if number < len(first) else body.get("items", True)
                yield from self.value(inner, part, (*path, number), depth + 1)
        for inner in body.get("allOf", ()):
            yield from self.value(inner, value, path, depth + 1)
        for key in ("anyOf", "oneOf"):  # for oneOf, this is an approximation that accepts more
            if key in body:
                yield from self._any(body[key], value, path, depth + 1)

    def _spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise _SpentError

    def _resolved(self, reference: str) -> Any:
        """Return the schema that a reference points to. If there is no such schema, return one that
        accepts everything."""
        start, *parts = reference.split("/")
        found: Any = self._root if start == "#" else True
        for part in parts:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name) if isinstance(found, list) else name]
            except (LookupError, TypeError, ValueError):
                return True
        return found

    def _plain(self, schema: Object, value: Any, path: Path) -> Iterator[_Problem]:
        """Check the keywords that apply to the value itself, not to its parts."""
        kinds = schema.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else kinds
        known = [_TYPES[kind] for kind in kinds if kind in _TYPES]
        if known and not any(fits(value) for _, fits in known):
            text = f"must be {' or '.join(word for word, _ in known)}"
            yield _Problem(path, text, keyword="const" if "const" in schema else "type")
            return
        if "const" in schema and not _equal(value, schema["const"]):
            yield _Problem(path, f"must be {listed([schema['const']])}", keyword="const")
        allowed: list[Any] = schema.get("enum", [])
        self._spend(len(allowed) // CHEAP)
        if "enum" in schema and not any(_equal(value, each) for each in allowed):
            yield _Problem(path, f"must be one of {listed(allowed)}")
        for key, (words, holds) in _BOUNDS.items() if _is_number(value) else ():
            if key in schema and not holds(value, schema[key]):
                yield _Problem(path, f"must be {words} {schema[key]}")
        for key, (kind, words, parts) in _SIZES.items():
            if key in schema and isinstance(value, kind):
                size, limit = len(value), schema[key]
                if size < limit if key.startswith("min") else size > limit:
                    yield _Problem(path, f"must have {words} {limit} {parts}")
        pattern = schema.get("pattern") if isinstance(value, str) else None
        if pattern is not None and not self._matches(pattern, value):
            yield _Problem(path, f"must match {_cut(pattern)}")

    def _matches(self, pattern: str, value: str) -> bool:
        self._spend(CHEAP)
        compiled = _compiled(pattern)
        return compiled is None or compiled.isinstance_python(value)

    def _object(self, schema: Object, value: Object, path: Path, depth: int) -> Iterator[_Problem]:
        properties: Object = schema.get("properties", {})
        patterns: Object = schema.get("patternProperties", {})
        required = schema.get("required", ())
        if not path and self._required is not None:
            required = [key for key in required if key in self._required]
        for key in required:
            if key not in value:
                yield _Problem((*path, key), "is required")
        for key, part in value.items():
            self._spend(len(properties) // CHEAP)
            inner = [properties[key]] if key in properties else []
            inner += [each for name, each in patterns.items() if self._matches(name, key)]
            rest: Any = schema.get("additionalProperties", True)
            if not inner and rest is False:
                known = [*properties, *patterns]
                yield _Problem((*path, key), "is not a known key", known=known)
                continue
            for each in inner or [rest]:
                yield from self.value(each, part, (*path, key), depth)

    def _any(
        self, schemas: Sequence[Any], value: Any, path: Path, depth: int
    ) -> Iterator[_Problem]:
        """If no alternative matches, report the problems of the most likely one: the one with the
        same type as the value, and with the fewest differing constants."""
        found: list[tuple[bool, int, list[_Problem]]] = []
        for each in schemas:
            problems = list(islice(self.value(each, value, path, depth), MAX_PROBLEMS))
            if not problems:
                return
            differs = any(one.path == path and one.keyword == "type" for one in problems)
            found.append((differs, sum(one.keyword == "const" for one in problems), problems))
        found.sort(key=lambda each: each[:2])
        if len(found) > 1 and found[0][:2] == found[1][:2]:
            yield _Problem(path, "fits none of the allowed forms")
        elif found:
            yield from found[0][2]


# ---------------------------------------------------------------- messages


def _sentence(path: Path, problem: str) -> str:
    return f"{shown(path)}: {problem}" if path else problem


def shown(path: Sequence[Part]) -> str:
    """Return the path of a field as users write it."""
    text = ""
    for part in path:
        name = f"[{part}]" if isinstance(part, int) else _name(part)
        text += f"{'.' if text and isinstance(part, str) else ''}{name}"
    return _cut(text, MAX_PATH)


def listed(values: Sequence[object]) -> str:
    """Return the first values as users write them, and the number of the others."""
    texts = [each if isinstance(each, str) else json.dumps(each) for each in values[:MAX_NAMES]]
    more = f" and {len(values) - MAX_NAMES} more" if len(values) > MAX_NAMES else ""
    return ", ".join(map(_name, texts)) + more


def _name(text: str) -> str:
    return _cut(text if text and text.isprintable() else ascii(text))


def _cut(text: str, limit: int = MAX_PART) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
