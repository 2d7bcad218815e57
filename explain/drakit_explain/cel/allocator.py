"""
Kubernetes' own allocator, of the cluster's release, asked whether an answer is certain.

The program of a minor release answers (``operator/cel``); where none is installed, nothing is
confirmed, and nothing is refuted.

It must not know what is done with an answer that is not confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from drakit_explain.cel.gates import DEFAULT_GATES
from drakit_explain.cel.helper import Helper, HelperError, find_release
from drakit_explain.confirmation import Confirmation, needed_of, unknown_fields
from drakit_explain.verdicts import VerdictOutcome
from drakit_formats.resource.objects import Object


class Result(StrEnum):
    """Whether Kubernetes' allocator confirms an answer."""

    AGREES = "agrees"
    DIFFERS = "differs"
    UNDECIDED = "undecided"
    """It has no answer, or an object has a field that drakit does not know."""

    UNAVAILABLE = "unavailable"
    """It cannot be asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmed:
    """The result of a question, and why it is no agreement, as a clause."""

    result: Result
    why: str = ""
    outdated: bool = False
    """Whether an object has changed since the answer was found, so that another one comes soon."""

    @property
    def refuted(self) -> bool:
        """Whether the answer that was to be confirmed is not certain."""
        return self.result in (Result.DIFFERS, Result.UNDECIDED)


class DeletedError(Exception):
    """An object of a question has been deleted since its answer was found."""


Reader = Callable[[str], Awaitable[Object | None]]
"""Reads an object by its path; None if it cannot be read. Raises :class:`DeletedError`."""


class Allocator:
    """
    Asks the program of the cluster's release.

    Not for threads, or for two questions at once; close it.
    """

    def __init__(self, find: Callable[[str], Path | None] = find_release) -> None:
        """
        :param find: returns the program of a minor release such as 1.37, if it is installed.
        """
        self._find = find
        self._helper: Helper | None = None
        self._release = ""
        self._gates: Mapping[str, bool] | None = None

    def use(self, gates: Mapping[str, bool] | None) -> None:
        """Allocate with these feature gates from now on; None means the defaults of the release."""
        self._gates = gates

    async def can_answer(self, asked: Confirmation) -> bool:
        """Return whether the allocator of the cluster's release is installed."""
        return asked.minor is not None and await self._helper_of(f"1.{asked.minor}") is not None

    def close(self) -> None:
        """End the program."""
        if self._helper is not None:
            self._helper.close()
        self._helper = None

    async def confirm(self, asked: Confirmation, read: Reader) -> Confirmed:
        """Ask whether Kubernetes' allocator finds the same."""
        if asked.minor is None:
            return _unavailable("the release of Kubernetes is unknown")
        release = f"1.{asked.minor}"
        helper = await self._helper_of(release)
        if helper is None:
            return _unavailable(f"the allocator of Kubernetes {release} is not installed")
        bodies: dict[str, Object] = {}
        for path in asked.paths():
            try:
                body = await read(path)
            except DeletedError:
                why = f"{path} has just been deleted"
                return Confirmed(result=Result.UNDECIDED, why=why, outdated=True)
            if body is None:
                return _unavailable(f"{path} cannot be read")
            bodies[path] = needed_of(body)
            del body  # it can be large, and the next one is read before it is replaced
        question = asked.question(bodies, self._gates_of(release))
        if unknown := unknown_fields(question):
            return Confirmed(result=Result.UNDECIDED, why=f"drakit does not know {unknown}")
        try:
            verdicts = await asyncio.to_thread(helper.verdicts, question)
        except HelperError as error:
            return _unavailable(str(error))
        for verdict in verdicts:
            if verdict.outcome is VerdictOutcome.UNDECIDED:
                return Confirmed(result=Result.UNDECIDED, why=verdict.text)
        if why := asked.refuted(verdicts):
            return Confirmed(result=Result.DIFFERS, why=why)
        return Confirmed(result=Result.AGREES)

    async def _helper_of(self, release: str) -> Helper | None:
        if release != self._release:
            self.close()
            program = await asyncio.to_thread(self._find, release)
            self._helper = Helper(program) if program is not None else None
            self._release = release
        return self._helper

    def _gates_of(self, release: str) -> Mapping[str, bool]:
        if self._gates is not None:
            return self._gates
        return dict.fromkeys(DEFAULT_GATES.get(release, ()), True)


def _unavailable(why: str) -> Confirmed:
    return Confirmed(result=Result.UNAVAILABLE, why=why)
