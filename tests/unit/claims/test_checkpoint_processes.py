"""Two processes on one database, as in a rolling update: real processes, in random order."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from tests.fakes.checkpoints import reopen, stored_claim, stored_device

PROLOGUE = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from drakit_nodeplugin.state.checkpoint import Checkpoint, CheckpointError
from tests.fakes.checkpoints import stored_claim, stored_device

def say(text):
    sys.stdout.write(f"{text}\\n")
    sys.stdout.flush()

async def run(main):
    checkpoint = Checkpoint(Path(sys.argv[1]), owner=sys.argv[2])
    await checkpoint.open()
    say("open")
    await main(checkpoint)
    await checkpoint.close()
"""


class Process:
    """A Python process that has the checkpoint open, and prints line by line."""

    def __init__(self, path, name, program):
        command = [sys.executable, "-c", PROLOGUE + program, str(path), name]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self):
        return self.process.stdout.readline().strip()

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        """Wait for its end; return the output since the last call."""
        printed = self.process.stdout.read()
        assert self.process.wait(timeout=25) == 0
        return printed.split()


@pytest.fixture
def start(tmp_path):
    path = tmp_path / "camera.example.com" / "checkpoint.db"
    running = []

    def start(name, program):
        running.append(Process(path, name, program))
        return running[-1]

    start.path = path
    yield start
    for process in running:
        process.process.kill()
        process.process.communicate()


INCREMENT = """
async def main(checkpoint):
    sys.stdin.readline()
    done = 0
    while done < 100:
        claim = (await checkpoint.find(["uid-a"]))["uid-a"]
        more = replace(claim, cdi_spec=str(int(claim.cdi_spec) + 1))
        done += len((await checkpoint.write([more])).written)
    say(done)

asyncio.run(run(main))
"""


async def test_no_write_is_lost_between_two_processes(start):
    checkpoint = Checkpoint(start.path)
    await checkpoint.open()
    await checkpoint.write([stored_claim("a", cdi_spec="0")])
    processes = [start(name, INCREMENT) for name in ("one", "two")]
    assert [process.hear() for process in processes] == ["open", "open"]
    for process in processes:
        process.go_on()

    assert [process.end() for process in processes] == [["100"], ["100"]]

    assert (await checkpoint.find(["uid-a"]))["uid-a"].cdi_spec == "200"
    await checkpoint.close()


RACE = """
async def main(checkpoint):
    sys.stdin.readline()
    for number in range(50):
        wanted = stored_claim(f"{sys.argv[2]}-{number}", devices=(stored_device(f"cam-{number}"),))
        outcome = await checkpoint.write([wanted])
        say(sys.argv[2] if outcome.written else outcome.held[wanted.uid].holder.owner)

asyncio.run(run(main))
"""


async def test_a_device_has_one_holder_among_three_processes(start):
    processes = [start(name, RACE) for name in ("one", "two", "three")]
    for process in processes:
        assert process.hear() == "open"
    for process in processes:
        process.go_on()

    holders = [process.end() for process in processes]

    assert holders[0] == holders[1] == holders[2]
    assert len(holders[0]) == 50
    claims, _ = await reopen(start.path)
    assert len(claims) == 50


BESIDE = """
async def main(checkpoint):
    sys.stdin.readline()
    for number in range(50):
        share = {"share_id": sys.argv[2]} if sys.argv[2] != "alone" else {}
        devices = (stored_device(f"cam-{number}", **share),)
        await checkpoint.write([stored_claim(f"{sys.argv[2]}-{number}", devices=devices)])

asyncio.run(run(main))
"""


async def test_a_device_has_one_holder_or_shares_among_three_processes(start):
    processes = [start(name, BESIDE) for name in ("alone", "share-1", "share-2")]
    for process in processes:
        assert process.hear() == "open"
    for process in processes:
        process.go_on()
    for process in processes:
        process.end()

    claims, _ = await reopen(start.path)

    holders = {f"cam-{number}": set() for number in range(50)}
    for claim in claims.values():
        holders[claim.devices[0].device].add(claim.name.rpartition("-")[0])
    for held in holders.values():
        assert held in ({"alone"}, {"share-1", "share-2"})


ONCE = """
async def main(checkpoint):
    say("waits")
    sys.stdin.readline()

asyncio.run(run(main))
"""


