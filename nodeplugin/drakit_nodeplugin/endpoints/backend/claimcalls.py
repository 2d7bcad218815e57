"""
The calls for claims to a backend: the requests, and the parts of a response for each claim.

The fields of a response are counted, claim by claim, before they are parsed. If a part cannot be
parsed, only its claim fails. :mod:`drakit_driver.runtime.endpoint` creates the error messages that
apply to all claims of a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from drakit.device import (
    AllocatedClaim,
    Device,
    Edits,
    Inventory,
    PreparedDevice,
)
from drakit.driver import DriverError, ReleasePendingError
from drakit_daemon.logs import request_id
from drakit_driver.runtime.backend import (
    REQUEST_ID,
    attribute_message,
    json_of,
    message_of,
    value_of,
)
from drakit_driver.runtime.contract import CALL_SECONDS, ConnectionEndedError
from drakit_driver.runtime.failures import CallOverdueError, DeviceFailedError, printable
from drakit_driver.runtime.latest_value import LatestValue
from drakit_driver.runtime.parameters import merged
from drakit_driver.runtime.policies import PolicyFeed
from drakit_driver.runtime.snapshot import by_key
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.backend.convert import (
    MAX_EDITS,
    entries_of,
    prepared_of,
)
from drakit_nodeplugin.endpoints.wire import (
    MAX_MESSAGE_BYTES,
    CallFailedError,
    Client,
    GarbageError,
    Turns,
    parse,
    parts,
    split,
    to_its_end,
)
from drakit_proto.backend.v1 import backend_pb2 as pb

DEADLINE_SECONDS = CALL_SECONDS - 1.0
"""The deadline of a call. It is shorter than the caller's timeout, so that the backend notices the
timeout first. It also limits how long the claim of a deleted pod waits for a prepare."""

IN_LOOP_EDITS = 64
"""Maximum number of edits to check in the daemon's loop. Checking them takes less than a
millisecond, because the host's ``/dev`` is in memory. Using a thread would delay every claim."""

Published: TypeAlias = Mapping[tuple[str, str] | None, Device]
"""The devices that a backend last listed, keyed by pool and name."""

LOST_SECONDS = 1.0
"""Maximum time to wait for the end of a connection after a call that may not have reached the
backend."""

_CLAIMS = frozenset({1})
"""The number of the field that contains the claims. It is the same in all response types."""

_EDITS = pb.PreparedClaim.EDITS_FIELD_NUMBER
_OF_DEVICES = frozenset({_EDITS, pb.PreparedClaim.DEVICES_FIELD_NUMBER})

ResultT = TypeVar("ResultT")
_Reader: TypeAlias = Callable[[bytes, int, Turns], Awaitable[ResultT]]
"""Parses the response for one claim, given its number of devices. Raises GarbageError, or
DriverError if the claim failed."""


