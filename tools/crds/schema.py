"""
Converts a pydantic model to the structural schema of a CustomResourceDefinition.

The API server uses it to check types, bounds and patterns, and rules in CEL if a schema is not
enough. Problems that only the model detects are reported in the status of an object instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from pydantic import BaseModel

from tools.reference import docstrings

Schema = dict[str, Any]
Rules = Mapping[str, Sequence[tuple[str, str]]]
"""Rules in CEL, each with its error, keyed by the dotted path below the model (``match[].usb``)."""

_KEPT = (
    "type",
    "enum",
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minimum",
    "maximum",
    "required",
)


def structural(model: type[BaseModel], rules: Rules) -> Schema:
    """Return the schema of a model. Raises KeyError for a rule with an unknown path."""
    body = model.model_json_schema(by_alias=True)
    left = dict(rules)
    made = _Maker(body.get("$defs", {}), left).object(body, model, "")
    if left:
        raise KeyError(f"there are rules of unknown paths: {sorted(left)}")
    return made


class _Maker:
    def __init__(self, definitions: Mapping[str, Schema], rules: dict[str, Any]) -> None:
        self._definitions = definitions
        self._rules = rules

    def object(self, body: Schema, model: type[BaseModel], path: str) -> Schema:
        made: Schema = {"type": "object", "description": _text(inspect.getdoc(model))}
        properties: Schema = {}
        for name, field in model.model_fields.items():
            alias = field.alias or name
            below = f"{path}.{alias}" if path else alias
            inner = _models(field.annotation)
            entry = self.value(body["properties"][alias], inner[0] if inner else None, below)
            if text := docstrings.of_attribute(model, name):
                entry["description"] = _text(text)
            if (default := _default(body["properties"][alias].get("default"))) is not None:
                entry["default"] = default
            properties[alias] = entry
        made["properties"] = properties
        if body.get("required"):
            made["required"] = body["required"]
        self._add_rules(made, path)
        return made

    def value(self, body: Schema, model: type[BaseModel] | None, path: str) -> Schema:
        body = self._resolved(body)
        if model is not None and "properties" in body:
            return self.object(body, model, path)
        made: Schema = {key: body[key] for key in _KEPT if key in body}
        if "const" in body:
            made["enum"] = [body["const"]]
        if "exclusiveMaximum" in body:
            made["maximum"] = body["exclusiveMaximum"] - 1
        if made.get("type") == "integer":
            made["format"] = "int64"
            for bound in ("minimum", "maximum"):
                if made.get(bound) in (-(2**63), 2**63 - 1):
                    del made[bound]  # the API server reads bounds as floating point numbers
        if made.get("type") == "array":
            made["items"] = self.value(body["items"], model, f"{path}[]")
            made["x-kubernetes-list-type"] = "atomic"
        if made.get("type") == "object":
            self._add_entries(made, body, model, path)
        self._add_rules(made, path)
        return made

    def _add_entries(
        self, made: Schema, body: Schema, model: type[BaseModel] | None, path: str
    ) -> None:
        """Add the schema of a map's values. The patterns of its keys become a rule."""
        patterns: Schema = body.get("patternProperties", {})
        value: Schema = body.get("additionalProperties") or next(iter(patterns.values()))
        made["additionalProperties"] = self.value(value, model, f"{path}{{}}")
        names = body.get("propertyNames", {})
        rules: list[Schema] = []
        for pattern in [*patterns, *([names["pattern"]] if "pattern" in names else [])]:
            quoted = pattern.replace("\\", "\\\\").replace("'", "\\'")
            rules.append(
                {
                    "rule": f"self.all(key, key.matches('{quoted}'))",
                    "message": "a key contains an invalid character, or has an invalid form",
                }
            )
        if "maxLength" in names:
            limit = names["maxLength"]
            rules.append(
                {
                    "rule": f"self.all(key, key.size() <= {limit})",
                    "message": f"a key has more than {limit} characters",
                }
            )
        if rules:
            made["x-kubernetes-validations"] = rules

    def _add_rules(self, made: Schema, path: str) -> None:
        for rule, message in self._rules.pop(path, ()):
            made.setdefault("x-kubernetes-validations", []).append(
                {"rule": rule, "message": message}
            )

    def _resolved(self, body: Schema) -> Schema:
        """Resolve references. A nullable value becomes an optional one."""
        if "anyOf" in body:
            (body,) = [each for each in body["anyOf"] if each.get("type") != "null"]
        if "allOf" in body:
            (body,) = body["allOf"]
        if "$ref" in body:
            return self._resolved(self._definitions[body["$ref"].rpartition("/")[2]])
        return body


def _default(value: Any) -> Any:
    """Return the default that an object shows. None if the field stays unset."""
    if isinstance(value, Mapping):
        entries = cast("Schema", value).items()
        return {key: its for key, each in entries if (its := _default(each)) is not None} or None
    return None if value == [] else value


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _text(text: str | None) -> str:
    """Return a docstring as a description: plain text in paragraphs."""
    paragraphs = (text or "").replace("``", "`").split("\n\n")
    return "\n".join(" ".join(part.split()) for part in paragraphs)
