"""
Following a collection: when a watch is resumed, when all objects are listed again, and the waits.
"""

import asyncio
from contextlib import aclosing
from itertools import pairwise

import pytest

from drakit_daemon.kube import GoneError, Listing, UnavailableError, WatchEvent
from drakit_daemon.kube.reflector import (
    HEALTHY_SECONDS,
    Applied,
    Deleted,
    Reflector,
    Replaced,
)
from drakit_daemon.kube.request import error_of_status

PATH = "/apis/resource.k8s.io/v1/resourceslices"


def slice_(name, version):
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def event(kind, name, version):
    return WatchEvent(type=kind, object=slice_(name, version))


def gone():
    return GoneError(status=410, reason="Expired", message="old", method="WATCH", path=PATH)


def lost():
    return UnavailableError.no_response("WATCH", PATH, why="it broke")


def denied(status):
    return error_of_status({}, method="WATCH", path=PATH, code=status)


def whole(body):
    return body


class Scripted:
    """A session whose lists and watches go as written; when the script ends, watches hang."""

    def __init__(self, *script):
        self.script = list(script)
        self.calls = []  # ("list" or the version a watch began at, loop time)

    async def read_list(self, path, keep, *, params=None, page_size=0):
        self.calls.append(("list", asyncio.get_running_loop().time()))
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        return Listing(items=[keep(slice_("a", step))], resource_version=str(step))

    async def watch(self, path, *, resource_version, params=None):
        self.calls.append((resource_version, asyncio.get_running_loop().time()))
        if not self.script:
            await asyncio.Event().wait()
        for step in self.script.pop(0):
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                yield step


async def follow(session, changes):
    """Read so many changes, and 600 s more to see that nothing else happens."""
    reflector, seen = Reflector(session, PATH, keep=whole), []
    try:
        async with asyncio.timeout(600), aclosing(reflector.changes()) as stream:
            async for change in stream:
                seen.append(change)  # noqa: PERF401 - what came before the timeout counts
    except TimeoutError:
        pass
    assert len(seen) == changes
    return reflector, seen


def calls(session):
    return [call for call, _ in session.calls]


pytestmark = pytest.mark.looptime


async def test_first_everything_then_every_change():
    session = Scripted(
        10, [event("ADDED", "b", 11), event("MODIFIED", "b", 12), event("DELETED", "b", 13)]
    )
    reflector, seen = await follow(session, 4)
    assert seen == [
        Replaced(items=[slice_("a", 10)]),
        Applied(object=slice_("b", 11)),
        Applied(object=slice_("b", 12)),
        Deleted(object=slice_("b", 13)),
    ]
    assert calls(session) == ["list", "10", "13"]
    assert reflector.synced


async def test_a_watch_that_ends_is_resumed_at_once():
    session = Scripted(10, [event("ADDED", "b", 11), 299.0], [299.0])
    await follow(session, 2)
    assert session.calls == [("list", 0), ("10", 0), ("11", 299), ("11", 598)]


async def test_a_bookmark_is_where_the_next_watch_begins():
    session = Scripted(10, [event("BOOKMARK", "", 90)])
    await follow(session, 1)
    assert calls(session) == ["list", "10", "90"]


async def test_a_watch_without_events_is_resumed_and_counts_as_heard():
    session = Scripted(10, *([70.0] for _ in range(8)))
    reflector, _ = await follow(session, 1)
    assert calls(session) == ["list", *9 * ["10"]]
    assert [at for _, at in session.calls[1:]] == [70.0 * number for number in range(9)]
    assert reflector.last_error is None
    assert reflector.silent_seconds() == 600 - 560 - HEALTHY_SECONDS


async def test_a_broken_connection_is_resumed_without_a_list():
    session = Scripted(10, [event("ADDED", "b", 11), lost()])
    reflector, _ = await follow(session, 2)
    assert calls(session) == ["list", "10", "11"]
    assert session.calls[2][1] < 1
    assert reflector.last_error is not None or reflector.synced


@pytest.mark.parametrize("error", [gone(), denied(403), denied(404)], ids=str)
async def test_a_watch_that_was_too_old_or_denied_begins_with_a_new_list(error):
    # The consumer may have dropped what it was denied.
    session = Scripted(10, [event("ADDED", "b", 11), error], 20)
    _, seen = await follow(session, 3)
    assert seen[-1] == Replaced(items=[slice_("a", 20)])
    assert calls(session) == ["list", "10", "list", "20"]


async def test_a_server_that_hangs_is_a_failure_until_it_answers(caplog):
    # A session waits 10 s for a response.
    session = Scripted(10, *([10.0, lost()] for _ in range(30)), [event("ADDED", "b", 11)])
    reflector, loop, failing = Reflector(session, PATH, keep=whole), asyncio.get_running_loop(), []

    async def look():
        while len(session.script) > 1:
            await asyncio.sleep(1)
            failing.append(reflector.last_error is not None)

    async with aclosing(reflector.changes()) as stream:
        assert isinstance(await anext(stream), Replaced)
        looking, began = asyncio.create_task(look()), loop.time()
        assert isinstance(await anext(stream), Applied)
        await looking
        assert failing.index(True) <= 11
        assert all(failing[11:])
        assert reflector.last_error is None
        assert reflector.failing_seconds() == 0
        assert loop.time() - began > 30 * 20, "the pauses grow"
    assert [r.msg for r in caplog.records if r.levelname == "WARNING"] == [
        "cannot list or watch, retrying"
    ]


