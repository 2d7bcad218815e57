"""Messages of other processes: counted and split before they are parsed."""

from __future__ import annotations

import pytest

from drakit_nodeplugin.endpoints.wire import (
    MAX_FIELDS,
    GarbageError,
    parse,
    parts,
    printable,
)
from drakit_proto.backend.v1 import backend_pb2 as pb


def test_fields_of_a_later_version_are_skipped():
    # A number, eight bytes, four bytes, a text, and then the part that is known.
    raw = b"\x50\x96\x01" + b"\x59" + bytes(8) + b"\x65" + bytes(4) + b"\x6a\x01x" + b"\x0a\x01a"
    assert list(parts(raw, frozenset({1}))) == [(1, b"a")]


def test_fields_without_end_are_refused():
    numbers = b"\x78\x01"
    assert list(parts(numbers * MAX_FIELDS, frozenset({1}))) == []
    with pytest.raises(GarbageError, match="more than 40,000 fields"):
        list(parts(numbers * (MAX_FIELDS + 1), frozenset({1})))


@pytest.mark.parametrize(
    "most",
    [
        pytest.param(pb.PreparedClaim(edits=[pb.Edits()] * MAX_FIELDS), id="at-the-top"),
        pytest.param(
            pb.PreparedClaim(edits=[pb.Edits(mounts=[pb.Mount()] * (MAX_FIELDS - 1))]), id="inside"
        ),
    ],
)
def test_a_message_is_counted_at_any_depth_before_it_is_parsed(most):
    raw = most.SerializeToString()
    assert parse(pb.PreparedClaim, raw) == most
    with pytest.raises(GarbageError, match="more than 40,000 fields"):
        parse(pb.PreparedClaim, raw + b"\x0a\x01\xff")  # no text, which only a parser finds


@pytest.mark.parametrize(
    "raw",
    [b"\x00", b"\x0b", b"\x0a", b"\x0a\x02x", b"\x59\x00", b"\xff" * 12, b"\x08"],
    ids=lambda raw: raw.hex(),
)
def test_bytes_that_are_no_message_are_refused(raw):
    with pytest.raises(GarbageError):
        list(parts(raw, frozenset({1})))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("", "it gave no reason", id="nothing"),
        pytest.param(" a\n\tb\x1b[0m ", "a b?[0m", id="lines-and-escapes"),
        pytest.param("x" * 2000, "x" * 1000, id="without-end"),
    ],
)
def test_texts_are_made_fit_for_a_message(text, shown):
    assert printable(text) == shown
