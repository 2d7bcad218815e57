"""
What Ginkgo's JSON report tells about each spec.

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
    """Without the tags in brackets, whose order differs between releases."""

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
        """Whether it began: a filter can leave out specs. One that skips itself says why."""
        return self.state != "skipped" or bool(self.failure)

    @property
    def seconds(self) -> float:
        if self.started is None or self.ended is None:
            return 0
        return (self.ended - self.started).total_seconds()


def specs(report: Iterable[Mapping[str, Any]]) -> list[Spec]:
    """Return all specs of a report, those that did not run included, and failed hooks."""
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
    # Go's zero time is that of a spec that did not run.
    if not text or text.startswith("0001-"):
        return None
    # Go writes nanoseconds, Python reads microseconds.
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
