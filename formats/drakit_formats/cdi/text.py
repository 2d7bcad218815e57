"""
Parses the bytes of a CDI file.

Runtimes parse every file as YAML (the reference library uses go.yaml.in/yaml/v3), even those named
``*.json``. JSON is valid YAML except for a few characters. If a file contains one of them, runtimes
cannot use the file. Therefore, a file that is valid as only one of the two formats is reported.
:mod:`.directory` writes files that are valid as both. The YAML module is imported only when a YAML
file is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, cast

from drakit_formats.cdi.checks import shown

_REFUSED = re.compile(r"[\x80-\x9f\u2028\u2029\ufffe\uffff]")
"""Characters that JSON allows in a string, but that the runtimes' parser rejects or treats as line
breaks."""

_FOREIGN_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*(\\/|\\u[dD][89a-fA-F][0-9a-fA-F]{2})")
"""JSON escapes that the runtimes' parser does not support: an escaped slash, and a surrogate
pair."""


class UnreadableSpecError(ValueError):
    """The file does not contain a spec. The message is the end of a sentence that begins with the
    file."""


def parse_json(data: bytes) -> object:
    """Read a ``*.json`` file."""
    text = _decode(data)
    if found := _REFUSED.search(text):
        escape = f"\\u{ord(found[0]):04x}"
        raise UnreadableSpecError(
            f"has the character U+{ord(found[0]):04X} unescaped, which runtimes reject or drop; "
            f"write {escape}"
        )
    if found := _FOREIGN_ESCAPE.search(text):
        raise UnreadableSpecError(
            f"has the escape {found[1]}, which runtimes reject, because they parse JSON as YAML; "
            "write the character itself"
        )
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except UnreadableSpecError:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableSpecError(f"is not JSON: {error}") from error


def parse_yaml(data: bytes) -> object:
    """Read a ``*.yaml`` file as the reference library's parser does."""
    import yaml

    text = _decode(data)
    try:
        return yaml.load(text, Loader=_loader())  # noqa: S506 - made of SafeLoader
    except UnreadableSpecError:
        raise
    except Exception as error:
        # The parser also raises other errors than YAMLError, such as a KeyError for `!!bool x`.
        reason = re.sub(r"\s+", " ", str(error))
        raise UnreadableSpecError(f"is not YAML: {reason}") from error


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableSpecError(f"is not UTF-8 text: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_twice(name for name, _ in pairs)
    return dict(pairs)


def _refuse_twice(names: Iterable[str]) -> None:
    """Raise an error if a name occurs twice, because parsers use only one of its values."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UnreadableSpecError(f"has the field {shown(name)} twice in one object")
        seen.add(name)


def _constant(name: str) -> object:
    raise UnreadableSpecError(f"is not JSON: {name} is not a JSON number")


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Resolves values as the runtimes' parser does. SafeLoader implements YAML 1.1, which
        resolves more words to types other than string."""

        yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 - of the base class

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _refuse_twice(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            return cast("dict[Any, Any]", super().construct_mapping(node, deep=deep))

    def whole_number(loader: Any, node: Any) -> int:
        digits = loader.construct_scalar(node).replace("_", "")
        # Convert octal numbers from the form of YAML 1.1 (0660), which Python rejects.
        return int(re.sub(r"^([+-]?)0(?=[0-7])", r"\g<1>0o", digits), 0)

    loader: Any = Loader
    tag = "tag:yaml.org,2002:"
    for name, pattern in _WORDS.items():
        loader.add_implicit_resolver(f"{tag}{name}", re.compile(f"(?:{pattern})\\Z"), None)
    loader.add_constructor(f"{tag}int", whole_number)
    return loader


_WORDS = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "null": r"|~|null|Null|NULL",
    "int": r"[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN)",
    "merge": r"<<",
}
