"""Programs that a kit starts, and the relay to a backend that runs already."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

import pytest

from drakit.testing.conformance import programs
from drakit.testing.conformance.facts import ConformanceError
from drakit.testing.conformance.programs import Program, relay, run_command
from tests.fakes.tasks import until as wait_until

until = partial(wait_until, seconds=10)


@pytest.fixture
def program(tmp_path):
    def make(command, **options):
        log = tmp_path / "log"
        return Program("it", command, log=log, environment=dict(os.environ), **options)

    return make


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_a_program_that_ends_by_itself_is_started_again_until_it_is_killed(
    program, monkeypatch
):
    monkeypatch.setattr(programs, "RESTART_SECONDS", 0.01)
    it = program("echo begun; exit 3", restarted=True)
    await it.start()
    await until(lambda: it.text().count("begun") >= 2)
    assert it.running
    assert it.exit_code == 3
    await it.kill()
    assert not it.running
    times = it.text().count("begun")
    await asyncio.sleep(0.05)
    assert it.text().count("begun") == times


async def test_what_a_program_started_is_killed_with_it(program):
    it = program("sleep 100 & echo $!; wait")
    await it.start()
    await until(lambda: it.text().endswith("\n"))
    await it.kill()
    await until(lambda: gone(int(it.text())))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        pytest.param("trap 'exit 4' TERM; echo up; while :; do sleep 0.01; done", 4, id="it-ends"),
        pytest.param(
            "trap '' TERM; echo up; while :; do sleep 0.01; done", None, id="it-is-killed"
        ),
    ],
)
async def test_a_program_is_asked_to_end_and_killed_if_it_does_not(
    program, monkeypatch, line, code
):
    monkeypatch.setattr(programs, "END_SECONDS", 0.3)
    it = program(line)
    await it.start()
    await until(lambda: "up" in it.text())
    assert await it.terminate() == code
    assert not it.running


async def test_a_program_that_is_not_there_is_reported(program):
    with pytest.raises(ConformanceError, match=r"it cannot be started: .*No such file"):
        await program(["/no/such/program"]).start()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        pytest.param("echo the lamp is gone; false", "exit code 1.*\nthe lamp is gone", id="fails"),
        pytest.param("sleep 9", "did not end within 0.1 s", id="takes-too-long"),
    ],
)
async def test_a_set_up_that_fails_is_reported_with_its_words(line, told):
    with pytest.raises(ConformanceError, match=told):
        await run_command(line, environment=dict(os.environ), timeout_seconds=0.1)


async def test_a_set_up_may_leave_a_process_that_writes_where_it_did():
    line = "sleep 9 & setsid sleep 9 & echo up"
    await run_command(line, environment=dict(os.environ), timeout_seconds=5)


async def test_a_relay_leads_to_the_socket_and_ends_with_it(tmp_path):
    async def echo(reader, writer) -> None:
        writer.write((await reader.readline()).upper())
        writer.close()

    async with await asyncio.start_unix_server(echo, tmp_path / "a") as server:
        running = asyncio.create_task(relay(tmp_path / "b", tmp_path / "a"))
        await until((tmp_path / "b").is_socket)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "b")
        writer.write(b"light\n")
        assert await reader.read() == b"LIGHT\n"
        writer.close()
        server.close()
    reader, writer = await asyncio.open_unix_connection(tmp_path / "b")
    assert await reader.read() == b""
    writer.close()
    running.cancel()
    await asyncio.wait([running])
