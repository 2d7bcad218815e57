"""Events of the host: the events that request a scan, and the scans of a burst."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager

import pytest

from drakit_drivers.hostdev import HostDevices, events
from drakit_drivers.hostdev.events import HostEvents
from tests.fakes.node import StaticNode
from tests.fakes.sysfs import FakeHost, as_policies, policy

KERNEL = (0, 1)
ADD = b"add@/devices/virtual/misc/kvm\0ACTION=add\0SUBSYSTEM=misc\0SEQNUM=1\0"


class Uevents:
    """A netlink socket whose messages the test sends."""

    def __init__(self) -> None:
        self._ready, self._wake = socket.socketpair()
        self._messages: deque[tuple[bytes, tuple[int, int]] | OSError] = deque()

    def send(self, message: bytes | OSError = ADD, sender: tuple[int, int] = KERNEL) -> None:
        if not self._messages:
            self._wake.send(b"!")
        self._messages.append(message if isinstance(message, OSError) else (message, sender))

    def fileno(self) -> int:
        return self._ready.fileno()

    def recvfrom(self, _: int) -> tuple[bytes, tuple[int, int]]:
        if not self._messages:
            raise BlockingIOError
        message = self._messages.popleft()
        if not self._messages:
            self._ready.recv(1)
        if isinstance(message, OSError):
            raise message
        return message

    def close(self) -> None:
        self._ready.close()
        self._wake.close()


@pytest.fixture
def uevents(monkeypatch) -> Iterator[Uevents]:
    made = Uevents()
    monkeypatch.setattr(events, "_uevent_socket", lambda: made)
    yield made
    made.close()


@contextmanager
def listening(host: FakeHost, *subsystems: str) -> Iterator[HostEvents]:
    made = HostEvents(udev_root=host.udev, subsystems=lambda: set(subsystems))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("message", "sender", "is_due"),
    [
        pytest.param(ADD, KERNEL, True, id="the-kernel-adds-a-device"),
        pytest.param(ADD.replace(b"misc", b"net"), KERNEL, False, id="another-subsystem"),
        pytest.param(ADD, (4711, 1), False, id="a-process-pretends-to-be-the-kernel"),
        pytest.param(ADD, (0, 2), False, id="the-group-of-udev"),
        pytest.param(OSError(errno.ENOBUFS, "full"), KERNEL, True, id="lost-messages"),
        pytest.param(b"", KERNEL, True, id="a-message-without-subsystem"),
    ],
)
async def test_only_messages_of_the_kernel_about_policies_subsystems_call_for_a_scan(
    host, uevents, message, sender, is_due
):
    with listening(host, "misc") as made:
        uevents.send(message, sender)
        assert await made.wait(0.2) is is_due


async def test_a_change_of_udevs_database_calls_for_a_scan(host, uevents):
    with listening(host, "misc") as made:
        data = host.udev / "data"
        (data / "n7").write_text("E:ID_NET_NAME=veth1\n")
        (data / ".#c10:232aaaa").write_text("E:A=1\n")
        assert not await made.wait(0.1)
        os.rename(data / ".#c10:232aaaa", data / "c10:232")
        assert await made.wait(1)
        made.acknowledge()
        (data / "c10:232").unlink()
        assert await made.wait(1)


async def test_a_udev_daemon_that_starts_later_or_again_is_found(host, uevents):
    shutil.rmtree(host.udev)
    with listening(host, "misc") as made:
        for _ in range(2):
            (host.udev / "data").mkdir(parents=True)
            made.watch_udev()
            host.udev_entry("c10:232", "E:A=1")
            assert await made.wait(1)
            made.acknowledge()
            shutil.rmtree(host.udev)
            assert await made.wait(1)
            made.acknowledge()


async def test_without_the_socket_the_driver_scans_from_time_to_time(host, monkeypatch, caplog):
    def refused() -> socket.socket:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(events, "_uevent_socket", refused)
    with listening(host, "misc") as made:
        assert not await made.wait(0.05)
    assert "only full scans find devices" in caplog.text


async def test_a_socket_that_breaks_is_closed_and_logged_once(host, uevents, caplog):
    with listening(host, "misc") as made:
        uevents.send(OSError(errno.EIO, "broken"))
        uevents.send()
        assert await made.wait(0.2)
        assert uevents.fileno() == -1
    assert caplog.text.count("uevents of the kernel are no longer received") == 1


async def test_this_machine_has_the_socket(host):
    with listening(host, "misc") as made:
        made.notify()
        assert await made.wait(0)


def counting(host: FakeHost, **options) -> tuple[HostDevices, list[float], Callable[[], float]]:
    """A driver that records the times of its scans."""
    made = HostDevices(
        host.config({"misc": policy("misc", "/dev/k*")}, rescanInterval="1h", **options),
        StaticNode(name="node-1"),
    )
    scans: list[float] = []
    scan = made._host.scan

    def counted(*arguments, **facts):
        scans.append(now())
        return scan(*arguments, **facts)

    now = asyncio.get_running_loop().time
    made._host.scan = counted  # type: ignore[method-assign]
    return made, scans, now


@pytest.mark.looptime
async def test_a_device_is_published_within_a_second_after_it_was_plugged_in(host, uevents):
    made, _, now = counting(host)
    async with aclosing(made.devices()) as stream:
        assert (await anext(stream)).devices == []
        for index, pause in enumerate((0.0, 0.3, 60.0)):
            change = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(pause)
            host.device(f"virtual/misc/kvm{index}", f"10:{index}", node=True)
            uevents.send()
            plugged = now()
            assert len((await change).devices) == index + 1
            assert now() - plugged <= 1


@pytest.mark.looptime
async def test_a_thousand_events_in_a_burst_are_a_bounded_number_of_scans_and_inventories(
    host, uevents
):
    made, scans, _ = counting(host)
    inventories = 0

    async def consume() -> None:
        nonlocal inventories
        async with aclosing(made.devices()) as stream:
            async for _ in stream:
                inventories += 1

    consumer = asyncio.ensure_future(consume())
    await asyncio.sleep(5)
    assert (len(scans), inventories) == (1, 1)
    for index in range(1000):
        if index % 50 == 0:
            host.device(f"virtual/misc/k{index}", f"10:{index}")
        uevents.send()
    await asyncio.sleep(5)
    assert len(scans) <= 3
    for _ in range(1000):
        uevents.send()
        await asyncio.sleep(0.01)
    await asyncio.sleep(5)
    assert len(scans) <= 25
    assert inventories <= len(scans)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)


@pytest.mark.looptime
async def test_policies_that_change_are_in_force_within_a_second(host, uevents):
    host.device("virtual/misc/fuse", "10:229", node=True)
    made, _, now = counting(host)
    async with aclosing(made.devices()) as stream:
        assert (await anext(stream)).devices == []
        change = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(60)
        (fuse,) = as_policies({"fuse": policy("misc", "/dev/fuse")})
        made.apply_policies({"fuse": fuse})
        applied = now()
        inventory = await change
        assert [device.name for device in inventory.devices] == ["fuse-fuse"]
        assert now() - applied <= 1
        assert {each.policy: each.published for each in inventory.policies} == {
            "fuse": 1,
            "misc": 0,
        }
