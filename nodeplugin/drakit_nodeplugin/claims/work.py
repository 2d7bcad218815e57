"""
The work on one claim and its result, the dependencies of the engine, and the steps that prepare and
unprepare share: waiting for drivers, error messages and log fields.

:mod:`.queue` decides when work on a claim starts; :mod:`.prepare` and :mod:`.unprepare` do the
work.

Does not depend on gRPC, HTTP or SQLite.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from drakit.device import AllocatedClaim, ClaimReference, PreparedDevice
from drakit.driver import Node
from drakit_driver.runtime.contract import (
    CALL_SECONDS,
    CallableEndpoint,
    CallError,
    CallOperation,
    overdue,
)
from drakit_driver.runtime.failures import BadParametersError, DeviceFailedError
from drakit_driver.runtime.order import Order, Place, hardware_keys
from drakit_formats.resource.claim import base_request
from drakit_nodeplugin.claims.allocation import allocated_claim
from drakit_nodeplugin.claims.errors import (
    BadParametersFailedError,
    CheckpointFailedError,
    ClaimBusyError,
    ClaimError,
    DeviceTakenError,
    DriverFailedError,
    NumberTakenError,
    OverAllocatedError,
    SpecFailedError,
)
from drakit_nodeplugin.claims.source import ApiClaims
from drakit_nodeplugin.config import OpaqueParameters
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.state.cdi_files import ClaimSpecs
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError, WriteOutcome
from drakit_nodeplugin.state.metadata_files import MetadataFiles
from drakit_nodeplugin.state.records import StoredClaim

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

FIRST_GROUP_SECONDS = 0.02
"""How long the first group of results waits for further calls to finish. The time doubles for each
subsequent group."""

LONGEST_GROUP_SECONDS = 1.0

Operation = Literal["prepare", "unprepare"]
"""The operation that the kubelet requests for a claim."""

Step = Literal["queue", "fetch", "wait", "driver", "checkpoint", "undo"]
"""
A step of a prepare, as a metric label: waiting for earlier work on the claim; reading from the API
server; waiting for unlisted devices or for calls for the same hardware; the driver call; writing
the checkpoint and CDI files; undoing an earlier allocation or a failed prepare.
"""

GERUND: Mapping[Operation, str] = {"prepare": "preparing", "unprepare": "unpreparing"}
"""The operation as a gerund, for messages."""


# ---------------------------------------------------------------- one claim's work


@dataclass(frozen=True, kw_only=True, slots=True)
class KubeletDevice:
    """A device of a prepared claim, in the form that the kubelet expects."""

    requests: tuple[str, ...]
    """The base names of the requests, without ``/subrequest``, because pods refer to requests by
    these names."""

    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    """Qualified CDI names (``vendor/class=name``): the plugin's own first, and then those from
    other CDI files."""

    share_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimResult:
    """The result for a claim: its devices, or the reason for the failure."""

    devices: tuple[KubeletDevice, ...] = ()

    prepared: tuple[PreparedDevice, ...] | None = field(default=None, compare=False)
    """The driver's results, in the order of `devices`. Empty if the driver returned only edits, and
    None if it was not called. They are not sent to the kubelet."""

    error: str | None = None
    """A message for the pod's Event. None on success."""

    reason: str | None = None
    """The reason for metrics and Events: one of a fixed set of words, without variable data. None
    on success."""

    had_status: bool | None = field(default=None, compare=False)
    """Whether the claim's status contained entries of this driver when the claim was read. None if
    the claim was not read."""

    renumbered: tuple[str, ...] = ()
    """A clause for each device whose device number changed while its claim was prepared."""


@dataclass(eq=False, kw_only=True, slots=True)
class ClaimWork:
    """One operation on one claim."""

    operation: Operation
    claim: ClaimReference
    again: bool = False
    """Whether a prepared claim is prepared again, because the edits of a device are outdated."""

    had_status: bool | None = None
    """See :attr:`ClaimResult.had_status`."""

    result: ClaimResult | None = None
    """The result. Set once, as soon as the work on this claim is done, even if its batch is not."""

    abandoned: bool = False
    """Whether an unprepare is waiting for this work. If so, the work must end soon, with an
    error."""

    on_abandon: Callable[[], object] | None = None
    """Ends the current wait. Set only while the work waits for something that can be abandoned."""

    on_result: Callable[[ClaimResult], None] | None = None
    """Called as soon as the result is set. Must return immediately, and must not raise."""

    finished: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Resolved once the result is set. Several calls may wait for it, so canceling one of them must
    not cancel the future."""

    step_seconds: dict[Step, float] = field(default_factory=dict[Step, float])
    """The time spent in each step so far, in seconds. Once the result is set, the sum is the
    duration of the work."""

    _step: Step = "queue"
    _step_began: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def begin_step(self, step: Step) -> None:
        """End the current step of the work, and begin another one."""
        now = asyncio.get_running_loop().time()
        seconds = now - self._step_began
        self.step_seconds[self._step] = self.step_seconds.get(self._step, 0.0) + seconds
        self._step, self._step_began = step, now

    def abandon(self) -> None:
        """Abandon the work, whether or not it has begun."""
        self.abandoned = True
        if self.on_abandon is not None:
            self.on_abandon()

    def finish(self, answer: ClaimResult) -> None:
        """Set the result of the claim."""
        if self.result is not None:
            raise asyncio.InvalidStateError("the claim already has a result")
        self.result = answer
        self.begin_step(self._step)
        if self.on_result is not None:
            self.on_result(answer)
        self.finished.set_result(None)

    def refuse(self, error: ClaimError) -> None:
        """Set an error as the result of the claim."""
        self.finish(ClaimResult(error=str(error), reason=error.reason))


# ---------------------------------------------------------------- dependencies


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimDependencies:
    """The dependencies of one driver's engine."""

    driver: str
    node: Node
    boot_id: str
    checkpoint: Checkpoint
    source: ApiClaims
    devices: CallableEndpoint
    order: Order
    inventories: DeviceManager
    specs: ClaimSpecs
    metadata: MetadataFiles
    limits: OpaqueParameters
    name_all_holders: bool = False
    """Whether errors, which the pod's owner can read, can name claims in other namespaces."""