async def test_work_without_an_intent_is_refused_once_another_process_has_opened_it(start):
    checkpoint = Checkpoint(start.path)
    await checkpoint.open()
    straight = stored_claim("a", state="prepared")
    (first,) = (await checkpoint.write([straight])).written.values()
    other = start("other", ONCE)
    assert [other.hear(), other.hear()] == ["open", "waits"]

    outcome = await checkpoint.write([stored_claim("b", state="prepared"), replace(first)])

    assert outcome.fenced == {"uid-b"}
    assert set(outcome.written) == {"uid-a"}
    assert not checkpoint.alone
    other.go_on()
    other.end()
    # That one is gone, but what it has undone stays undone.
    assert (await checkpoint.write([stored_claim("b", state="prepared")])).fenced == {"uid-b"}
    begun = (await checkpoint.write([stored_claim("b")])).written["uid-b"]
    assert (await checkpoint.write([replace(begun, state="prepared")])).fenced == set()
    await checkpoint.close()


WRITE = """
async def main(checkpoint):
    number = 0
    stopped = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    while not stopped.done():
        claim = stored_claim(f"{sys.argv[2]}-{number}")
        try:
            if (await checkpoint.write([claim])).written:
                say(claim.uid)
            number += 1  # fenced: it was written, but could not be answered
        except CheckpointError:
            await asyncio.sleep(0)

asyncio.run(run(main))
"""


async def test_nothing_that_was_answered_is_lost_when_another_process_sets_the_file_aside(start):
    checkpoint = Checkpoint(start.path)
    await checkpoint.open()
    await checkpoint.write([stored_claim(f"victim-{number}") for number in range(5)])
    await checkpoint.close()
    processes = [start(name, WRITE) for name in ("one", "two")]
    for process in processes:
        assert process.hear() == "open"
    printed = {process.hear() for process in processes}
    for number in range(5):
        damage(start.path, f"uid-victim-{number}")
        _, found = await reopen(start.path)
        assert f"uid-victim-{number}" in found
        printed |= {process.hear() for process in processes}
    for process in processes:
        process.go_on()
        printed.update(process.end())

    claims, _ = await reopen(start.path)

    assert printed <= set(claims)
    assert len(printed) > 10
    left = {file.name for file in start.path.parent.iterdir() if "damaged" not in file.name}
    assert left == {"checkpoint.db"}


HOLD_CHECKPOINT_LOCK = """
import fcntl
with open(sys.argv[1] + "-shm", "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX, 1, 121)  # WAL_CKPT_LOCK of SQLite's WAL index
    say("held")
    sys.stdin.readline()
"""


async def test_a_log_that_another_process_checkpoints_at_the_moment_is_not_damaged(start):
    checkpoint = Checkpoint(start.path)
    await checkpoint.open()
    for name in "abc":
        await checkpoint.write([stored_claim(name)])
    holder = start("holder", HOLD_CHECKPOINT_LOCK)
    assert holder.hear() == "held"
    claims, damage = await reopen(start.path)
    assert (set(claims), damage) == ({"uid-a", "uid-b", "uid-c"}, None)
    holder.go_on()
    await checkpoint.close()


def damage(path, uid):
    """Damage a row in the present file, as a faulty disk does."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        connection = sqlite3.connect(path, timeout=5)
        try:
            done = connection.execute(
                "UPDATE bodies SET checksum = 1 WHERE id = (SELECT id FROM claims WHERE uid = ?)",
                (uid,),
            )
            connection.commit()
            if done.rowcount:
                return
        finally:
            connection.close()
    raise AssertionError(f"{uid} is not there")


async def test_a_crash_in_the_middle_of_a_transaction_stores_nothing_of_it(start):
    checkpoint = Checkpoint(start.path)
    await checkpoint.open()
    await checkpoint.write([stored_claim("a")])
    killed = start("killed", KILLED)
    assert killed.hear() == "open"
    assert killed.hear() == "within"
    killed.process.kill()
    killed.process.wait()

    assert await checkpoint.uids() == {"uid-a"}
    wanted = stored_claim("c", devices=(stored_device("cam-0"),))
    assert set((await checkpoint.write([wanted])).written) == {"uid-c"}
    await checkpoint.close()
    with pytest.raises(CheckpointError):
        await checkpoint.uids()


KILLED = """
from drakit_nodeplugin.state import rows

put = rows._put

def stop_after(*args, **options):
    put(*args, **options)
    say("within")
    sys.stdin.readline()

rows._put = stop_after

async def main(checkpoint):
    await checkpoint.write([stored_claim("b", devices=(stored_device("cam-0"),))])

asyncio.run(run(main))
"""
