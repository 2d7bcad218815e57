"""
Reads the result of each spec from Ginkgo's JSON report.

Does not depend on drakit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

TAG = re.compile(r"\s*\[[^\]]*\]")
NAMESPACE = re.compile(r'(?:Destroying namespace|Created namespace) "?([a-z0-9-]+)')

DRIVER_LABEL = "Feature:DynamicResourceAllocation"
"""The specs with this label need a driver on a node."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One spec of a run."""

    name: str
    """The name without the tags in brackets, whose order differs between releases."""

    labels: frozenset[str]
    state: str
    """passed, failed, skipped, pending, ..."""

    started: datetime | None
    ended: datetime | None
    namespaces: frozenset[str] = frozenset()
    failure: str = ""

    @property
    def needs_driver(self) -> bool:
        return DRIVER_LABEL in self.labels

    @property
    def ran(self) -> bool:
        """Whether the spec began. Filters can exclude specs. A spec that skips itself states the
        reason."""
        return self.state != "skipped" or bool(self.failure)

    @property
    def seconds(self) -> float:
        if self.started is None or self.ended is None:
            return 0
        return (self.ended - self.started).total_seconds()


def specs(report: Iterable[Mapping[str, Any]]) -> list[Spec]:
    """Return all specs of a report, including those that did not run, and failed hooks."""
    return [
        _spec(body)
        for suite in report
        for body in suite["SpecReports"] or ()
        if body["LeafNodeType"] == "It" or body["State"] not in ("passed", "skipped")
    ]


def _spec(body: Mapping[str, Any]) -> Spec:
    parts = [*(body.get("ContainerHierarchyTexts") or ()), body["LeafNodeText"]]
    failure: Mapping[str, Any] = body.get("Failure") or {}
    return Spec(
        name=TAG.sub("", " ".join(filter(None, parts))).strip() or body["LeafNodeType"],
        labels=frozenset(_labels(body)),
        state=body["State"],
        started=_time(body.get("StartTime")),
        ended=_time(body.get("EndTime")),
        namespaces=frozenset(NAMESPACE.findall("\n".join(_texts(body)))),
        failure=failure.get("Message", "").strip(),
    )


def _labels(body: Mapping[str, Any]) -> Iterator[str]:
    for labels in (*(body.get("ContainerHierarchyLabels") or ()), body.get("LeafNodeLabels")):
        yield from labels or ()


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    yield body.get("CapturedGinkgoWriterOutput") or ""
    for event in body.get("SpecEvents") or ():
        yield event.get("Message") or ""


def _time(text: str | None) -> datetime | None:
    # A spec that did not run has Go's zero time.
    if not text or text.startswith("0001-"):
        return None
    # Go writes nanoseconds, Python reads microseconds.
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