class BackendClaims:
    """Makes the calls over one connection to a backend. Implements :class:`.contract.Calls`."""

    def __init__(
        self,
        driver: str,
        client: Client,
        *,
        rights: Rights,
        latest: LatestValue[bytes],
        policies: PolicyFeed | None,
    ) -> None:
        """Create the calls. `latest` signals the end of the connection. `policies` is the feed of a
        driver that has policies."""
        self._policies = policies
        self._driver = driver
        self._client = client
        self._rights = rights
        self._latest = latest
        self.needs_claim_data = False
        """Whether the backend has reported that it needs claim data in addition to the devices."""
        self._listed: Inventory | None = None
        self._by_key: Published | None = None
        self._running = 0
        self.idle = asyncio.Event()
        """Set while no call is in flight."""
        self.idle.set()
        self._lacks: set[str] = set()
        """The optional methods that the backend is known not to implement."""

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | DeviceFailedError]:
        """See :meth:`.contract.Calls.prepare`."""
        answers = await self._ask("PrepareClaims", batch, _prepared)
        edits = [
            device.edits
            for answer in answers.values()
            if not isinstance(answer, DeviceFailedError)
            for device in answer
        ]
        if sum(map(entries_of, edits)) <= IN_LOOP_EDITS:
            results = _permitted(answers, self._rights)
        else:
            results = await asyncio.to_thread(_permitted, answers, self._rights)
        if self._policies is not None:
            self._policies.prepared_claims(batch, results)
        return results

    async def unprepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, DeviceFailedError | None]:
        """See :meth:`.contract.Calls.unprepare`."""
        answers = await self._ask_if_implemented("UnprepareClaims", batch, _unprepared)
        return {item.claim.uid: None for item in batch} if answers is None else answers

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """See :meth:`.contract.Calls.check`."""
        answers = await self._ask_if_implemented("CheckClaims", batch, _is_prepared)
        if answers is None:
            return {item.claim.uid: True for item in batch}
        return {uid: answer is True for uid, answer in answers.items()}

    async def _ask_if_implemented(
        self, method: str, batch: Sequence[AllocatedClaim], read: _Reader[ResultT]
    ) -> Mapping[str, ResultT | DeviceFailedError] | None:
        """Call an optional method. Return None if the backend does not implement it."""
        if method not in self._lacks:
            try:
                return await self._ask(method, batch, read)
            except _NotImplementedError:
                self._lacks.add(method)
        return None

    async def _ask(
        self, method: str, batch: Sequence[AllocatedClaim], read: _Reader[ResultT]
    ) -> Mapping[str, ResultT | DeviceFailedError]:
        """Call a method, and return the result for each claim in the response, keyed by UID."""
        published = self._published()
        # All request types have the same fields, so this one can be used for every method.
        request = pb.PrepareClaimsRequest(claims=[claim_message(each, published) for each in batch])
        half = len(batch) // 2
        try:
            if half and request.ByteSize() > MAX_MESSAGE_BYTES:
                raise _TooLargeError
            raw = await self._call(method, request.SerializeToString())
            counts = {item.claim.uid: len(item.devices) for item in batch}
            return await self._sort(raw, read, method=method, counts=counts)
        except _TooLargeError:
            if not half:
                raise
            # Split the batch: each claim is within its limits, but the batch as a whole is too
            # large.
            first = await self._ask(method, batch[:half], read)
            return {**first, **await self._ask(method, batch[half:], read)}
        except GarbageError as error:
            raise DriverError(_fault(f"responded to {method} with {error}")) from None

    def _published(self) -> Published | None:
        """Return the devices that the backend last listed, or None if it does not need the claim's
        data."""
        if self.needs_claim_data and self._by_key is None and self._listed is not None:
            self._by_key = by_key(self._listed)
        return (self._by_key or {}) if self.needs_claim_data else None

    async def _call(self, method: str, request: bytes) -> bytes:
        metadata = ((REQUEST_ID, request_id.get()),)
        self._running += 1
        self.idle.clear()
        calling = self._client.call(
            method, request, timeout_seconds=DEADLINE_SECONDS, metadata=metadata
        )
        try:
            return await to_its_end(calling)
        except CallFailedError as error:
            if error.may_be_lost:
                ended = await self._latest.ended_within(LOST_SECONDS)
                if ended is not None:
                    raise ConnectionEndedError(ended.reason) from None
            if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise CallOverdueError from None
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                raise _NotImplementedError(f"its backend {error}") from None
            if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise _TooLargeError(f"its backend {error}") from None
            raise DriverError(f"its backend {error}") from None
        finally:
            self._running -= 1
            if not self._running:
                self.idle.set()

    async def _sort(
        self, raw: bytes, read: _Reader[ResultT], *, method: str, counts: Mapping[str, int]
    ) -> Mapping[str, ResultT | DeviceFailedError]:
        """Parse the parts of a response, and assign them to their claims. Raises
        :class:`GarbageError`."""
        answers: dict[str, ResultT | DeviceFailedError] = {}
        turns = Turns()
        for number, (_, part) in enumerate(parts(raw, _CLAIMS, limit=len(raw))):
            if number > 2 * len(counts):
                raise GarbageError("more claims than were requested")
            await turns.give_way()
            uid = _uid_of(part)
            if uid is None or uid not in counts:  # the caller reports the problem
                answers[""] = self._failed(
                    "it returned a result for a claim that was not requested"
                )
                continue
            try:
                if uid in answers:
                    raise DriverError(_fault(f"returned two results of {method} for this claim"))
                answers[uid] = await read(part, counts[uid], turns)
            except GarbageError as error:
                answers[uid] = self._failed(
                    _fault(f"responded to {method} with {error} for this claim")
                )
            except DeviceFailedError as error:
                answers[uid] = error.alone()
            except DriverError as error:
                pending = isinstance(error, ReleasePendingError)
                answers[uid] = self._failed(str(error), pending=pending)
        return answers

    def _failed(self, text: str, *, pending: bool = False) -> DeviceFailedError:
        subject = f"driver {self._driver}"
        # Errors of Python drivers already begin with the subject.
        whole = text if text.startswith(subject) else f"{subject}: {text}"
        return DeviceFailedError(whole, pending=pending)


class _NotImplementedError(DriverError):
    """The backend does not implement the method."""


class _TooLargeError(DriverError):
    """A request or response exceeds the maximum message size."""


