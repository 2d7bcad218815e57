"""
The tests' side of a scripted driver: its script is written, its calls are read, on the host.

A script is a list of rules; the first that matches a call and is not used up decides its result. A
rule that hangs does so until it is no longer in the script. The stock beside it lists devices and
their health. The module does not depend on Kubernetes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Operation = Literal["prepare", "unprepare", "check"]
Moment = Literal["began", "ended", "failed", "canceled"]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The behavior of matching calls."""

    operation: Operation
    device: str | None = None
    """The calls for this device; None: for every one."""

    times: int | None = None
    """The number of calls that it applies to; None for all."""

    delay_seconds: float = 0
    hang: Literal["cooperative", "blocking"] | None = None
    """`blocking` holds the driver's thread, as a vendor's library does that knows no asyncio."""

    fail: str | None = None
    """The text of the error, raised after the delay."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, kw_only=True)
class Stock:
    """The devices that the driver reports."""

    shared: bool = False
    """Whether there is `shared-0`, too, whose 8 of `light` claims share."""

    step: str = "1"
    """The step of `shared-0`. The API server rejects one of 8 or more."""

    extra: Sequence[Mapping[str, Any]] = ()
    """Further devices: the fields of `drakit.Device` as JSON has them, right or wrong."""

    counter_sets: Sequence[Mapping[str, Any]] = ()
    """The counter sets that further devices consume: the fields of `drakit.CounterSet`."""

    health: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By device status, and perhaps message and evict_pods; other devices are healthy. Horns have
    none."""

    stop: str | None = None
    """The reason for which the stream ends. After a reconnect, the driver reports nothing until
    this is removed."""


def unwell(message: str = "it flickers", *, evict_pods: bool = False) -> dict[str, Any]:
    """The health of a device that is not well."""
    return {"status": "unhealthy", "message": message, "evict_pods": evict_pods}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A line that the driver wrote: a call at one of its moments."""

    moment: Moment
    at: float
    """The time, in seconds since 1970."""

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
        """Apply exactly these rules from now on."""
        self._write("script.json", [asdict(rule) for rule in rules])

    def stock(self, stock: Stock | None = None) -> None:
        """List these devices from now on; if none is given, the devices of the config, all
        healthy."""
        self._write("inventory.json", asdict(stock or Stock()))

    def forget(self) -> None:
        """No rules, the config's devices, and no calls so far."""
        self.play()
        self.stock()
        (self.folder / "calls.jsonl").unlink(missing_ok=True)

    def _write(self, name: str, content: Any) -> None:
        new = self.folder / f"{name}.new"
        new.write_text(json.dumps(content))
        new.replace(self.folder / name)

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
        """Return the cases in which a device was prepared for a claim while another claim had
        it."""
        return [line for line in self._lines() if line["moment"] == "overlap"]

    def held(self) -> set[str]:
        """The driver's side effects that are there: ``DEVICE@CLAIM UID``."""
        return {path.name for path in (self.folder / "held").glob("*/*")}
