"""Real disks: loop devices with files behind them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drakit_drivers.diskhelper.disk import DiskBusyError, DiskError, Disks

SIZE = 80 << 20
SECRET = b"the previous claim's secret"


@pytest.fixture
def loop(tmp_path) -> Iterator[Path]:
    """A loop device with data everywhere."""
    backing = tmp_path / "backing"
    with backing.open("wb") as file:
        file.write(SECRET * (SIZE // len(SECRET)))
        file.truncate(SIZE)
    attach = ["losetup", "--find", "--show", str(backing)]
    done = subprocess.run(attach, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this machine has no loop devices for this user: {done.stderr.strip()}")
    device = Path(done.stdout.strip())
    yield device
    # The flag would outlive the backing file.
    subprocess.run(["blockdev", "--setrw", str(device)], check=True)
    subprocess.run(["losetup", "--detach", str(device)], check=True)


@pytest.fixture
def disks() -> Disks:
    return Disks(dev_root=Path("/dev"), sys_root=Path("/sys"))


def facts(device: Path) -> tuple[str, int]:
    number = device.stat().st_rdev
    sequence = int(Path(f"/sys/block/{device.name}/diskseq").read_text())
    return f"{os.major(number)}:{os.minor(number)}", sequence


def test_a_wiped_disk_has_no_old_data(loop, disks):
    steps: list[str] = []
    disks.wipe(*facts(loop), progress=steps.append)
    assert loop.read_bytes() == bytes(SIZE)
    assert steps[0] == "0 % discarded"


def test_a_disk_that_cannot_discard_is_zeroed_completely(loop, disks, monkeypatch):
    monkeypatch.setattr("drakit_drivers.diskhelper.disk._discard", lambda *_: False)
    steps: list[str] = []
    disks.wipe(*facts(loop), progress=steps.append)
    assert loop.read_bytes() == bytes(SIZE)
    assert steps == ["0 % zeroed", "80 % zeroed"]


def check(disks: Disks, device: Path) -> None:
    disks.check(*facts(device))


def wipe(disks: Disks, device: Path) -> None:
    disks.wipe(*facts(device), progress=lambda _: None)


@pytest.mark.parametrize("operation", [check, wipe])
def test_a_disk_that_another_program_has_open_is_busy(
    loop, disks, operation: Callable[[Disks, Path], None]
):
    holder = os.open(loop, os.O_RDONLY | os.O_EXCL)
    try:
        with pytest.raises(DiskBusyError, match="has it open"):
            operation(disks, loop)
    finally:
        os.close(holder)
    assert loop.read_bytes().startswith(SECRET)
    operation(disks, loop)


def test_another_disk_with_the_same_number_is_not_touched(loop, disks):
    number, sequence = facts(loop)
    with pytest.raises(DiskError, match="another disk now has the device number"):
        disks.wipe(number, sequence - 1, progress=lambda _: None)
    assert loop.read_bytes().startswith(SECRET)


def test_a_disk_that_is_gone_is_named_as_such(disks):
    with pytest.raises(DiskError, match="it is no longer connected to the node"):
        disks.check("8:1048575", 1)


def test_a_read_only_disk_is_not_wiped(loop, disks):
    subprocess.run(["blockdev", "--setro", str(loop)], check=True)
    with pytest.raises(DiskError, match="cannot be"):
        wipe(disks, loop)
    assert loop.read_bytes().startswith(SECRET)
