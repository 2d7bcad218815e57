"""Watch streams: lines of any length in chunks of any size, and their errors."""

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drakit_daemon.kube import GoneError, UnavailableError
from drakit_daemon.kube.listing import read_events
from drakit_daemon.kube.session import Session, Timeouts, connect

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


METADATA = {"name": "cam", "namespace": "lab", "uid": "u1", "resourceVersion": "7"}
DEEP = "[" * 1200 + "]" * 1200
OTHERS = {"ownerReferences": [{"name": "other", "uid": "u2"}]}


def deep_line(kind="MODIFIED", metadata=METADATA):
    named = orjson.dumps({**metadata, **OTHERS}).decode()
    return (
        f'{{"type":"{kind}","object":{{"kind":"ResourceClaim","apiVersion":"resource.k8s.io/v1",'
        f'"metadata":{named},"spec":{{"x":{DEEP}}}}}}}\n'
    ).encode()


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
async def test_an_object_that_cannot_be_parsed_costs_itself_alone(kind):
    first, bad, last = await read(line(a=1) + deep_line(kind) + line(b=2))
    assert (first.object, last.object) == ({"a": 1}, {"b": 2})
    assert (bad.type, bad.object) == (kind, {"metadata": METADATA})
    assert "depth" in bad.unreadable


def report_line(fields, spec="{}"):
    """A NodeDeviceReport, as the API server writes custom resources: with sorted fields."""
    managers = f'[{{"fieldsType":"FieldsV1","fieldsV1":{fields},"manager":"m","name":"other"}}]'
    return (
        '{"type":"MODIFIED","object":{"apiVersion":"drakit.dev/v1beta1","kind":"NodeDeviceReport",'
        '"metadata":{"annotations":{"name":"note","n":"\\",\\"name\\":\\"x"},"generation":1,'
        f'"managedFields":{managers},"name":"n1","resourceVersion":"7","uid":"u1"}},'
        f'"spec":{spec},"status":{{"name":"last"}}}}}}\n'
    ).encode()


def slice_line(fields, spec="{}"):
    """A ResourceSlice, as the API server writes built-in kinds: managed fields are last."""
    managers = f'[{{"manager":"m","fieldsV1":{fields}}}]'
    return (
        '{"type":"ADDED","object":{"kind":"ResourceSlice","apiVersion":"resource.k8s.io/v1",'
        '"metadata":{"name":"n1","uid":"u1","resourceVersion":"7","generation":1,"annotations":'
        '{"name":"note","n":"\\",\\"name\\":\\"x"},'
        f'"managedFields":{managers}}},"spec":{spec},"status":{{"name":"last"}}}}}}\n'
    ).encode()


NESTED = [
    pytest.param('{"name":"a","uid":"b","resourceVersion":"c","x":%s}', id="names-before"),
    pytest.param(
        '{"metadata":{"name":"a","uid":"b","resourceVersion":"c"},"x":%s}', id="names-below"
    ),
    pytest.param('{"x":%s,"}":"]","object":{"metadata":{"name":"a"}}}', id="names-after"),
    pytest.param('{"x":[%s],"spec":{"a":[1]},"]},\\"spec":[],"y":"],"}', id="seeming-ends"),
    pytest.param('{"' + 200_000 * "a" + '":%s}', id="long"),
]


@pytest.mark.parametrize("line_of", [report_line, slice_line])
@pytest.mark.parametrize("fields", NESTED)
async def test_an_object_is_read_without_managed_fields_that_are_nested_too_deep(fields, line_of):
    (event,) = await read(line_of(fields % DEEP, '{"nodeName":"n"}'))
    metadata = event.object.pop("metadata")
    assert (metadata["name"], metadata["uid"], metadata["generation"]) == ("n1", "u1", 1)
    assert "managedFields" not in metadata
    assert (event.object["spec"], event.object["status"]) == ({"nodeName": "n"}, {"name": "last"})
    assert event.unreadable == ""


@pytest.mark.parametrize("line_of", [report_line, slice_line])
async def test_managed_fields_that_would_take_long_to_leave_out_are_not_read(line_of):
    fields = "{" + '"a":[1],' * 20_000 + f'"x":{DEEP}}}'
    (bad,) = await read(line_of(fields))
    assert bad.object == {"metadata": {"name": "n1", "uid": "u1", "resourceVersion": "7"}}
    assert "depth" in bad.unreadable


@pytest.mark.parametrize("line_of", [report_line, slice_line])
@pytest.mark.parametrize("fields", NESTED)
async def test_names_are_those_of_the_metadata_and_not_below(fields, line_of):
    spec = f'{{"name":"b","x":{DEEP}}}'
    first, bad, last = await read(line(a=1) + line_of(fields % DEEP, spec) + line(b=2))
    assert (first.object, last.object) == ({"a": 1}, {"b": 2})
    assert bad.object == {"metadata": {"name": "n1", "uid": "u1", "resourceVersion": "7"}}
    assert "depth" in bad.unreadable


async def test_an_object_of_a_cluster_has_no_namespace_of_others():
    metadata = {"name": "gpu", "uid": "u1", "resourceVersion": "7", "labels": {"namespace": "x"}}
    (bad,) = await read(deep_line(metadata=metadata))
    assert bad.object["metadata"].keys() == {"name", "uid", "resourceVersion"}


@pytest.mark.parametrize("chunk_bytes", [100, 1000, 100_000])
async def test_a_line_that_is_too_long_is_not_held_in_memory(monkeypatch, chunk_bytes):
    monkeypatch.setattr("drakit_daemon.kube.listing.MAX_OBJECT_BYTES", 10_000)
    data = line(metadata=METADATA, note="x" * 50_000) + line(b=2)
    bad, last = await read(
        *(data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes))
    )
    assert bad.object == {"metadata": METADATA}
    assert "more than 10000 bytes" in bad.unreadable
    assert last.object == {"b": 2}


async def test_a_long_line_of_something_else_is_no_event(monkeypatch):
    monkeypatch.setattr("drakit_daemon.kube.listing.MAX_OBJECT_BYTES", 1000)
    with pytest.raises(UnavailableError, match="not an event"):
        await read(b"x" * 600, b"x" * 600, b"x" * 600, b"\n")


async def test_a_watch_ends_when_the_server_is_silent(api_server, tmp_path):
    kubeconfig = api_server.write_kubeconfig(tmp_path)
    timeouts = Timeouts(watch_silence_seconds=0.1)
    session: Session
    async with await connect(kubeconfig, user_agent="t", timeouts=timeouts) as session:
        assert [each async for each in session.watch(PATH, resource_version="1")] == []
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
        with pytest.raises(UnavailableError, match=r"did not respond within 0\.1 s"):
            async for _ in session.watch(PATH, resource_version="1"):
                pass


async def test_a_watch_that_breaks_is_no_answer(session, api_server):
    api_server.fail("WATCH", disconnect=True, times=2)  # aiohttp asks twice by itself
    with pytest.raises(UnavailableError):
        async for _ in session.watch(PATH, resource_version="1"):
            pass
