"""Backends that misbehave: each harms only itself, a device or a claim."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError
from drakit_formats.resource.inventory import check_inventory
from drakit_nodeplugin.endpoints.backend import claimcalls, connection
from drakit_nodeplugin.endpoints.backend.connection import EARLY_AT_ONCE, BackendEndpoint
from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.fakes.backend import FakeBackend, Refusal, device
from tests.fakes.direct import call
from tests.unit.endpoints.backend.conftest import CLAIM, GPU, OTHER, SECOND, call_both
from tests.unit.endpoints.camera import until

DRIVER = "driver gpu.example.com"
FAULT = "this is a bug in the backend"


MOST = pb.Edits(
    mounts=[
        pb.Mount(host_path="/a", container_path="/b", type="bind", options=["bind"])
        for _ in range(400)
    ],
    hooks=[pb.Hook(name="prestart", path="/bin/sh", args=["h", "i"], timeout_seconds=1)] * 66,
    intel_rdt=pb.IntelRdt(clos_id="a", schemata=["L3:0=f"] * 2),
)
"""A thousand entries of the kinds that contain others."""


def prepared(*claims: pb.PreparedClaim) -> pb.PrepareClaimsResponse:
    return pb.PrepareClaimsResponse(claims=claims)


def part(raw: bytes, number: int = 1) -> bytes:
    """Return bytes as a nested message in the field with this number."""
    size, length = len(raw), b""
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + raw


# ------------------------------------------------------------ its streams


BAD_LISTS = {
    "a-length-without-end": (b"\x0a" + b"\xff" * 10, "a malformed protobuf message"),
    "a-device-cut-off": (b"\x0a\x02\x0a\x05", "a malformed protobuf message"),
    "a-number-for-devices": (b"\x08\x01", "a malformed protobuf message"),
    "fallbacks-without-end": (b"\x1a\x00" * 2_000_000, "a message with more than 40,000 fields"),
    "too-many-devices": (b"\x0a\x00" * 20_000, "more than 16,384 devices"),
    "numbers-without-end": (b"\x78\x01" * 2_000_000, "a message with more than 40,000 fields"),
}


@pytest.mark.parametrize(("sent", "problem"), BAD_LISTS.values(), ids=BAD_LISTS)
async def test_a_message_that_is_no_inventory_ends_the_connection(
    served, backend, listener, sent, problem
):
    backend.send(sent)
    assert await listener.reason() == (
        f"its backend sent an invalid list of devices: {problem}; {FAULT}"
    )
    assert await listener.names() == ["gpu-0"], "it is connected again"


async def test_a_message_that_is_too_large_ends_the_connection(served, backend, listener):
    backend.send(b"\x0a" + bytes(5 * 1024 * 1024))
    assert await listener.reason() == (
        "its backend sent a response to WatchDevices that is larger than 4 MiB, or cannot receive "
        "a request of this size"
    )


async def test_a_flood_ends_the_connection(served, backend, listener):
    for count in range(1000):
        backend.send_devices(device(f"gpu-{count % 2}"))
    assert await listener.reason() == (
        f"its backend sent more than 100 messages a second; it must list its devices only after a "
        f"change; {FAULT}"
    )


async def test_a_short_burst_is_taken_and_its_last_message_counts(served, backend, listener):
    for count in range(150):
        backend.send_devices(device(f"gpu-{count}"))
    names = await listener.names()
    while names != ["gpu-149"]:
        names = await listener.names()
    assert len(listener.told) < 20


async def test_a_device_that_cannot_be_published_costs_itself_alone(served, backend, listener):
    backend.send_devices(
        device("good", attributes={"model": pb.Attribute(string="a")}),
        device("tainted", taints=[pb.Taint(key="gpu.example.com/lost")]),
        device("later", taints=[pb.Taint(key="gpu.example.com/lost", effect=77)]),
        device("empty", attributes={"model": pb.Attribute()}),
    )
    await listener.names()
    checked = check_inventory(listener.told[-1])
    assert [each.name for each in checked.devices] == ["good"]
    taint, effects = "taint 'gpu.example.com/lost'", "None, NoSchedule, NoExecute"
    assert checked.rejected == {
        "tainted": f"{taint} has the effect 'unspecified', which is none of {effects}",
        "later": f"{taint} has the effect '77', which is none of {effects}",
        "empty": "attribute 'model' is of type NoneType, which is neither a string, an integer, a "
        "boolean nor a Version",
    }


GARBAGE = {
    "garbage": (b"\x0a\xff\xff", "malformed protobuf message"),
    "numbers-without-end": (
        b"\x78\x01" * 2_000_000,
        "invalid health message: a message with more than 40,000 fields",
    ),
}


@pytest.mark.parametrize(("sent", "problem"), GARBAGE.values(), ids=GARBAGE)
async def test_garbage_of_health_leaves_the_devices_alone(
    served, backend, listener, caplog, sent, problem
):
    await until(lambda: backend.healths)
    backend.send_health(sent)
    await until(lambda: problem in problems(caplog))
    backend.send_devices(device("gpu-1"))
    assert await listener.names() == ["gpu-1"]
    assert served.unavailable() is None
    backend.send_health(pb.WatchHealthResponse(devices=[hot("gpu-1")]))
    assert await listener.unhealthy() == ["gpu-1"]
    assert len(backend.called("WatchHealth")) == 1, "the stream stays"


def hot(name: str) -> pb.DeviceHealth:
    health = pb.Health(status=pb.HEALTH_STATUS_UNHEALTHY, message="hot")
    return pb.DeviceHealth(name=name, health=health)


MALFORMED_HEALTH = {
    "cut-off": (b"\x0a\x05gpu-0\x1a\x01\x12", "the health of gpu-0: a malformed protobuf message"),
    "too-large": (
        b"\x0a\x05gpu-0" + b"\x12\x00" * 33_000,
        "the health of gpu-0: a message of more than 64 KiB",
    ),
    "no-name": (b"\x0a\x05", "the health of an unknown device: a malformed protobuf"),
}


@pytest.mark.parametrize(("sent", "problem"), MALFORMED_HEALTH.values(), ids=MALFORMED_HEALTH)
async def test_the_malformed_health_of_a_device_is_ignored_alone(
    served, backend, listener, caplog, sent, problem
):
    await until(lambda: backend.healths)
    backend.send_devices(*map(device, ("gpu-0", "gpu-1", "gpu-2")))
    while await listener.names() != ["gpu-0", "gpu-1", "gpu-2"]:
        pass
    healths = [part(hot(name).SerializeToString()) for name in ("gpu-1", "gpu-2")]
    backend.send_health(part(sent).join(healths))
    assert await listener.unhealthy() == ["gpu-1", "gpu-2"]
    assert problem in problems(caplog)
    assert len(backend.called("WatchHealth")) == 1, "the stream stays"


async def test_health_that_cannot_be_read_is_asked_for_again(
    served, backend, listener, monkeypatch, caplog
):
    def fail(message):
        raise RuntimeError

    monkeypatch.setattr(connection, "health_of", fail)
    await until(lambda: backend.healths)
    backend.send_health(pb.WatchHealthResponse(devices=[pb.DeviceHealth(name="gpu-0")]))
    await until(
        lambda: "prevented the node plugin from reading the stream of health" in problems(caplog)
    )
    assert served.unavailable() is None
    await until(lambda: len(backend.called("WatchHealth")) > 1)


def problems(caplog) -> str:
    return " ".join(str(getattr(record, "error", "")) for record in caplog.records)


NIC = (
    "the backend at DIR/gpu.sock is refused: it reports the name nic.example.com, but only "
    "gpu.example.com can register in the directory of backends.allowed.gpu; correct the entry, or "
    "remove the backend"
)


async def test_another_name_after_a_restart_is_refused(served, backend, found):
    await backend.stop()
    backend.driver = "nic.example.com"
    await backend.start()
    await until(lambda: found.notes == [NIC])
    assert served.unavailable() is not None
    assert found.directory.socket("gpu.example.com") is None


async def test_another_name_on_the_same_socket_is_refused(served, backend, found):
    async def info(request):
        return pb.GetInfoResponse(driver_name="nic.example.com")

    backend.info = info
    backend.send(None)
    await until(lambda: NIC in found.notes)
    assert served.unavailable() is not None
    assert "nic.example.com" not in found.appeared


# ------------------------------------------------------------ its calls


def answer_for(uid: str, *edits: pb.Edits) -> bytes:
    return prepared(pb.PreparedClaim(uid=uid, edits=edits)).SerializeToString()


BAD_ANSWERS_FOR_A_CLAIM = {
    "nothing": (b"", "nothing for this claim"),
    "twice-and-one-that-nobody-asked-about": (
        answer_for("uid-z", pb.Edits()) + answer_for("uid-a", pb.Edits()) * 2,
        "two results of PrepareClaims for this claim",
    ),
    "edits-of-too-many-devices": (
        answer_for("uid-a", pb.Edits(), pb.Edits()),
        "returned edits for more devices than the claim has",
    ),
    "edits-of-devices-without-end": (
        part(b"\x0a\x05uid-a" + b"\x12\x00" * 200_000),
        "with a message with more than 40,000 fields for this claim",
    ),
    "too-few": (answer_for("uid-a"), "0 Edits for 1 devices of a claim"),
    "options-without-end": (
        answer_for("uid-a", pb.Edits(mounts=[pb.Mount(options=["rw"] * 500)] * 2)),
        "returned more than 1,000 edits for a device",
    ),
    "edits-without-end": (
        answer_for("uid-a", pb.Edits(additional_gids=range(2000))),
        "returned more than 1,000 edits for a device",
    ),
    "garbage": (
        b"\x0a\x0c\x0a\x05uid-a\x12\x03\x0a\xff\xff",
        "malformed protobuf message for this claim",
    ),
}


@pytest.mark.parametrize(
    ("answer", "error"), BAD_ANSWERS_FOR_A_CLAIM.values(), ids=BAD_ANSWERS_FOR_A_CLAIM
)
async def test_an_unusable_answer_for_a_claim_fails_it_alone(
    served, backend, caplog, answer, error
):
    async def prepare(request):
        return answer + answer_for("uid-b", pb.Edits())

    backend.prepare = prepare
    fine, failed = await call_both(served.prepare, (OTHER, SECOND), (CLAIM, GPU))
    assert not isinstance(fine, BaseException), fine
    assert isinstance(failed, DeviceFailedError)
    assert str(failed).startswith(DRIVER)
    assert error in str(failed)
    assert ("for claims that were not requested" in problems(caplog)) == (b"uid-z" in answer)
    assert served.unavailable() is None


BAD_ANSWERS = {
    "garbage": (b"\xff" * 3, "responded to PrepareClaims with a malformed protobuf message"),
    "other-claims": (answer_for("uid-z") * 10, "more claims than were requested"),
    "numbers-without-end": (
        b"\x78\x01" * 1_000_000,
        "responded to PrepareClaims with a message with more than 40,000 fields",
    ),
    "more-than-a-message-may-have": (
        b"\x0a\x05" * 3 + bytes(4_500_000),
        "sent a response to PrepareClaims that is larger than 4 MiB",
    ),
}


@pytest.mark.parametrize(("answer", "error"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
async def test_an_unusable_answer_fails_all_claims(served, backend, answer, error):
    async def prepare(request):
        return answer

    backend.prepare = prepare
    for failed in await call_both(served.prepare, (OTHER, SECOND), (CLAIM, GPU)):
        assert isinstance(failed, DeviceFailedError)
        assert str(failed).startswith(DRIVER)
        assert error in str(failed)
    assert served.unavailable() is None


async def test_as_many_edits_as_can_be_are_taken(served, backend):
    async def prepare(request):
        return answer_for("uid-a", MOST) + answer_for("uid-b", MOST)

    backend.prepare = prepare
    results = await call_both(served.prepare, (OTHER, SECOND), (CLAIM, GPU))
    assert not [each for each in results if isinstance(each, BaseException)]


async def test_a_backend_that_dies_in_a_call_fails_it_as_stopped_and_the_next_one_works(
    served, backend, listener
):
    begun = asyncio.Event()

    async def prepare(request):
        begun.set()
        await asyncio.sleep(60)

    usual, backend.prepare = backend.prepare, prepare
    calling = asyncio.create_task(call(served.prepare, CLAIM, [GPU]))
    await begun.wait()
    await backend.stop()
    with pytest.raises(EndpointStoppedError) as caught:
        await calling
    assert str(caught.value) == (
        f"{DRIVER} is unavailable: the connection to its backend was lost; the kubelet retries "
        "the pod, and the node plugin restarts a driver that has ended"
    )
    backend.prepare = usual
    await backend.start()
    await until(lambda: served.unavailable() is None)
    assert len(await call(served.prepare, CLAIM, [GPU])) == 1


async def test_a_backend_that_answers_unavailable_is_not_taken_for_dead(
    served, backend, monkeypatch
):
    monkeypatch.setattr(claimcalls, "LOST_SECONDS", 0.05)

    async def prepare(request):
        raise Refusal(grpc.StatusCode.UNAVAILABLE, "the bus is busy")

    backend.prepare = prepare
    with pytest.raises(DeviceFailedError) as caught:
        await call(served.prepare, CLAIM, [GPU])
    assert str(caught.value) == (
        f"{DRIVER}: its backend failed in PrepareClaims: the bus is busy (unavailable)"
    )


async def test_a_late_answer_is_ignored(served, backend, monkeypatch):
    monkeypatch.setattr(claimcalls, "DEADLINE_SECONDS", 0.1)

    async def prepare(request):
        await asyncio.sleep(0.3)
        return prepared(pb.PreparedClaim(uid="uid-a", edits=[pb.Edits()]))

    usual, backend.prepare = backend.prepare, prepare
    with pytest.raises(DeviceFailedError) as caught:
        await call(served.prepare, CLAIM, [GPU])
    assert str(caught.value) == f"{DRIVER} did not respond to prepare_claims within 300 s"
    backend.prepare = usual
    (given,) = await call(served.prepare, CLAIM, [GPU])
    assert given.edits.env == {"GPU": "gpu-0"}


async def test_a_backend_without_prepare_fails_its_claims(served, backend):
    backend.prepare = None
    with pytest.raises(DeviceFailedError, match="its backend does not implement PrepareClaims"):
        await call(served.prepare, CLAIM, [GPU])


async def test_a_check_that_fails_is_an_error_of_its_claim(served, backend):
    async def check(request):
        raise Refusal(grpc.StatusCode.INTERNAL, "a bug")

    backend.check = check
    with pytest.raises(DeviceFailedError, match="a bug"):
        await call(served.check, CLAIM, [GPU])


@asynccontextmanager
async def given_up(
    served: BackendEndpoint, backend: FakeBackend
) -> AsyncGenerator[tuple[asyncio.Task[Any], asyncio.Event]]:
    """Abandon a prepare that the backend continues until it is released. Return the call, and the
    event that releases it."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    tasks: set[asyncio.Task[bool]] = set()

    async def prepare(request):
        # Like a handler that does not notice the end of its call.
        begun.set()
        task = asyncio.create_task(go_on.wait())
        tasks.add(task)
        await asyncio.shield(task)
        return prepared()

    backend.prepare = prepare
    calling = asyncio.create_task(call(served.prepare, CLAIM, [GPU]))
    await begun.wait()
    calling.cancel()
    try:
        yield calling, go_on
    finally:
        go_on.set()
        await asyncio.wait(tasks)
    assert calling.cancelled()


