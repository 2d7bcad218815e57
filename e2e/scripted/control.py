"""
The tests' side of a scripted driver: its script is written, its calls are read, on the host.

A script is a list of rules; the first that fits a call and is not used up says what the call does.
A rule that hangs does so until it is no longer in the script. It must not know Kubernetes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Operation = Literal["prepare", "unprepare", "check"]
Moment = Literal["began", "ended", "failed", "cancelled", "overlap"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What the calls do that fit."""

    operation: Operation
    device: str | None = None
    """The calls for this device; None: for every one."""

    times: int | None = None
    """For so many calls; None: for all of them."""

    delay_seconds: float = 0
    hang: Literal["cooperative", "blocking"] | None = None
    """`blocking` holds the driver's thread, as a vendor's library does that knows no asyncio."""

    fail: str | None = None
    """The text of the error, raised after the delay."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A line that the driver wrote: a call at one of its moments."""

    moment: Moment
    at: float
    """When, in seconds since 1970."""

    operation: Operation
    claim: str
    claim_uid: str
    rule: str | None
    device: str
    pool: str
    request: str
    share: str | None
    admin: bool
    capacity: dict[str, str]
    configs: list[dict]


class Script:
    """The folder of one scripted driver on one node, as this machine sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def play(self, *rules: Rule) -> None:
        """From now on, these rules and no others."""
        new = self.folder / "script.json.new"
        new.write_text(json.dumps([asdict(rule) for rule in rules]))
        new.replace(self.folder / "script.json")

    def forget(self) -> None:
        """No rules, and no calls so far."""
        self.play()
        (self.folder / "calls.jsonl").unlink(missing_ok=True)

    def _lines(self) -> Iterator[dict]:
        path = self.folder / "calls.jsonl"
        if not path.exists():
            return
        text = path.read_text()
        # The last line may be half written.
        for line in text[: text.rfind("\n") + 1].splitlines():
            yield json.loads(line)

    def calls(
        self,
        operation: Operation | None = None,
        moment: Moment | None = None,
        *,
        device: str | None = None,
        claim_uid: str | None = None,
    ) -> list[Call]:
        """The calls so far, oldest first, of an operation, a moment, a device, a claim."""
        calls = [Call(**line) for line in self._lines() if line["moment"] != "overlap"]
        return [
            call
            for call in calls
            if operation in (None, call.operation)
            and moment in (None, call.moment)
            and device in (None, call.device)
            and claim_uid in (None, call.claim_uid)
        ]

    def story(self, *, claim_uid: str | None = None, device: str | None = None) -> list[str]:
        """The calls in words: ``prepare began``, ``prepare ended``, ..."""
        return [
            f"{call.operation} {call.moment}"
            for call in self.calls(claim_uid=claim_uid, device=device)
        ]

    def overlaps(self) -> list[dict]:
        """Where a device was prepared for a claim while it was another's."""
        return [line for line in self._lines() if line["moment"] == "overlap"]

    def held(self) -> set[str]:
        """The driver's side effects that are there: ``DEVICE@CLAIM UID``."""
        return {path.name for path in (self.folder / "held").glob("*/*")}
