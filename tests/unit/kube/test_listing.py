"""Lists in pages, also with an unreadable object, or with pages that are too large."""

import asyncio
import gc
from contextlib import suppress

import orjson
import pytest

from drakit_daemon.kube import UnavailableError, UnreadableError, listing
from drakit_daemon.kube.listing import read_list
from drakit_daemon.kube.reflector import Reflector, Replaced
from drakit_daemon.kube.request import JsonResponse, parse

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims"
DEEP = "[" * 1200 + "]" * 1200


@pytest.fixture
def claims(api_server):
    """Forty claims, some of which are nested too deeply."""

    def store(*deep):
        api_server.verbatim["@deep"] = DEEP
        for number in range(40):
            nested = {"x": "@deep"} if number in deep else {"x": 1}
            api_server.store(f"{CLAIMS}/c{number:02}", {"spec": nested})

    return store


def limits(api_server):
    return [int(query["limit"]) for query in api_server.queries]


@pytest.mark.parametrize(
    "deep",
    [
        pytest.param([0], id="first"),
        pytest.param([17], id="in-the-middle"),
        pytest.param([39], id="last"),
        pytest.param([3, 4, 30], id="several"),
        pytest.param(range(40), id="all"),
    ],
)
async def test_an_object_that_cannot_be_parsed_affects_no_other_object(
    session, api_server, claims, deep
):
    claims(*deep)
    found = await session.list(CLAIMS, page_size=16)
    names = [item["metadata"]["name"] for item in found.items]
    skipped = [each.metadata["name"] for each in found.skipped]
    assert names == [f"c{number:02}" for number in range(40) if number not in deep]
    assert skipped == [f"c{number:02}" for number in deep]
    assert all("depth" in each.reason for each in found.skipped)
    assert found.resource_version == str(api_server.cluster.version)


@pytest.mark.parametrize("deep", [False, True], ids=["and-is-read", "and-is-skipped"])
async def test_managed_fields_that_are_nested_too_deep_cost_no_other_object(
    session, api_server, claims, deep
):
    """Any writer can put managed fields into the body."""
    claims()
    managers = [{"manager": "m", "operation": "Update", "fieldsV1": "@deep"}]
    note = {"note": ',"managedFields":['}
    metadata = {"annotations": note, "managedFields": managers}
    spec = {"x": "@deep" if deep else 1}
    api_server.store(f"{CLAIMS}/c07", {"metadata": metadata, "spec": spec})
    found = await session.list(CLAIMS, page_size=16)
    assert len(found.items) == (39 if deep else 40)
    bodies = [each.metadata for each in found.skipped] if deep else [found.items[7]["metadata"]]
    assert [(each["name"], each["annotations"]) for each in bodies] == [("c07", note)]
    assert deep or found.items[7]["spec"] == {"x": 1}


async def test_pages_grow_again_after_a_bad_object(session, api_server, claims):
    claims(0)
    await session.list(CLAIMS, page_size=16)
    assert limits(api_server) == [16, 4, 1, 1, 2, 4, 8, 16, 16]


async def test_pages_that_are_too_large_are_fetched_smaller_and_stay_so(session, api_server):
    for number in range(40):
        api_server.store(f"{CLAIMS}/c{number:02}", {"spec": {"x": "x" * 3000}})
    found = await session.read_list(CLAIMS, bool, page_size=16, max_page_bytes=20_000)
    assert len(found.items) == 40
    assert limits(api_server)[:2] == [16, 4]
    assert set(limits(api_server)[2:]) == {4}, "no page is fetched in vain again"


async def test_an_object_that_is_too_large_is_skipped(session, api_server, monkeypatch):
    monkeypatch.setattr(listing, "MAX_OBJECT_BYTES", 30_000)
    for name, size in {"a": 25_000, "b": 35_000, "c": 10}.items():
        api_server.store(f"{CLAIMS}/{name}", {"spec": {"x": "x" * size}})
    found = await session.read_list(
        CLAIMS, lambda item: item["metadata"]["name"], max_page_bytes=20_000
    )
    assert found.items == ["a", "c"]
    assert [each.metadata["name"] for each in found.skipped] == ["b"]