async def test_an_abandoned_call_ends_when_the_backend_has_ended_it(served, backend):
    async with given_up(served, backend) as (calling, go_on):
        await call(served.unprepare, OTHER, [SECOND])
        assert not calling.done()
        go_on.set()
        await asyncio.wait({calling})


async def test_an_abandoned_call_ends_at_its_deadline(served, backend, monkeypatch):
    monkeypatch.setattr(claimcalls, "DEADLINE_SECONDS", 0.2)
    async with asyncio.timeout(5), given_up(served, backend) as (calling, _):
        await asyncio.wait({calling})


async def test_an_abandoned_call_does_not_hold_the_end_of_its_connection(served, backend, listener):
    async with asyncio.timeout(5), given_up(served, backend) as (calling, _):
        backend.send(None)
        assert await listener.reason() == "its backend ended its stream of devices"
        await asyncio.wait({calling})
        assert await listener.names() == ["gpu-0"], "it is called again"
        await call(served.unprepare, CLAIM, [GPU])


async def test_a_backend_that_crashes_again_and_again_is_not_followed_each_time(
    slow_reconnect, backend, endpoint, listener
):
    for _ in range(EARLY_AT_ONCE + 1):
        await listener.names()
        await backend.stop()
        await listener.reason()
        await backend.start()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await listener.names()


