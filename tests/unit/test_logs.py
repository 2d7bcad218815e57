"""Log lines: foreign text in messages, facts and errors cannot look like a log line."""

from __future__ import annotations

import json
import logging

import pytest

from drakit.logs import JsonFormatter, TextFormatter

FORGED = "2026-11-22T05:00:00.000+00:00 INFO    claim prepared  claim=lab/a"

HOSTILE = [
    pytest.param(f"x\n{FORGED}", f"x\\n{FORGED}", id="newline"),
    pytest.param(f"x\r{FORGED}", f"x\\r{FORGED}", id="carriage-return"),
    pytest.param(f"x\u2028{FORGED}", f"x\\u2028{FORGED}", id="line-separator"),
    pytest.param("x\x1b[2Kx", "x\\x1b[2Kx", id="terminal"),
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
    line = TextFormatter().format(record("device is left out", device=text))
    assert line.endswith(f"ERROR   device is left out  device={shown}")
    assert TextFormatter().format(record(text)).endswith(f"ERROR   {shown}")


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_json_is_one_line_that_holds_the_text_as_it_is(text, shown):
    line = JsonFormatter().format(record(text, device=text))
    assert len(line.split("\n")) == 1
    assert (json.loads(line)["msg"], json.loads(line)["device"]) == (text, text)


@pytest.mark.parametrize(("text", "shown"), HOSTILE[1:6])
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
