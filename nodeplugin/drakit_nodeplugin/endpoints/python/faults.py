"""
What a driver does wrong, as sentences: what it raises, and answers that are none.

Answers are vendors' objects, so they are looked at in the driver's thread. Which call an answer
belongs to is :mod:`drakit_nodeplugin.endpoints.calls`'s; that the text names claim and device as
well, the engine's.

It must not know event loops, or how a driver is called.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import cast

from drakit.device import AllocatedClaim, Edits
from drakit.driver import DriverError
from drakit_nodeplugin.endpoints.errors import (
    DeviceFailedError,
    kind_of,
    text_of,
    traceback_of,
)
from drakit_nodeplugin.endpoints.python.bridge import CallNotBegunError, CallOverdueError
from drakit_nodeplugin.endpoints.python.snapshot import snapshot_of

__all__ = ("DriverFaults", "kind_of")

logger = logging.getLogger(__name__)


class DriverFaults:
    """Says what one driver does wrong."""

    def __init__(self, driver: str, *, call_seconds: float) -> None:
        self._driver = driver
        self._call_seconds = call_seconds

    # ------------------------------------------------------------ what it raises

    def failed(self, error: Exception, *, what: str, index: int | None = None) -> DeviceFailedError:
        """Make a sentence of what was raised; `index` is the device that it is about."""
        if isinstance(error, DeviceFailedError):
            return error
        driver = f"driver {self._driver}"
        if isinstance(error, DriverError):
            # About one device its words stand alone; without one they name the driver.
            text = text_of(error) if index is not None else f"{driver}: {text_of(error)}"
        elif isinstance(error, CallNotBegunError):
            text = (
                f"{driver}: an earlier call for the device does not end, and {what} waited "
                f"{self._call_seconds:.0f} s for it; if it stays so, restart the node plugin on "
                f"this node"
            )
        elif isinstance(error, CallOverdueError):
            text = f"{driver} gave no answer to {what} within {self._call_seconds:.0f} s"
        else:
            facts = {"driver": self._driver, "call": what, "exception": traceback_of(error)}
            logger.error("driver failed", extra=facts)
            text = f"{driver} failed in {what}: {kind_of(error)}: {text_of(error)}"
        return DeviceFailedError(text, index=index)

    # ------------------------------------------------------------ what it answers

    def answered(self, what: str, answer: str, *, index: int | None = None) -> DeviceFailedError:
        """Say that an answer cannot be used."""
        return DeviceFailedError(
            f"driver {self._driver} answered {what} with {answer}; this is a fault of the driver",
            index=index,
        )

    def edits(self, answer: object, *, what: str, count: int) -> Sequence[Edits]:
        """Give the edits of a claim's devices; raises DeviceFailedError if they are none."""
        if not isinstance(answer, Sequence):
            raise self.answered(what, f"{kind_of(answer)}, which is no sequence of Edits")
        edits = tuple(cast("Sequence[object]", answer))
        ours = [
            self.one_edits(item, what=what, index=index) for index, item in enumerate(edits[:count])
        ]
        if len(edits) != count:
            raise self.answered(what, f"{len(edits)} Edits for {count} devices of a claim")
        return tuple(ours)

    def one_edits(self, answer: object, *, what: str, index: int) -> Edits:
        """Give the edits of a device as plain ones; raises DeviceFailedError if they are none."""
        if not isinstance(answer, Edits):
            raise self.answered(what, f"{kind_of(answer)}, which is no Edits", index=index)
        return snapshot_of(answer)

    def edits_or_error(
        self, answer: object, *, what: str, count: int
    ) -> Sequence[Edits] | Exception:
        """The same for one claim of several."""
        try:
            return self.edits(answer, what=what, count=count)
        except Exception as error:
            return self.failed(error, what=what)

    def answers(
        self, answer: object, claims: Sequence[AllocatedClaim], what: str
    ) -> Sequence[object]:
        """Give what was answered for each claim; an exception has become a DeviceFailedError."""
        if not isinstance(answer, Mapping):
            raise self.answered(what, f"{kind_of(answer)}, which is no mapping of claims")
        by_claim = dict(cast("Mapping[object, object]", answer))
        answers: list[object] = []
        for item in claims:
            if item.claim.uid not in by_claim:
                answers.append(self.answered(what, "nothing for this claim"))
                continue
            said = by_claim.pop(item.claim.uid)
            answers.append(self.failed(said, what=what) if isinstance(said, Exception) else said)
        if by_claim:
            text = f"it answered {what} for claims that it was not asked for"
            logger.error("driver answers too much", extra={"driver": self._driver, "error": text})
        return answers
