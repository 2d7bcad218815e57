"""Log lines: foreign text in messages, facts and errors cannot look like a log line."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from drakit_daemon.logs import JsonFormatter, ProblemLog, TextFormatter

FORGED = "2026-11-22T05:00:00.000+00:00 INFO    claim prepared  claim=lab/a"

HOSTILE = [
    pytest.param(f"x\n{FORGED}", f"x\\n{FORGED}", id="newline"),
    pytest.param(f"x\r{FORGED}", f"x\\r{FORGED}", id="carriage-return"),
    pytest.param(f"x\u2028{FORGED}", f"x\\u2028{FORGED}", id="line-separator"),
    pytest.param("x\x1b[2Kx", "x\\u001b[2Kx", id="terminal"),
    pytest.param("\x7f\u009b2J", "\\u007f\\u009b2J", id="delete-and-c1"),
    pytest.param("a\u202eb", "a\\u202eb", id="direction"),
    pytest.param("a\udcffb", "a\\udcffb", id="not-utf-8"),
    pytest.param("Kamera für жук", "Kamera für жук", id="letters-stay"),
    pytest.param("C:\\new", "C:\\new", id="backslashes-stay"),
]


def record(message: str, *, error: BaseException | None = None, **facts) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error is not None else None
    made = logging.LogRecord("drakit", logging.ERROR, __file__, 1, message, None, info)
    vars(made).update(facts)
    return made


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_text_escapes_what_is_not_printable(text, shown):
    line = TextFormatter().format(record("device is rejected", device=text))
    assert line.endswith(f"ERROR   device is rejected  device={shown}")
    assert TextFormatter().format(record(text)).endswith(f"ERROR   {shown}")


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_json_is_one_line_that_holds_the_text_as_it_is(text, shown):
    line = JsonFormatter().format(record(text, device=text))
    assert line.isprintable()
    assert (json.loads(line)["msg"], json.loads(line)["device"]) == (text, text)


@pytest.mark.parametrize(("text", "shown"), HOSTILE[1:7])
def test_a_traceback_stays_readable_and_cannot_look_like_a_line(text, shown):
    try:
        raise ValueError(f"{text}\n{FORGED}")
    except ValueError as error:
        told = TextFormatter().format(record("driver failed", error=error))
    first, *rest = told.split("\n")
    assert first.endswith("ERROR   driver failed")
    assert rest[0] == "    Traceback (most recent call last):"
    assert rest[-2:] == [f"    ValueError: {shown}", f"    {FORGED}"]
    assert all(line.startswith("    ") for line in rest)


def test_facts_that_are_no_text_are_shown_as_text():
    class Named:
        def __str__(self) -> str:
            return "two\nlines"

    assert TextFormatter().format(record("m", name_=Named())).endswith("m  name_=two\\nlines")


def messages(caplog) -> list[tuple[str, str | None]]:
    return [(r.getMessage(), getattr(r, "error", None)) for r in caplog.records]


def problem_log(**options) -> ProblemLog:
    return ProblemLog(logging.getLogger("drakit.test"), "cannot read", **options)


def test_a_problem_is_logged_when_it_appears_or_changes_and_once_when_it_is_gone(caplog):
    caplog.set_level(logging.INFO)
    log = problem_log(recovered="can read again", facts={"driver": "usb"})
    reported = [log.report(problem) for problem in (None, "a", "a", "b", None, None, "b")]
    assert reported == [False, True, False, True, False, False, True]
    assert messages(caplog) == [
        ("cannot read", "a"),
        ("cannot read", "b"),
        ("can read again", None),
        ("cannot read", "b"),
    ]
    assert {getattr(record, "driver", "") for record in caplog.records} == {"usb"}


def test_the_end_of_a_problem_may_be_silent(caplog):
    caplog.set_level(logging.INFO)
    log = problem_log()
    for problem in ("a", None, "a"):
        log.report(problem)
    assert messages(caplog) == [("cannot read", "a"), ("cannot read", "a")]


@pytest.mark.looptime
async def test_a_problem_that_flaps_is_logged_at_most_once_in_a_pause(caplog):
    caplog.set_level(logging.INFO)
    log = problem_log(recovered="can read again", pause_seconds=5)
    for second in range(11):
        log.report("a" if second % 2 == 0 else None)
        await asyncio.sleep(1)
    assert messages(caplog) == [
        ("cannot read", "a"),
        ("can read again", None),
        ("cannot read", "a"),
    ]
