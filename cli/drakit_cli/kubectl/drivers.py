"""
``kubectl drakit drivers``: lists each driver with its nodes, pools, devices and problems.

The command computes them from the objects that the user is allowed to list. It does not need the
operator, which only adds the start times of problems. Does not depend on sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drakit_cli.kubectl.gather import Gathered
from drakit_cli.kubectl.output import Output
from drakit_explain.counts import STATES, Numbers, count
from drakit_explain.drivers import DriverState, Problem, driver_rows
from drakit_explain.model import DriverFacts
from drakit_explain.world import Name
from drakit_formats.resource.objects import children, text

_HEAD = (
    *("DRIVER", "VERSION", "NODES", "REGISTERED", "PUBLISHING", "POOLS", "INCOMPLETE"),
    *("FREE", "ALLOCATED", "TAINTED", "STATE", "SINCE"),
)

SHOWN = 3
"""Maximum number of problems to show for each driver in the list of all drivers. For a single
driver, all problems are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drivers:
    """The drivers of a cluster."""

    rows: tuple[DriverState, ...]
    devices: Mapping[str, Counter[str]]
    """The number of devices in each state, keyed by driver, for the drivers with the most
    devices."""

    found: Gathered
    all_problems: bool = False

    @property
    def fails(self) -> bool:
        return any(each.problems for each in self.rows)

    def body(self) -> dict[str, Any]:
        """Return the drivers as JSON."""
        return {
            "drivers": [self._body(each) for each in self.rows],
            "notEvaluated": [str(gap) for gap in self.found.gaps],
        }

    def show(self, output: Output) -> None:
        """Print the drivers."""
        if not self.rows:
            output.line("The cluster has no driver.")
        else:
            output.table(_HEAD, [self._cells(each) for each in self.rows])
        for row in self.rows:
            most = len(row.problems) if self.all_problems or output.wide else SHOWN
            lines = [each.message for each in row.problems[:most]]
            if rest := row.numbers.total() - len(lines):
                hint = "" if self.all_problems else f": run 'kubectl drakit drivers {row.name}'"
                lines.append(f"and {rest} more{hint}")
            output.lines(f"Problems of {row.name}", lines)
        output.lines("Not evaluated", (str(gap) for gap in self.found.gaps))

    def _facts(self, row: DriverState) -> DriverFacts | None:
        return self.found.world.of(DriverFacts).get(Name("", row.name))

    def _since(self, row: DriverState) -> str:
        """Return the start time of the problem that the operator reports, or an empty string."""
        facts = self._facts(row)
        conditions = children(facts.status, "conditions") if facts is not None else ()
        for each in conditions if row.problems else ():
            if text(each, "type") == "Ready" and text(each, "status") == "False":
                return text(each, "lastTransitionTime")
        return ""

    def _body(self, row: DriverState) -> dict[str, Any]:
        facts, devices = self._facts(row), self.devices.get(row.name)
        return {
            "name": row.name,
            "version": facts.version if facts is not None else "",
            "state": _state(row),
            "since": self._since(row),
            "nodes": {
                "desired": row.desired,
                "registered": None if row.unknown else row.registered,
                "publishing": row.publishing,
            },
            "pools": {"total": row.pools, "incomplete": row.incomplete, "empty": row.empty},
            "devices": None if devices is None else dict(devices),
            "claims": {"failing": row.stuck, "unreleased": row.unreleased},
            "problems": [_problem(each) for each in row.problems],
        }

    def _cells(self, row: DriverState) -> list[str]:
        body, devices = self._body(row), self.devices.get(row.name)
        numbers = [*body["nodes"].values(), row.pools, row.incomplete]
        return [
            *(row.name, body["version"]),
            *("unknown" if each is None else str(each) for each in numbers),
            *(str(devices[each]) if devices else "" for each in STATES[:3]),
            *(body["state"], body["since"]),
        ]


def _problem(of: Problem) -> dict[str, str]:
    fields = ("condition", "reason", "subject", "message", "node")
    return {key: value for key in fields if (value := getattr(of, key))}


def _state(row: DriverState) -> str:
    """Return the reason for the most serious problem."""
    return row.problems[0].reason if row.problems else "ready"


def find_drivers(found: Gathered, name: str | None) -> Drivers:
    """Return all drivers, or only the driver with the given name."""
    rows: dict[str, DriverState] = {}
    for _ in driver_rows(found.world, rows):
        pass
    numbers = Numbers()
    for _ in count(found.world, numbers):
        pass
    chosen: Sequence[DriverState] = [row for of, row in rows.items() if name in (None, of)]
    return Drivers(
        rows=tuple(chosen), devices=numbers.drivers, found=found, all_problems=name is not None
    )
