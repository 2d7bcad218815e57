"""Accepted and rejected messages of the disk helper."""

from __future__ import annotations

import json

import pytest

from drakit_drivers.diskhelper.protocol import Answer, MalformedError, Request

GOOD = {"operation": "wipe", "number": "8:16", "sequence": 7}


def line(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode() + b"\n"


def test_a_request_survives_the_way():
    request = Request(operation="check", number="259:3", sequence=2**63)
    assert Request.parse(request.line()) == request


def test_an_answer_survives_the_way():
    answer = Answer(outcome="wiping", detail="40 % zeroed")
    assert Answer.parse(answer.line()) == answer


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(line()[:-1], id="no-end-of-line"),
        pytest.param(b"[" * 4000 + b"\n", id="nested-lists"),
        pytest.param(b"x" * 5000 + b"\n", id="too-long"),
        pytest.param(b"[1]\n", id="a-list"),
        pytest.param(line(operation="format"), id="unknown-operation"),
        pytest.param(line(operation=["wipe"]), id="operation-is-a-list"),
        pytest.param(line(number="../sda"), id="number-is-a-path"),
        pytest.param(line(number="8:16\n"), id="number-with-an-end-of-line"),
        pytest.param(line(number=None), id="no-number"),
        pytest.param(line(sequence="7"), id="sequence-is-text"),
        pytest.param(line(sequence=-1), id="negative-sequence"),
        pytest.param(line(sequence=2**64), id="sequence-of-65-bits"),
    ],
)
def test_a_malformed_request_is_rejected(text):
    with pytest.raises(MalformedError):
        Request.parse(text)


@pytest.mark.parametrize("text", [b"", b"{}\n", b'{"outcome": "lost"}\n', b'{"outcome": []}\n'])
def test_a_malformed_answer_is_rejected(text):
    with pytest.raises(MalformedError):
        Answer.parse(text)