# ---------------------------------------------------------------- shared steps


async def run_concurrently(works: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Run coroutines concurrently. A single coroutine does not need a task."""
    if len(works) == 1:
        return [await works[0]]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]


async def workers(
    work: Callable[[], Coroutine[Any, Any, None]], *, parallel: int, items: int
) -> None:
    """Run a worker that takes items from a shared queue, in at most `parallel` concurrent tasks."""
    async with asyncio.TaskGroup() as group:
        for _ in range(min(parallel, items)):
            group.create_task(work())


@dataclass(eq=False, kw_only=True, slots=True)
class _CallPlace(Place):
    """The place of a driver call in the queues for its hardware."""

    batch: Sequence[AllocatedClaim]


def waits_for_hardware(order: Order, uid: str) -> bool:
    """Return whether the driver call for a claim is waiting for another call."""
    return any(
        isinstance(place, _CallPlace)
        and place.behind > 0
        and any(item.claim.uid == uid for item in place.batch)
        for place in order.places()
    )


async def call_driver(
    parts: ClaimDependencies,
    operation: CallOperation,
    call: Callable[[Sequence[AllocatedClaim]], Coroutine[Any, Any, Mapping[str, ResultT]]],
    claims: Iterable[StoredClaim],
    on_results: Callable[[Mapping[str, ResultT | DeviceFailedError]], Coroutine[Any, Any, None]],
    *,
    works: Mapping[str, ClaimWork] = MappingProxyType({}),
) -> None:
    """
    Call the driver for claims. Each call waits for its turn among the calls for the same hardware.

    If the driver takes batches, all claims that need not wait share one call, which has one place
    for all of their hardware. Every other claim has a separate call.

    `on_results` is called with groups of results, keyed by UID. Calls that end at about the same
    time form one group, so that one transaction stores their results. A slow call delays the other
    results only briefly.
    """
    places: list[_CallPlace] = []
    for claim in claims:
        item = allocated_claim(claim)
        places.append(_CallPlace(keys=hardware_keys(item.devices), batch=(item,)))
    if len(places) > 1 and operation in parts.devices.traits.batches:
        free = [place for place in places if parts.order.is_free(place.keys)]
        together = _CallPlace(
            keys={key for place in free for key in place.keys},
            batch=[item for place in free for item in place.batch],
        )
        # First, enter the calls that need not wait, because the other calls may need the same
        # hardware.
        places = [*([together] if free else ()), *(each for each in places if each not in free)]
    for place in places:
        parts.order.enter(place)
    if len(places) == 1:  # a single call does not need a separate task
        try:
            results = await _call(parts, operation, call, places[0], works)
        finally:
            parts.order.leave(places[0])
        await on_results(results)
        return
    async with asyncio.TaskGroup() as group:
        calls: list[asyncio.Task[Mapping[str, ResultT | DeviceFailedError]]] = []
        for place in places:
            calls.append(group.create_task(_call(parts, operation, call, place, works)))
            calls[-1].add_done_callback(lambda _, place=place: parts.order.leave(place))
        running: Collection[asyncio.Task[Any]] = calls
        wait_seconds = FIRST_GROUP_SECONDS
        while running:
            only = len(running) == 1
            ended, running = await asyncio.wait(running, timeout=None if only else wait_seconds)
            wait_seconds = min(wait_seconds * 2, LONGEST_GROUP_SECONDS)
            if ended:
                results = [task.result() for task in calls if task in ended]
                await on_results({uid: each for result in results for uid, each in result.items()})


async def _call(
    parts: ClaimDependencies,
    operation: CallOperation,
    call: Callable[[Sequence[AllocatedClaim]], Coroutine[Any, Any, Mapping[str, ResultT]]],
    place: _CallPlace,
    works: Mapping[str, ClaimWork],
) -> Mapping[str, ResultT | DeviceFailedError]:
    """
    Make one call when it is its turn. The wait, or the call, is canceled when all of its claims are
    abandoned. The call is also canceled when it times out.

    A canceled call keeps its place until it has ended, because its cleanup may still undo changes,
    and the next call must not start before that.
    """
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(None if place.behind else CALL_SECONDS)
    batch = place.batch
    own = [work for item in batch if (work := works.get(item.claim.uid)) is not None]

    def abandon() -> None:
        if all(work.abandoned for work in own) and not limit.expired():
            limit.reschedule(loop.time())

    try:
        async with limit:
            for work in own:
                work.on_abandon = abandon
                work.begin_step("wait" if place.behind else "driver")
            if place.behind:
                if own:
                    abandon()
                await place.turn()
                for work in own:
                    work.begin_step("driver")
                limit.reschedule(loop.time() + CALL_SECONDS)
            if own and all(work.abandoned for work in own):  # the claims have just been abandoned
                raise TimeoutError
            return await call(batch)
    except TimeoutError:
        error = overdue(parts.driver, parts.devices.traits, operation, batch)
        return dict.fromkeys([item.claim.uid for item in batch], error)
    finally:
        for work in own:
            work.on_abandon = None


def prepared_devices(claim: StoredClaim, specs: ClaimSpecs) -> tuple[KubeletDevice, ...]:
    """
    Return the devices of an entry in the form that the kubelet expects.

    A container gets either all devices of a claim or those of one request. The kubelet does not
    deduplicate CDI names, so each request lists a name only once.
    """
    listed: set[tuple[str, str]] = set()
    devices: list[KubeletDevice] = []
    for index, device in enumerate(claim.devices):
        request = base_request(device.request)
        others = [name for name in device.cdi_devices if (request, name) not in listed]
        listed.update((request, name) for name in others)
        devices.append(
            KubeletDevice(
                requests=(request,),
                pool=device.pool,
                device=device.device,
                cdi_ids=(specs.cdi_id(claim.uid, index), *others),
                share_id=device.share_id,
            )
        )
    return tuple(devices)


def driver_failed(claim: StoredClaim, cause: CallError) -> DriverFailedError:
    """Return the error for a claim that the driver could not handle. The cause is chained."""
    bad = isinstance(cause, BadParametersError)
    index = cause.index if isinstance(cause, DeviceFailedError) else None
    error = (BadParametersFailedError if bad else DriverFailedError)(
        claim=str(claim),
        device=None if index is None else claim.devices[index],
        cause=str(cause),
    )
    error.__cause__ = cause
    return error


def not_stored(claim: StoredClaim | ClaimReference, error: CheckpointError) -> ClaimError:
    """Return the error for a claim that could not be stored or read."""
    return CheckpointFailedError(claim=str(claim), cause=str(error))


def refused(claim: StoredClaim, outcome: WriteOutcome, *, name_all_holders: bool) -> ClaimError:
    """
    Return the reason why a claim, or its CDI file, was not written.

    Unless `name_all_holders` is set, a holder in another namespace is identified only by its UID.
    """
    if claim.uid in outcome.file_errors:
        return SpecFailedError(claim=str(claim), cause=str(outcome.file_errors[claim.uid]))
    if (taken := outcome.taken.get(claim.uid)) is not None:
        own = taken.holder.uid == claim.uid
        return NumberTakenError(
            claim=str(claim),
            request=taken.device.request,
            device=taken.device.device,
            number=taken.number,
            held=taken.held,
            holder=None
            if own
            else _named(taken.holder, reader=claim, all_holders=name_all_holders),
        )
    held = outcome.held.get(claim.uid)
    if held is None:
        return ClaimBusyError(
            claim=str(claim), cause="the entry was removed from the checkpoint in the meantime"
        )
    request, device = held.device.request, held.device.device
    if held.holder is None:
        return OverAllocatedError(
            claim=str(claim), request=request, device=device, shortage=held.shortage or ""
        )
    return DeviceTakenError(
        claim=str(claim),
        request=request,
        device=device,
        holder=_named(held.holder, reader=claim, all_holders=name_all_holders),
        beside=None if held.shortage is None else (held.beside, held.shortage),
    )


def _named(holder: StoredClaim | ClaimReference, *, reader: StoredClaim, all_holders: bool) -> str:
    """Return how to refer to a claim in an error that is shown in an Event in the reader's
    namespace."""
    if all_holders or holder.namespace == reader.namespace:
        return str(holder)
    logger.info(
        "a claim waits for a device of a claim in another namespace",
        extra={"claim": str(reader), "claim_uid": reader.uid, "holder": str(holder)},
    )
    return f"{holder.uid} in another namespace"


def facts_of(driver: str, claims: Iterable[StoredClaim]) -> dict[str, str]:
    """Return the log fields that list all claims and their devices in one log line. One line per
    claim would cost more than the transaction."""
    listed = list(claims)
    return {
        "driver": driver,
        "claim": ", ".join(str(claim) for claim in listed),
        "claim_uid": ", ".join(claim.uid for claim in listed),
        "device": ", ".join(device.device for claim in listed for device in claim.devices),
    }
