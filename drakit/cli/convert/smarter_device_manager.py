"""
Reads the configuration of smarter-device-manager: a list of regular expressions of paths in /dev.

Each item has ``devicematch``, an expression that is not anchored by itself, and ``nummaxdevices``.
Every device is a resource of its own, ``smarter-devices/<path with underscores>``.

It must not know how a policy is written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drakit.cli.convert.documents import Document, Value, read_text
from drakit.cli.convert.regexes import Globs, UnsupportedRegexError, globs_of
from drakit.cli.convert.result import Converted, Remark, resource_name, sharing
from drakit.cli.convert.subsystems import nodes_below, subsystem_of

__all__ = ("read",)

_KNOWN = ("devicematch", "nummaxdevices", "subsystem", "writable")


def read(document: Document) -> Iterator[Converted | Remark]:
    """Read a list, a ConfigMap with ``conf.yaml``, or chart values with ``config``."""
    for item in _items(document):
        if not isinstance(item.content, dict):
            raise item.error("must be a mapping with devicematch")
        yield from _device(item)


def _items(document: Value) -> list[Value]:
    if isinstance(document.content, list):
        return document.items()
    if document.get("kind").content == "ConfigMap":
        texts = document.get("data").mapping()
        return [
            item
            for key in texts
            if key.endswith((".yaml", ".yml"))
            for item in read_text(document.get("data", key)).items()
        ]
    config = document.get("config")
    return (read_text(config) if isinstance(config.content, str) else config).items()


def _device(item: Value) -> Iterator[Converted | Remark]:
    match = item.get("devicematch")
    regex = match.text()
    if not regex:
        raise item.error("has no devicematch; write the regular expression of a path under /dev")
    for other in item.unknown(*_KNOWN):
        yield Remark(place=other.place, text="a policy has no field for it", is_missing=True)
    if regex == "nvidia-gpu":
        text = "GPUs of the Jetson family have no device node of their own"
        yield Remark(place=match.place, text=text, is_missing=True)
        return
    try:
        globs = globs_of(regex)
    except UnsupportedRegexError as error:
        text = f"no glob can express {regex!r}: {error}; write the matcher yourself"
        yield Remark(place=match.place, text=text, is_missing=True)
        return
    yield from _policy(item, match, globs)


def _policy(item: Value, match: Value, globs: Globs) -> Iterator[Converted | Remark]:
    matchers: dict[str, list[str]] = {}
    subsystem = item.get("subsystem").text()
    is_directory = False
    for text in globs.texts:
        below = nodes_below(f"/dev/{text}")
        is_directory = is_directory or below is not None
        path = below[1] if below else f"/dev/{text}"
        found = subsystem or (below[0] if below else subsystem_of(path))
        if not found:
            yield Remark(
                place=match.place,
                text=f"the subsystem of {path} is not known; find it on a node with "
                "'drakit node devices', and write the matcher yourself",
                is_missing=True,
            )
            return
        matchers.setdefault(found, []).append(path)
    if globs.is_bounded:
        text = "a glob cannot repeat a pattern: the paths match numbers of at most three digits"
        yield Remark(place=match.place, text=text)
    if globs.is_open:
        text = "a '*' matches within one directory; the expression also matched other directories"
        yield Remark(place=match.place, text=text)
    remarks: list[Remark] = []
    users = sharing(item.get("nummaxdevices").number(1), item.get("nummaxdevices").place, remarks)
    yield from remarks
    spec: dict[str, Any] = {
        "match": [{"subsystem": name, "paths": paths} for name, paths in matchers.items()],
        **({"group": "Unit"} if is_directory else {}),
        **users,
    }
    if not item.get("writable").flag(True):
        spec["container"] = {"permissions": "r"}
    if is_directory:
        text = "the whole directory was one device; the policy has one device for each unit"
        yield Remark(place=match.place, text=text)
    if len(globs.texts) == 1 and not any(sign in globs.texts[0] for sign in "*?["):
        resource = resource_name("smarter-devices", globs.texts[0].replace("/", "_"))
        if resource:
            spec["deviceClass"] = {"extendedResourceName": resource}
    else:
        text = (
            "each device was a resource of its own; pods claim any device of the policy's class, "
            "or select one by its attributes"
        )
        yield Remark(place=match.place, text=text)
    name = "".join(" " if c in "*?[]!^$" else c for c in globs.texts[0])
    yield Converted(name=name.partition(" ")[0] or "devices", place=item.place, spec=spec)
