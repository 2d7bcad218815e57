"""Requests that no kubelet sends: the plugin answers with clear errors, and continues."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import string
from collections.abc import AsyncIterator

import grpc
import pytest

from drakit_nodeplugin.kubelet.server import local_channel
from drakit_proto.kubelet.dra.v1 import dra_pb2 as v1
from drakit_proto.kubelet.dra.v1beta1 import dra_pb2 as v1beta1
from tests.fakes.kubelet import FakeKubelet, reference
from tests.integration.test_node_plugin import rig  # noqa: F401

pytestmark = pytest.mark.timeout(180)

REQUESTS = 10_000
AT_ONCE = 50
SERVICES = (
    "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
    "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
)
METHODS = ("NodePrepareResources", "NodeUnprepareResources")
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.UNKNOWN,  # the response of grpcio to bytes that are not a message
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}
CHARACTERS = string.ascii_lowercase + string.digits + "-./\\\0\n ä€\U0001f600%{}=:"


def text(dice: random.Random) -> str:
    length = dice.choice([0, 1, 2, 8, 36, 63, 64, 128, 253, 254, 4000])
    return "".join(dice.choice(CHARACTERS) for _ in range(length))


def message(dice: random.Random) -> bytes:
    """Half of the requests are messages with malformed content, half are random bytes."""
    package = dice.choice([v1, v1beta1])
    uids = [text(dice), "uid-a", dice.choice(["../../etc/passwd", "uid-a\n", "UID-A", "a" * 129])]
    claims = [
        package.Claim(
            namespace=dice.choice(["lab", text(dice)]),
            name=dice.choice(["claim-uid-a", text(dice)]),
            uid=dice.choice(uids),
        )
        for _ in range(dice.choice([0, 1, 2, 5]))
    ]
    body = package.NodePrepareResourcesRequest(claims=claims).SerializeToString()
    match dice.randrange(4):
        case 0:
            return dice.randbytes(dice.choice([1, 10, 1000]))
        case 1 if body:
            broken = bytearray(body)
            for _ in range(dice.randint(1, 4)):
                broken[dice.randrange(len(broken))] = dice.randrange(256)
            return bytes(broken)
        case _:
            return body


async def send(channel, method: str, body: bytes) -> grpc.StatusCode:
    call = channel.unary_unary(method, request_serializer=None, response_deserializer=None)
    try:
        await call(body, timeout=60)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@contextlib.asynccontextmanager
async def read_on(stream: asyncio.StreamReader) -> AsyncIterator[None]:
    """Read a pipe to its end: a process blocks if its log is not read."""

    async def read() -> None:
        while await stream.read(1 << 16):
            pass

    task = asyncio.create_task(read())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_ten_thousand_malformed_requests_do_not_affect_the_process_and_its_claims(rig):  # noqa: F811
    dice = random.Random(20260101)
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process, read_on(process.stderr):
        await rig.until(lambda: kubelet.sockets() and rig.published())
        dra = await kubelet.register()
        before = (await kubelet.prepare(dra, reference("uid-a")))["uid-a"]
        assert before.error == ""
        codes: set[grpc.StatusCode] = set()
        async with local_channel(dra) as channel:
            for _ in range(REQUESTS // AT_ONCE):
                codes.update(
                    await asyncio.gather(
                        *(
                            send(
                                channel,
                                f"/{dice.choice(SERVICES)}/{dice.choice([METHODS[0], *METHODS])}",
                                message(dice),
                            )
                            for _ in range(AT_ONCE)
                        )
                    )
                )
        assert codes <= EXPECTED, codes
        assert grpc.StatusCode.OK in codes
        assert process.returncode is None
        # uid-a was unprepared and prepared by some of them; what it says now is as at first.
        again = (await kubelet.prepare(dra, reference("uid-a")))["uid-a"]
        assert again == before
        assert await kubelet.unprepare(dra, reference("uid-a")) == {"uid-a": ""}
        assert rig.files() == set()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0


@pytest.mark.parametrize(
    ("body", "code"),
    [
        pytest.param(
            v1.NodePrepareResourcesRequest(
                claims=[v1.Claim(namespace="lab", name="n", uid="u" * (4 * 2**20 - 100))]
            ),
            grpc.StatusCode.RESOURCE_EXHAUSTED,  # the response names the claim, so it is too long
            id="one-claim-of-four-mebibytes",
        ),
        pytest.param(
            v1.NodePrepareResourcesRequest(
                claims=[v1.Claim(namespace="lab", name="n", uid=str(i)) for i in range(190_000)]
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            id="four-mebibytes-of-claims",
        ),
        pytest.param(
            v1.NodePrepareResourcesRequest(
                claims=[v1.Claim(namespace="lab", name="n", uid="u" * (4 * 2**20))]
            ),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            id="more-than-grpc-takes",
        ),
    ],
)
async def test_a_huge_request_is_answered_and_the_process_continues(rig, body, code):  # noqa: F811
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: kubelet.sockets())
        dra = await kubelet.register()
        (registration,) = kubelet.sockets()
        async with local_channel(dra) as channel:
            sent = asyncio.create_task(
                send(channel, f"/{SERVICES[0]}/{METHODS[0]}", body.SerializeToString())
            )
            # The kubelet waits a second for this, whatever else is asked.
            await kubelet.get_info(registration)
            assert await sent == code
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error == ""
        assert process.returncode is None
