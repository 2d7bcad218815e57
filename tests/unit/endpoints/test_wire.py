"""Messages of other processes: counted and split before they are parsed."""

from __future__ import annotations

import pytest

from drakit_nodeplugin.endpoints.wire import MAX_FIELDS, GarbageError, parse, parts, printable
from drakit_proto.backend.v1 import backend_pb2 as pb


def test_fields_of_a_later_version_are_skipped():
    # A number, eight bytes, four bytes, a string, and then the known part.
    raw = b"\x50\x96\x01" + b"\x59" + bytes(8) + b"\x65" + bytes(4) + b"\x6a\x01x" + b"\x0a\x01a"
    assert list(parts(raw, frozenset({1}))) == [(1, b"a")]


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


def test_a_call_that_fails_without_a_text_has_one():
    assert printable("") == "it gave no reason"
