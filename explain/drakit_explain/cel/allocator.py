"""
Runs Kubernetes' own allocator, in the cluster's release, to determine whether claims fit.

There is a program for each minor version of Kubernetes (``operator/cel``), which runs the queries.
If the program is not installed, or does not return a result, the verdict is undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import orjson

from drakit_explain.cel.gates import DEFAULT_GATES
from drakit_explain.cel.helper import Helper, HelperError, find_release
from drakit_explain.queries import Query
from drakit_explain.verdicts import Verdict, VerdictOutcome

OLDEST_MINOR = min(int(each.removeprefix("1.")) for each in DEFAULT_GATES)


class Allocator:
    """
    Runs queries with the program of the cluster's release.

    Not thread-safe: runs one query at a time. Must be closed.
    """

    def __init__(self, find: Callable[[str], Path | None] = find_release) -> None:
        """
        :param find: returns the program for a minor version, such as 1.37, if it is installed.
        """
        self._find = find
        self._helper: Helper | None = None
        self._release = ""
        self._gates: Mapping[str, bool] | None = None
        self.problem: str = ""
        """The reason why the program did not run the last query, or did not return a result."""

    def use(self, gates: Mapping[str, bool] | None) -> bool:
        """Use these feature gates from now on. None means the defaults of the release. Return
        whether they differ from the previous ones."""
        changed = gates != self._gates
        self._gates = gates
        return changed

    def close(self) -> None:
        """Stop the program."""
        if self._helper is not None:
            self._helper.close()
        self._helper = None
        self._release = ""

    def answer(self, query: Query) -> Verdict:
        """Return the allocator's verdict. This may take seconds."""
        # If the release is unknown, use the newest installed allocator. If it is older than all
        # allocators, use the oldest one.
        releases = list(DEFAULT_GATES)[::-1]
        if (minor := query.minor) is not None:
            releases = [f"1.{max(minor, OLDEST_MINOR)}"]
        helper = self._helper_of(releases)
        if helper is None:
            return self._undecided(
                f"the allocator of Kubernetes {releases[0]}, which decides whether the claims fit, "
                f"is not installed"
            )
        try:
            (verdict,) = helper.verdicts(self._line(query), nodes=1)
        except HelperError as error:
            return self._undecided(str(error))
        self.problem = ""
        return verdict

    def _line(self, query: Query) -> bytes:
        gates = self._gates
        if gates is None:
            gates = dict.fromkeys(DEFAULT_GATES.get(self._release, ()), True)
        return query.body[:-1] + b',"gates":' + orjson.dumps(gates) + b"}"

    def _undecided(self, why: str) -> Verdict:
        self.problem = why
        return Verdict(outcome=VerdictOutcome.UNDECIDED, text=why)

    def _helper_of(self, releases: list[str]) -> Helper | None:
        if self._release not in releases:
            self.close()
            self._release = next((each for each in releases if self._find(each)), releases[0])
            program = self._find(self._release)
            self._helper = Helper(program) if program is not None else None
        return self._helper
