"""One process writes a database; others read it, or find it as a killed one has left it."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from drakit_nodeplugin.state.inspection import inspect
from drakit_nodeplugin.state.schema import VERSION
from tests.fakes.checkpoints import reopen

PROLOGUE = """
import asyncio, sys
from pathlib import Path
from drakit_nodeplugin.state.checkpoint import Checkpoint
from tests.fakes.checkpoints import stored_claim

def say(text):
    sys.stdout.write(f"{text}\\n")
    sys.stdout.flush()

async def run(main):
    checkpoint = Checkpoint(Path(sys.argv[1]))
    await checkpoint.open()
    say("open")
    await main(checkpoint)
    await checkpoint.close()
"""


class Process:
    """A Python process that prints line by line."""

    def __init__(self, path, program):
        command = [sys.executable, "-c", PROLOGUE + program, str(path)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def next_line(self):
        return self.process.stdout.readline().strip()

    def kill(self):
        """Kill it; return the complete lines since the last one that was read."""
        self.process.kill()
        printed = self.process.stdout.read()
        self.process.wait(timeout=25)
        return printed[: printed.rfind("\n") + 1].split()


@pytest.fixture
def start(tmp_path):
    path = tmp_path / "camera.example.com" / "checkpoint.db"
    running = []

    def start(program):
        running.append(Process(path, program))
        return running[-1]

    start.path = path
    yield start
    for process in running:
        process.process.kill()
        process.process.communicate()


WRITE = """
async def main(checkpoint):
    number = 0
    while True:
        pair = [stored_claim(f"{number}-{name}") for name in ("one", "two")]
        written = (await checkpoint.write(pair)).written
        assert len(written) == 2
        say(number)
        number += 1

asyncio.run(run(main))
"""


async def test_a_reader_beside_the_writer_sees_whole_batches_and_nothing_answered_is_lost(start):
    writer = start(WRITE)
    assert writer.next_line() == "open"
    before = set()
    for _ in range(8):
        answered = int(writer.next_line())
        found = await asyncio.to_thread(inspect, start.path)
        assert (found.problems, found.version) == ((), VERSION)
        uids = {claim.uid for claim in found.claims}
        assert uids >= before | {f"uid-{answered}-one", f"uid-{answered}-two"}
        assert len(uids) % 2 == 0
        before = uids

    answered = [answered, *map(int, writer.kill())][-1]

    claims, damage = await reopen(start.path)
    assert damage is None
    assert len(claims) // 2 in (answered + 1, answered + 2), "the last may not have been answered"
    assert len(claims) % 2 == 0
    assert claims.keys() >= before


HOLD_CHECKPOINT_LOCK = """
import fcntl, sqlite3
database = sqlite3.connect(sys.argv[1])
database.execute("SELECT * FROM claims").fetchall()
with open(sys.argv[1] + "-shm", "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX, 1, 121)  # WAL_CKPT_LOCK of SQLite's WAL index
    say("held")
    sys.stdin.readline()
"""


async def test_a_log_that_another_program_checkpoints_at_the_moment_is_not_damaged(start):
    """An example is an admin's sqlite3, while a node plugin is killed and starts again."""
    writer = start(WRITE)
    assert [writer.next_line() for _ in range(4)] == ["open", "0", "1", "2"]
    holder = start(HOLD_CHECKPOINT_LOCK)
    assert holder.next_line() == "held"
    writer.kill()

    claims, damage = await reopen(start.path)

    assert damage is None
    assert claims.keys() >= {f"uid-{n}-{name}" for n in range(3) for name in ("one", "two")}
