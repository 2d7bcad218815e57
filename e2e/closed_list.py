"""
The closed list of the operator's writes: reads the table in docs/reference/operator.md, and finds
writes in an audit log that the table does not list.

Does not depend on clusters or charts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from e2e.cluster.choice import REPOSITORY

PAGE = REPOSITORY / "docs/reference/operator.md"
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
QUESTIONS = "authorization.k8s.io"
"""The group of reviews, which the API server does not store."""

_ROW = re.compile(r"^\| `([a-z/]+)`[^|]*\| ([a-z, ]+) \| ([^|]*)\|$", re.MULTILINE)


class Write(NamedTuple):
    """A verb on a resource, or on a subresource such as ``pods/eviction``."""

    verb: str
    resource: str


@cache
def documented() -> Mapping[Write, frozenset[str]]:
    """Return the operator's writes, each with the chart values of which one must be set."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## Objects\n")
    return {
        Write(verb, resource): frozenset(re.findall("`(.+?)`", values))
        for resource, verbs, values in _ROW.findall(section.partition("\n## ")[0])
        for verb in verbs.split(", ")
    }


def undocumented(records: Iterable[Mapping[str, Any]]) -> set[Write]:
    """Return the operator's writes in an audit log that the page does not list."""
    return {
        Write(record["verb"], "/".join(filter(None, (of["resource"], of.get("subresource")))))
        for record in records
        if record["verb"] in WRITES
        and record.get("userAgent", "").startswith("drakit-operator")
        and (of := record["objectRef"]).get("apiGroup") != QUESTIONS
    } - documented().keys()