async def test_an_unavailable_api_server_is_asked_with_backoff(caplog):
    session = Scripted(*(lost() for _ in range(200)))
    reflector, _ = await follow(session, 0)
    times = [at for _, at in session.calls]
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps[0] <= 0.5
    assert all(15 <= gap <= 30 for gap in gaps[7:])
    assert 600 / 30 <= len(times) <= 600 / 15 + 7
    assert not reflector.synced
    assert "it broke" in str(reflector.last_error)
    assert reflector.failing_seconds() == 600
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


async def test_watches_that_end_at_once_are_no_hot_loop():
    session = Scripted(10, *([] for _ in range(200)))
    await follow(session, 1)
    assert len(session.calls) < 60


async def test_too_old_again_and_again_is_no_hot_loop():
    steps = [step for n in range(100) for step in (n + 1, [gone()])]
    session = Scripted(*steps)
    reflector = Reflector(session, PATH, keep=whole)
    async with asyncio.timeout(600), aclosing(reflector.changes()) as stream:
        async for _ in stream:
            if asyncio.get_running_loop().time() > 300:
                break
    assert len(session.calls) < 80


async def test_after_a_success_waiting_starts_again():
    fails = [lost() for _ in range(6)]
    session = Scripted(10, [fails[0]], [fails[1]], [fails[2]], [event("ADDED", "b", 11), lost()])
    await follow(session, 2)
    assert session.calls[-1][1] - session.calls[-2][1] <= 0.5


class TestWatchList:
    """All objects by a watch: the server sends them, and then a bookmark."""

    @pytest.mark.looptime(False)
    @pytest.mark.parametrize("supported", [True, False])
    async def test_all_objects_come_first_then_changes(self, session, api_server, supported):
        api_server.watch_lists = supported
        for name in ("a", "b"):
            api_server.store(f"{PATH}/{name}", {"spec": {}})
        reflector = Reflector(session, PATH, keep=named, streams=True, retry_seconds=0.01)
        async with aclosing(reflector.changes()) as stream:
            assert await anext(stream) == Replaced(items=["a", "b"])
            assert reflector.synced
            api_server.store(f"{PATH}/c", {"spec": {}})
            assert await anext(stream) == Applied(object="c")
            api_server.remove(f"{PATH}/a")
            assert await anext(stream) == Deleted(object="a")
            # A watch that ends goes on where it was; after a gap all objects come again.
            api_server.drop_watches()
            api_server.store(f"{PATH}/d", {"spec": {}})
            assert await anext(stream) == Applied(object="d")
            broken = {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}
            api_server.send_to_watches({"type": "ERROR", "object": broken})
            api_server.store(f"{PATH}/d", {"spec": {"big": "x" * 3_000_000}})
            assert await anext(stream) == Applied(object="d")
            api_server.expire_history()
            api_server.drop_watches()
            assert await anext(stream) == Replaced(items=["b", "c", "d"])
        listed = ("GET", PATH) in api_server.requests
        assert listed is not supported

    async def test_a_stream_that_ends_before_its_end_is_followed_by_pages_but_not_at_once(self):
        part = [with_uid("ADDED", "a", 10)]
        session = Scripted([*part, gone()], part, lost(), lost(), 20)
        reflector = Reflector(session, PATH, keep=named, streams=True)
        async with aclosing(reflector.changes()) as stream:
            assert await anext(stream) == Replaced(items=["a"])
            assert reflector.last_error is not None, "a part of the objects is no recovery"
        assert calls(session) == ["", "", "list", "list", "list"]
        times = [at for _, at in session.calls]
        pauses = [b - a for a, b in pairwise(times)]
        assert all(0.25 * 2**n <= pause <= 0.5 * 2**n for n, pause in enumerate(pauses))

    async def test_changes_before_the_end_of_the_first_objects_count(self):
        end = with_uid("BOOKMARK", "", 30)
        end.object["metadata"]["annotations"] = {"k8s.io/initial-events-end": "true"}
        plain = with_uid("BOOKMARK", "", 29)
        first = [with_uid("ADDED", name, 10) for name in ("a", "b")]
        later = [with_uid("MODIFIED", "a", 20), with_uid("DELETED", "b", 21)]
        session = Scripted([*first, lost()], [*first, *later, plain, end])
        reflector = Reflector(session, PATH, keep=named, streams=True, retry_seconds=0.01)
        async with aclosing(reflector.changes()) as stream:
            assert await anext(stream) == Replaced(items=["a"])
        assert calls(session) == ["", ""], "a stream that broke begins again"

    @pytest.mark.looptime(False)
    @pytest.mark.parametrize("streams", [True, False])
    async def test_an_object_that_cannot_be_read_is_kept_by_its_metadata(
        self, session, api_server, streams
    ):
        api_server.verbatim["@deep"] = "[" * 1200 + "]" * 1200
        api_server.store(f"{PATH}/a", {"spec": {"x": "@deep"}})
        reflector = Reflector(
            *(session, PATH),
            keep=named,
            keep_unreadable=lambda metadata, reason: f"{metadata['name']}: {reason[:12]}",
            streams=streams,
        )
        async with aclosing(reflector.changes()) as stream:
            (kept,) = (await anext(stream)).items
            assert kept.startswith("a: ")
            api_server.store(f"{PATH}/a", {"spec": {"x": "@deep", "y": 1}})
            assert (await anext(stream)).object.startswith("a: ")
            api_server.remove(f"{PATH}/a")
            assert (await anext(stream)).object.startswith("a: ")


def with_uid(kind, name, version):
    body = slice_(name, version)
    body["metadata"]["uid"] = name
    return WatchEvent(type=kind, object=body)


def named(body):
    return body["metadata"]["name"]
