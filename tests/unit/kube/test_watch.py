"""Watch streams: lines of any length in chunks of any size, and their errors."""

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drakit.kube import GoneError, UnavailableError
from drakit.kube import watch as watching
from drakit.kube.session import Session, Timeouts, connect
from drakit.kube.watch import read_events

PATH = "/api/v1/pods"


async def read(*chunks):
    async def stream():
        for chunk in chunks:
            yield chunk

    return [event async for event in read_events(stream(), path=PATH)]


def line(**fields):
    return orjson.dumps({"type": "ADDED", "object": fields}) + b"\n"


@given(
    notes=st.lists(st.text(max_size=50), max_size=6),
    cuts=st.lists(st.integers(min_value=0, max_value=400), max_size=12),
)
async def test_chunks_may_be_cut_anywhere(notes, cuts):
    data = b"".join(line(note=note) for note in notes)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[a:b] for a, b in pairwise(edges)]
    assert [event.object["note"] for event in await read(*chunks)] == notes


async def test_a_line_that_never_ended_is_no_event():
    assert len(await read(line(a=1), line(b=1)[:-5])) == 1


async def test_too_old_is_gone():
    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
    with pytest.raises(GoneError, match="too old"):
        await read(orjson.dumps({"type": "ERROR", "object": status}) + b"\n")


@pytest.mark.parametrize("text", [b"<html>\n", b"{}\n", b"[1]\n"])
async def test_what_is_no_event_is_no_answer(text):
    with pytest.raises(UnavailableError, match="not an event"):
        await read(text)


async def test_a_line_without_end_is_bounded(monkeypatch):
    monkeypatch.setattr(watching, "MAX_LINE_BYTES", 1000)
    with pytest.raises(UnavailableError, match="more than 1000 bytes"):
        await read(b"x" * 600, b"x" * 600, b"x" * 600)


async def test_a_silent_watch_is_a_dead_connection(api_server, tmp_path):
    kubeconfig = api_server.write_kubeconfig(tmp_path)
    timeouts = Timeouts(watch_silence_seconds=0.1)
    session: Session
    async with await connect(kubeconfig, user_agent="t", timeouts=timeouts) as session:
        with pytest.raises(UnavailableError, match=r"nothing within 0\.1 s"):
            async for _ in session.watch(PATH, resource_version="1"):
                pass
    assert api_server.queries[-1] == {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": "1",
        "timeoutSeconds": "300",
    }


async def test_a_watch_that_is_not_answered_is_given_up(api_server, tmp_path):
    kubeconfig = api_server.write_kubeconfig(tmp_path)
    api_server.delay(5, "WATCH")
    timeouts = Timeouts(request_seconds=0.1)
    async with await connect(kubeconfig, user_agent="t", timeouts=timeouts) as session:
        with pytest.raises(UnavailableError, match="no answer"):
            async for _ in session.watch(PATH, resource_version="1"):
                pass


async def test_a_watch_that_breaks_is_no_answer(session, api_server):
    api_server.fail("WATCH", disconnect=True, times=2)  # aiohttp asks twice by itself
    with pytest.raises(UnavailableError):
        async for _ in session.watch(PATH, resource_version="1"):
            pass
