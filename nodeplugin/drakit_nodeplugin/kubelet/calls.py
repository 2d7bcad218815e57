"""
One call of the kubelet, whatever its version: checked, answered for every claim, logged in a line.

Claims that cannot be meant get an error of their own and never reach the engine. How the rest meets
work in flight is :mod:`.inflight`'s; how messages look is :mod:`.dra`'s.

It must not know gRPC, or how a claim is prepared.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from drakit import logs
from drakit.device import ClaimReference
from drakit_nodeplugin.claims.answers import ClaimService, Operation, PrepareAnswer
from drakit_nodeplugin.kubelet.inflight import InFlight

__all__ = ("ClaimCalls", "malformed")

logger = logging.getLogger(__name__)

_UID = re.compile(r"[A-Za-z0-9-]{1,128}")
"""A UID becomes part of file names and CDI device names."""

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")
"""A DNS subdomain, as the API server wants names; it becomes part of a URL."""


_MAX_ERROR_CHARACTERS = 4096
"""More than an Event shows, and far less than a message may hold: vendors write these texts."""


def malformed(claims: Sequence[ClaimReference]) -> Mapping[str, PrepareAnswer]:
    """Say of those claims that cannot be meant what is wrong with them, by UID."""
    times = Counter(claim.uid for claim in claims)
    answers: dict[str, PrepareAnswer] = {}
    for claim in claims:
        wrong = _wrong(claim, times=times[claim.uid])
        if wrong is not None and claim.uid not in answers:
            answers[claim.uid] = PrepareAnswer(
                error=f"the kubelet sent a claim {wrong}", reason="Malformed"
            )
    return answers


def _wrong(claim: ClaimReference, *, times: int) -> str | None:
    if not claim.uid:
        return f"without a UID (name {_shown(claim.name)})"
    if not _UID.fullmatch(claim.uid):
        return f"with an impossible UID: {_shown(claim.uid)}"
    for word, text in (("namespace", claim.namespace), ("name", claim.name)):
        if not text:
            return f"without a {word} (UID {claim.uid})"
        if not _NAME.fullmatch(text):
            return f"with an impossible {word}: {_shown(text)} (UID {claim.uid})"
    if times > 1:
        return f"{times} times in one call: {claim} (UID {claim.uid})"
    return None


def _sendable(answer: PrepareAnswer) -> PrepareAnswer:
    """Make sure of the error's text: what gRPC refuses would leave the whole call unanswered."""
    if answer.error is None:
        return answer
    text = answer.error.encode(errors="backslashreplace").decode()
    if len(text) > _MAX_ERROR_CHARACTERS:
        text = text[:_MAX_ERROR_CHARACTERS] + "..."
    return replace(answer, error=text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 64 else text[:64] + "...")


class ClaimCalls:
    """The calls of one driver, in all versions of the service: they share the work in flight."""

    def __init__(self, driver: str, claims: ClaimService, *, answer_seconds: float) -> None:
        self._driver = driver
        self._answer_seconds = answer_seconds
        self.in_flight = InFlight(claims, driver=driver)

    async def answer(
        self, operation: Operation, claims: Sequence[ClaimReference], *, method: str
    ) -> Mapping[str, PrepareAnswer]:
        """Answer every UID of a call exactly once."""
        with logs.request_scope(logs.new_request_id()):
            began = asyncio.get_running_loop().time()
            answers: Mapping[str, PrepareAnswer] | None = None
            try:
                answers = await self._answer(operation, claims)
                return answers
            finally:
                seconds = asyncio.get_running_loop().time() - began
                self._log(method, claims, answers, seconds=seconds)

    async def _answer(
        self, operation: Operation, claims: Sequence[ClaimReference]
    ) -> Mapping[str, PrepareAnswer]:
        bad = malformed(claims)
        for answer in bad.values():
            logger.warning(
                "claim refused", extra={"driver": self._driver, "error": str(answer.error)}
            )
        good = [claim for claim in claims if claim.uid not in bad]
        answers = await self.in_flight.ask(operation, good, timeout_seconds=self._answer_seconds)
        return {uid: _sendable(answer) for uid, answer in {**bad, **answers}.items()}

    def _log(
        self,
        method: str,
        claims: Sequence[ClaimReference],
        answers: Mapping[str, PrepareAnswer] | None,
        *,
        seconds: float,
    ) -> None:
        # Calls without claims are our own liveness probe: every few seconds, for ever.
        level = logging.INFO if claims else logging.DEBUG
        message = "call answered" if answers is not None else "call was given up by the kubelet"
        errors = [answer for answer in (answers or {}).values() if answer.error is not None]
        facts = {
            "driver": self._driver,
            "method": method,
            "claims": len(claims),
            "claim": ", ".join(str(claim)[:128] for claim in claims[:64]),
            "errors": len(errors),
            "seconds": round(seconds, 4),
        }
        logger.log(level, message, extra=facts)