async def test_what_is_kept_of_an_object_is_all_that_is_returned(session, claims):
    claims()
    found = await session.read_list(CLAIMS, lambda item: item["metadata"]["name"])
    assert found.items[:2] == ["c00", "c01"]


@pytest.fixture
def pages():
    """Three pages of two objects, and what happens: pages that are asked for, objects that are
    kept, and pages that nobody needs any more."""
    happened = []

    async def fetch(params, **_):
        number = int(params.get("continue", "0"))
        happened.append(f"page {number}")
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            happened.append(f"not page {number}")
            raise
        items = [{"metadata": {"name": f"c{number}{each}"}} for each in "ab"]
        metadata = {"continue": str(number + 1)} if number < 2 else {}
        return JsonResponse(body={"items": items, "metadata": metadata})

    return fetch, happened


async def test_the_api_server_prepares_a_page_while_the_one_before_is_read(pages):
    fetch, happened = pages
    found = await read_list(
        fetch, lambda body: happened.append(body["metadata"]["name"]), params={}, page_size=2
    )
    assert len(found.items) == 6
    assert happened == [
        *("page 0", "page 1", "c0a", "c0b"),
        *("page 2", "c1a", "c1b"),
        *("c2a", "c2b"),
    ]


@pytest.mark.parametrize("fails", [False, True], ids=["is-cancelled", "cannot-keep-an-object"])
async def test_a_list_that_ends_early_asks_for_no_more(pages, fails):
    fetch, happened = pages

    def keep(body):
        if fails:
            raise ValueError(body)
        task.cancel()

    task = asyncio.create_task(read_list(fetch, keep, params={}, page_size=2))
    with suppress(asyncio.CancelledError, ValueError):
        await task
    await asyncio.sleep(0.02)
    assert happened == ["page 0", "page 1", "not page 1"]


async def test_a_proxys_answer_is_not_blamed_on_an_object(session, api_server):
    api_server.store(f"{CLAIMS}/a", {})
    api_server.verbatim["items"] = "<html>"
    with pytest.raises(UnreadableError, match="cannot be parsed"):
        await session.list(CLAIMS)


async def test_an_answer_that_is_too_large_counts_as_unavailable(session, api_server, monkeypatch):
    monkeypatch.setattr("drakit_daemon.kube.request.MAX_RESPONSE_BYTES", 1000)
    api_server.store(f"{CLAIMS}/a", {"spec": {"x": "x" * 2000}})
    with pytest.raises(UnavailableError, match="more than 1000 bytes"):
        await session.get(f"{CLAIMS}/a")


async def test_a_reflector_goes_on_after_an_object_that_it_cannot_read(
    session, api_server, claims, caplog
):
    claims(7)
    changes = Reflector(session, CLAIMS, keep=lambda body: body).changes()
    first = await anext(changes)
    assert isinstance(first, Replaced)
    assert len(first.items) == 39
    for version in range(3):
        api_server.store(f"{CLAIMS}/c07", {"spec": {"x": "@deep", "version": version}})
    api_server.store(f"{CLAIMS}/c08", {"spec": {"x": 2}})
    assert (await anext(changes)).object["metadata"]["name"] == "c08"
    await changes.aclose()
    (logged,) = [record for record in caplog.records if record.msg == "object skipped"]
    assert logged.object == "lab/c07"


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("end", [b"]", b"}"], ids=["json", "no-json"])
def test_no_garbage_is_looked_for_while_an_object_is_parsed(end, collects):
    text = b"[" + b",".join([b"[{}]"] * 50_000) + end
    if not collects:
        gc.disable()
    before = collections()
    try:
        with suppress(orjson.JSONDecodeError):
            parse(text)
        assert gc.isenabled() is collects
        assert collections() - before < 5, "otherwise, it is more than a hundred"
    finally:
        gc.enable()


def collections():
    return sum(each["collections"] for each in gc.get_stats())
