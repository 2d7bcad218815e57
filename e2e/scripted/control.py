"""
The tests' side of a scripted driver: writes its script and reads its calls, on the host.

A script is a list of rules. The first rule that matches a call and is not used up decides the
result. A hanging rule hangs until it is removed from the script. The stock lists devices and their
health.
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
    """The device of the calls. None for any device."""

    times: int | None = None
    """The number of calls to which the rule applies. None for all calls."""

    delay_seconds: float = 0
    hang: Literal["cooperative", "blocking"] | None = None
    """`blocking` holds the driver's thread, like a vendor's library that does not support
    asyncio."""

    fail: str | None = None
    """The error message, raised after the delay."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, kw_only=True)
class Stock:
    """The devices that the driver reports."""

    shared: bool = False
    """Whether there is also a device `shared-0`, whose 8 units of `light` claims share."""

    step: str = "1"
    """The step of `shared-0`. The API server rejects a step of 8 or more."""

    extra: Sequence[Mapping[str, Any]] = ()
    """Further devices: the fields of `drakit.Device` as JSON, valid or invalid."""

    counter_sets: Sequence[Mapping[str, Any]] = ()
    """The counter sets that further devices consume: the fields of `drakit.CounterSet`."""

    health: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By device: the status, and optionally message and evict_pods. Other devices are healthy.
    Horns do not report health."""

    stop: str | None = None
    """The reason why the stream ends. After a reconnect, the driver reports nothing until this
    field is removed."""


def unwell(message: str = "it flickers", *, evict_pods: bool = False) -> dict[str, Any]:
    """Return the health of an unhealthy device."""
    return {"status": "unhealthy", "message": message, "evict_pods": evict_pods}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A line in the driver's log: a call at one of its moments."""

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
    """The folder of one scripted driver on one node, as seen from this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def play(self, *rules: Rule) -> None:
        """Apply exactly these rules from now on."""
        self._write("script.json", [asdict(rule) for rule in rules])

    def stock(self, stock: Stock | None = None) -> None:
        """List these devices from now on. By default, the devices of the config, all healthy."""
        self._write("inventory.json", asdict(stock or Stock()))

    def forget(self) -> None:
        """Reset: no rules, the config's devices, and no recorded calls."""
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
        """Return the recorded calls, oldest first, filtered by operation, moment, device and
        claim."""
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
        """Return the calls in words: ``prepare began``, ``prepare ended``, ..."""
        return [
            f"{call.operation} {call.moment}"
            for call in self.calls(claim_uid=claim_uid, device=device)
        ]

    def overlaps(self) -> list[dict]:
        """Return the cases in which a device was prepared for a claim while another claim had
        it."""
        return [line for line in self._lines() if line["moment"] == "overlap"]

    def held(self) -> set[str]:
        """Return the driver's current side effects: ``DEVICE@CLAIM UID``."""
        return {path.name for path in (self.folder / "held").glob("*/*")}
