"""
Reads YAML files of other tools: documents, their ConfigMaps, and values with their places.

All scalars stay text: YAML would read the vendor ID 0403 as the number 259. Input is hostile: size
and depth are bounded, and a value of another type than expected is an error that names its place.

It must not know the tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from drakit.cli.errors import UsageError

__all__ = ("Document", "Value", "read_documents", "read_text")

_MAX_BYTES = 1024 * 1024
_MAX_ITEMS = 1024
"""Items of a list: an input with more is not a configuration of devices."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value and its place in the input: ``spec.capacity``."""

    content: Any
    place: str

    def __bool__(self) -> bool:
        return self.content not in (None, "", {}, [])

    def error(self, text: str) -> UsageError:
        """Return an error at this place."""
        return UsageError(f"{self.place or 'the document'}: {text}")

    def get(self, *keys: str) -> Value:
        """Return a value below this one; an empty one if it is missing."""
        found = self
        for key in keys:
            mapping = found.mapping()
            found = Value(mapping.get(key), f"{found.place}.{key}" if found.place else key)
        return found

    def mapping(self) -> dict[str, Any]:
        """Return the content as a mapping; empty if it is missing."""
        if not self:
            return {}
        content: object = self.content
        if not isinstance(content, dict):
            raise self.error("must be a mapping")
        mapping = cast("dict[Any, Any]", content)
        for key in mapping:
            if not isinstance(key, str):
                raise self.error("must have strings as its keys")
        return cast("dict[str, Any]", mapping)

    def items(self) -> list[Value]:
        """Return the items of a list; none if it is missing."""
        if not self:
            return []
        content: object = self.content
        if not isinstance(content, list):
            raise self.error("must be a list")
        items = cast("list[Any]", content)
        if len(items) > _MAX_ITEMS:
            raise self.error(f"has {len(items)} items, and at most {_MAX_ITEMS} are read; split it")
        return [Value(item, f"{self.place}[{index}]") for index, item in enumerate(items)]

    def text(self) -> str:
        """Return the content as text; empty if it is missing."""
        if not self:
            return ""
        if not isinstance(self.content, str):
            raise self.error("must be text")
        return self.content

    def number(self, default: int) -> int:
        """Return the content as a whole number of at least 1."""
        text = self.text()
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
            raise self.error(f"{text!r} must be a whole number of at least 1")
        return int(text)

    def flag(self, default: bool) -> bool:
        """Return the content as a boolean."""
        text = self.text().lower()
        if text not in ("", "true", "false"):
            raise self.error(f"{text!r} must be true or false")
        return default if not text else text == "true"

    def unknown(self, *known: str) -> Iterator[Value]:
        """Return the values of other keys."""
        return (self.get(key) for key in self.mapping() if key not in known)


Document = Value


def read_documents(path: Path) -> list[Document]:
    """Read a file; raise UsageError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path} has more than {_MAX_BYTES} bytes; split it")
    try:
        documents = _parse(data.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}") from error
    except ValueError as error:
        raise UsageError(f"{path} {error}") from error
    several = len(documents) > 1
    return [
        part
        for index, each in enumerate(documents)
        for part in _listed(Value(each, f"document[{index}]" if several else ""))
    ]


def read_text(value: Value) -> Value:
    """Read YAML inside a text: a key of a ConfigMap, an argument."""
    try:
        documents = _parse(value.text())
    except ValueError as error:
        raise value.error(str(error)) from error
    return Value(documents[0] if documents else None, value.place)


def _listed(document: Value) -> Iterator[Value]:
    # ``kubectl get -o yaml`` prints a list of objects as one object.
    if isinstance(document.content, dict) and document.get("kind").content == "List":
        yield from document.get("items").items()
    elif document:
        yield document


def _parse(text: str) -> list[Any]:
    try:
        return list(yaml.load_all(text, Loader=yaml.BaseLoader))
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"is not YAML: {problem}; correct it") from error
    except (RecursionError, ValueError, TypeError) as error:
        raise ValueError(f"cannot be read as YAML: {error}; correct it") from error