def _uid_of(part: bytes) -> str | None:
    """
    Return the UID in the response for a claim, without parsing the rest, or None if it cannot be
    read.

    Every response type contains the UID in the same field. :class:`pb.CheckedClaim` does not have
    list fields, so protobuf skips the list fields of the other responses.
    """
    try:
        return pb.CheckedClaim.FromString(part).uid
    except DecodeError:
        return None


async def _prepared(part: bytes, count: int, turns: Turns) -> Sequence[PreparedDevice]:
    # Parse each device separately. A device within its limits must not be rejected because of the
    # total size.
    found, rest = split(part, _OF_DEVICES)
    _raise_error(parse(pb.PreparedClaim, rest), count)
    every_edits = [each for number, each in found if number == _EDITS]
    devices = [each for number, each in found if number != _EDITS]
    if len(every_edits) > count:
        raise DriverError(_fault("returned edits for more devices than the claim has"))
    if devices and len(devices) != len(every_edits):
        raise DriverError(_fault("returned different numbers of devices and edits"))
    converted: list[PreparedDevice] = []
    for index, raw in enumerate(every_edits):
        edits = parse(pb.Edits, raw)
        if entries_of(edits) > MAX_EDITS:
            raise DriverError(_fault(f"returned more than {MAX_EDITS:,} edits for a device"))
        beside = parse(pb.PreparedDevice, devices[index]) if devices else None
        try:
            converted.append(prepared_of(value_of(edits, Edits), beside))
        except ValueError as error:
            raise DriverError(_fault(f"returned a device whose {error}")) from None
        await turns.give_way()
    return converted


async def _unprepared(part: bytes, count: int, turns: Turns) -> None:
    answer = parse(pb.UnpreparedClaim, part)
    _raise_error(answer, count, pending=answer.pending)


def _raise_error(
    answer: pb.PreparedClaim | pb.UnpreparedClaim, count: int, *, pending: bool = False
) -> None:
    """Raise the error in the response for a claim, if any. `count` is the claim's number of
    devices. A message about a single device does not need a subject."""
    if not answer.error:
        return
    text = printable(answer.error)
    if answer.HasField("failed_device") and answer.failed_device < count:
        raise DeviceFailedError(text, index=answer.failed_device, pending=pending)
    raise ReleasePendingError(text) if pending else DriverError(text)


async def _is_prepared(part: bytes, count: int, turns: Turns) -> bool:
    return parse(pb.CheckedClaim, part).prepared


def _permitted(
    answers: Mapping[str, Sequence[PreparedDevice] | DeviceFailedError], rights: Rights
) -> Mapping[str, Sequence[PreparedDevice] | DeviceFailedError]:
    """Replace each result whose edits the entry does not allow with an error. Blocks briefly."""

    def checked(
        answer: Sequence[PreparedDevice] | DeviceFailedError,
    ) -> Sequence[PreparedDevice] | DeviceFailedError:
        if isinstance(answer, DeviceFailedError):
            return answer
        for index, each in enumerate(answer):
            if (problem := rights.edits_problem(each.edits)) is not None:
                return DeviceFailedError(f"its backend {problem}", index=index)
        return answer

    return {uid: checked(answer) for uid, answer in answers.items()}


def _fault(text: str) -> str:
    return f"its backend {text}; this is a bug in the backend"


# ---------------------------------------------------------------- requests


def claim_message(item: AllocatedClaim, published: Published | None = None) -> pb.Claim:
    """Build the message for a claim, with the driver's pool names. `published` are the listed
    devices, for a backend that needs claim data."""
    devices = [
        message_of(
            device,
            pb.AllocatedDevice,
            configs=map(json_of, device.configs),
            parameters=json_of(merged(device.configs)),
        )
        for device in item.devices
    ]
    message = message_of(item.claim, pb.Claim, devices=devices)
    if published is not None:
        for device, each in zip(item.devices, message.devices, strict=True):
            listed = published.get((device.pool, device.name))
            if listed is not None:
                _set_attributes(each, listed)
        data = item.devices[0].claim_data if item.devices else None
        if data is not None:
            configs = [
                message_of(
                    config,
                    pb.ClaimConfig,
                    from_class=config.source == "FromClass",
                    parameters=json_of(config.parameters),
                )
                for config in data.configs
            ]
            message.data.CopyFrom(message_of(data, pb.ClaimData, configs=configs))
    return message


def _set_attributes(message: pb.AllocatedDevice, device: Device) -> None:
    for name, value in device.attributes.items():
        # If an attribute cannot be converted, leave its value empty: a device that was rejected
        # because of an attribute without a value can still be allocated.
        with suppress(TypeError):
            message.attributes[name].CopyFrom(attribute_message(value))
    for name, amount in device.capacity.items():
        message.capacity[name] = amount if isinstance(amount, str) else amount.value