# ------------------------------------------------------------ large ones


async def test_thousands_of_devices_do_not_keep_the_loop(served, backend, listener):
    def listing(changed: int) -> bytes:
        return pb.WatchDevicesResponse(
            devices=[
                device(
                    f"gpu-{count}",
                    attributes={
                        "model": pb.Attribute(string="m"),
                        "index": pb.Attribute(int=count + (changed if count == 5 else 0)),
                        "version": pb.Attribute(version="1.0.0"),
                    },
                    capacity={"memory": pb.Capacity(value="8Gi")},
                )
                for count in range(4_000)
            ]
        ).SerializeToString()

    gaps: list[float] = []

    async def watch():
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            gaps.append(time.thread_time() - began)

    first, second = listing(0), listing(1)
    watching = asyncio.create_task(watch())
    backend.send(first)
    assert len(await listener.names()) == 4_000
    before = listener.told[-1]
    backend.send(second)
    assert len(await listener.names()) == 4_000
    watching.cancel()
    after = listener.told[-1]
    kept = sum(old is new for old, new in zip(before.devices, after.devices, strict=True))
    assert kept == 3_999, "what did not change is as it was"
    # Of this thread's own time, and but for one in a hundred: a collection of garbage may be in it.
    assert sorted(gaps)[int(len(gaps) * 0.99)] < 0.01
