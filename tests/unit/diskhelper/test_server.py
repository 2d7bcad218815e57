"""The disk helper's socket: progress, outcomes, and clients that misbehave."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest

from drakit import DriverError
from drakit_drivers.diskhelper.disk import DiskBusyError, DiskError
from drakit_drivers.diskhelper.protocol import Answer, Request
from drakit_drivers.diskhelper.server import Server, Wipes
from drakit_drivers.hostdev.disk_helper import DiskHelper

WAIT_SECONDS = 10


class Drives:
    """Disks whose wipe ends when the test permits it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.wiped: list[tuple[str, int]] = []

    def check(self, number: str, sequence: int) -> None:
        if self.error is not None:
            raise self.error

    def wipe(self, number: str, sequence: int, *, progress: Callable[[str], None]) -> None:
        progress("40 % zeroed")
        self.begun.set()
        assert self.go_on.wait(WAIT_SECONDS)
        if self.error is not None:
            raise self.error
        self.wiped.append((number, sequence))


@pytest.fixture
def drives() -> Drives:
    return Drives()


@pytest.fixture
def path(drives, tmp_path):
    path = tmp_path / "helper.sock"
    server = Server(path, Wipes(drives), allowed_uid=os.geteuid())
    thread = threading.Thread(target=server.run)
    thread.start()
    yield path
    drives.go_on.set()
    server.close()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


CHECK = Request(operation="check", number="8:16", sequence=7)
WIPE = Request(operation="wipe", number="8:16", sequence=7)


def ended(helper: DiskHelper) -> Answer:
    for _ in range(1000):
        if (answer := helper.ask(WIPE)).outcome != "wiping":
            return answer
        threading.Event().wait(0.01)
    raise AssertionError("the wipe does not end")


def test_a_wipe_reports_its_progress_and_its_end_once(path, drives):
    helper = DiskHelper(path)
    assert helper.ask(WIPE).outcome == "wiping"
    assert drives.begun.wait(WAIT_SECONDS)
    assert helper.ask(WIPE) == Answer(outcome="wiping", detail="40 % zeroed")
    drives.go_on.set()
    assert ended(helper) == Answer(outcome="wiped")
    assert drives.wiped == [("8:16", 7)]
    assert ended(helper) == Answer(outcome="wiped")
    assert len(drives.wiped) == 2


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        pytest.param(DiskBusyError("it is open"), "busy", id="busy"),
        pytest.param(DiskError("it is gone"), "failed", id="gone"),
        pytest.param(RuntimeError("a bug"), "failed", id="bug"),
    ],
)
def test_a_wipe_that_fails_can_be_repeated(path, drives, error, outcome):
    drives.error = error
    drives.go_on.set()
    helper = DiskHelper(path)
    assert ended(helper).outcome == outcome
    drives.error = None
    assert ended(helper) == Answer(outcome="wiped")


def test_a_check_reports_a_disk_that_is_open_elsewhere(path, drives):
    helper = DiskHelper(path)
    assert helper.ask(CHECK) == Answer(outcome="free")
    drives.error = DiskBusyError("another program has it open exclusively")
    answer = helper.ask(CHECK)
    assert answer == Answer(outcome="busy", detail="another program has it open exclusively")


@pytest.mark.parametrize("sent", [b"\n", b"{" * 5000, b'{"operation": "wipe"}\n', b""])
def test_a_malformed_request_harms_no_other_client(path, sent):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert b"malformed" in client.recv(4096)
    assert DiskHelper(path).ask(CHECK).outcome == "free"


def test_another_user_gets_no_answer(tmp_path, drives):
    path = tmp_path / "other.sock"
    server = Server(path, Wipes(drives), allowed_uid=os.geteuid() + 1)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with pytest.raises(DriverError, match="does not answer"):
            DiskHelper(path).ask(CHECK)
    finally:
        server.close()
        thread.join(WAIT_SECONDS)


def test_only_the_owner_may_write_the_socket(path):
    assert path.stat().st_mode & 0o077 == 0


def test_a_missing_helper_is_an_error_that_names_the_container(tmp_path):
    with pytest.raises(DriverError, match="check the container disk-helper"):
        DiskHelper(tmp_path / "none.sock").ask(CHECK)
