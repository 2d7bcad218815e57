"""
An endpoint that is a Python driver: a vendor's class in a thread and event loop of its own.

Vendor code never runs in the loop that answers the kubelet: a driver that blocks, raises, or ends
its thread hurts only its own calls. What a thread cannot contain (crashes, code that holds the
GIL) needs a process of its own. One life of a driver is :mod:`.thread`, the way of its calls is
:mod:`.bridge`. What devices mean is the device manager's business.

It must not know claims beyond their identity, slices, gRPC or the kubelet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from drakit.device import AllocatedDevice, ClaimReference, Edits
from drakit.driver import DriverError
from drakit_nodeplugin.endpoints.bridge import (
    BridgeClosedError,
    CallNotBegunError,
    CallOverdueError,
)
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError, text_of
from drakit_nodeplugin.endpoints.thread import AnyDriver, DriverThread, InventoryListener
from drakit_nodeplugin.endpoints.traits import DriverTraits

__all__ = ("PythonEndpoint",)

logger = logging.getLogger(__name__)

CALL_SECONDS = 300.0
"""After which a call of a driver is cancelled, from its begin in the driver. It may wait as long
for an earlier call for its device. The kubelet is told long before that it goes on."""

START_SECONDS = 10.0
"""How long making a driver may take before the daemon goes on without it."""

CLOSE_SECONDS = 5.0
"""How long a driver may take to end; its thread does not hold the process up."""

RESTART_SECONDS = (1.0, 60.0)
"""First and longest delay before a driver that ended is started again; it doubles in between."""


class PythonEndpoint:
    """
    Runs one driver, again and again, and calls it.

    Calls run side by side, but those for one device one after the other, in the order in which they
    were made; a call that was cancelled or timed out counts until it has really ended.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], AnyDriver],
        *,
        traits: DriverTraits,
        listener: InventoryListener,
    ) -> None:
        self.name = name
        self.traits = traits
        self._make = make
        self._listener = listener
        self._run: DriverThread | None = None
        self._reason = "it is not started yet"

    async def start(self) -> None:
        """
        Start the driver once, before anything is served.

        Raises :class:`DriverError` if the driver refuses its configuration. Any other failure
        is treated as a stop, and :meth:`run` starts it again; a driver that is only slow is
        taken when it is ready.
        """
        run = self._run = DriverThread(self.name, self._make, self._listener)
        try:
            await run.start(timeout_seconds=START_SECONDS)
        except DriverError:
            self._run = None
            raise
        except TimeoutError:
            # Nothing can end its thread. Another beside it would hang as well, and a driver that
            # takes longer than this would never be there.
            self._stopped(f"it is still starting after {START_SECONDS:.0f} s")
            logger.error("driver is slow to start", extra={"driver": self.name})
        except Exception as error:
            self._run = None
            self._stopped(f"it could not be started: {error}")
            logger.exception("driver could not be started", extra={"driver": self.name})

    async def run(self) -> None:
        """Keep the driver running until cancelled."""
        delay, longest = RESTART_SECONDS
        while True:
            if self._run is not None:
                self._stopped(await self._run.ended())
                logger.error("driver stopped", extra={"driver": self.name, "reason": self._reason})
                if self._run.yielded:
                    delay = RESTART_SECONDS[0]
                self._run = None
            await asyncio.sleep(delay)
            delay = min(delay * 2, longest)
            try:
                await self.start()
            except DriverError as error:
                self._stopped(str(error))

    def _stopped(self, reason: str) -> None:
        self._reason = reason
        self._listener.stopped(reason)

    async def close(self) -> None:
        """Stop the driver; what is prepared stays prepared."""
        if self._run is not None:
            await self._run.stop(timeout_seconds=CLOSE_SECONDS)
            self._run = None
            self._reason = "the node plugin stops"

    # ------------------------------------------------------------ calls

    def away(self) -> EndpointStoppedError | None:
        """Say what a call would raise because the driver is stopped; None if it can be called."""
        run = self._run
        reason = self._reason if run is None or not run.started else run.stop_reason
        return None if reason is None else EndpointStoppedError(driver=self.name, reason=reason)

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> Edits:
        """Call the driver; raises DriverError and EndpointStoppedError, and nothing else."""
        answer = await self._call("prepare", device, lambda driver: driver.prepare(claim, device))
        if not isinstance(answer, Edits):
            raise DriverError(
                f"driver {self.name} answered prepare with {type(answer).__name__}, which is no "
                f"Edits; this is a fault of the driver"
            )
        return answer

    async def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        """Call the driver; raises DriverError and EndpointStoppedError, and nothing else."""
        await self._call("unprepare", device, lambda driver: driver.unprepare(claim, device))

    async def check(self, claim: ClaimReference, device: AllocatedDevice) -> bool:
        """
        Call the driver; raises EndpointStoppedError, and nothing else.

        A driver that fails to check does not know that all is well: that is False, too.
        """
        facts = {"driver": self.name, "claim_uid": claim.uid, "device": device.name}
        try:
            answer = await self._call("check", device, lambda driver: driver.check(claim, device))
        except DriverError as error:
            logger.warning("driver cannot check a device", extra=facts | {"error": str(error)})
            return False
        if not isinstance(answer, bool):
            text = f"it answered check with {type(answer).__name__}, which is no bool"
            logger.error("driver cannot check a device", extra=facts | {"error": text})
            return False
        return answer

    async def _call(
        self, what: str, device: AllocatedDevice, function: Callable[[AnyDriver], Any]
    ) -> Any:
        if (away := self.away()) is not None:
            raise away
        assert self._run is not None
        key = (device.pool, device.name)
        try:
            return await self._run.call(function, key=key, timeout_seconds=CALL_SECONDS)
        except DriverError:
            raise
        except BridgeClosedError as error:
            raise EndpointStoppedError(driver=self.name, reason=error.reason) from None
        except CallNotBegunError:
            raise DriverError(
                f"driver {self.name}: an earlier call for the device does not end, and {what} "
                f"waited {CALL_SECONDS:.0f} s for it; if it stays so, restart the node plugin on "
                f"this node"
            ) from None
        except CallOverdueError:
            raise DriverError(
                f"driver {self.name} gave no answer to {what} within {CALL_SECONDS:.0f} s"
            ) from None
        except Exception as error:
            logger.exception("driver failed", extra={"driver": self.name, "call": what})
            text = f"driver {self.name} failed in {what}: {type(error).__name__}: {text_of(error)}"
            raise DriverError(text) from error
