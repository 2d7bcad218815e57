"""Requests, their errors and timeouts, against an API server in memory."""

import asyncio
import logging

import pytest

from drakit_daemon.kube import (
    AlreadyExistsError,
    ApiError,
    ConfigError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    TooManyRequestsError,
    UnauthorizedError,
    UnavailableError,
    client_library,
    connect,
    resource_path,
)
from drakit_daemon.kube.session import MAX_REQUESTS

CLAIMS = resource_path("resource.k8s.io/v1", "resourceclaims", namespace="lab")
CLAIM = resource_path("resource.k8s.io/v1", "resourceclaims", namespace="lab", name="cam")


async def test_an_object_lives_and_changes(session, api_server):
    made = await session.create(CLAIMS, {"metadata": {"name": "cam"}, "spec": {"a": 1}})
    assert made["metadata"]["namespace"] == "lab"
    changed = await session.replace(CLAIM, {**made, "spec": {"a": 2}})
    assert changed["metadata"]["generation"] == 2
    await session.patch(CLAIM, {"metadata": {"labels": {"x": "y"}}})
    assert (await session.get(CLAIM))["metadata"]["labels"] == {"x": "y"}
    status = resource_path(
        "resource.k8s.io/v1", "resourceclaims", namespace="lab", name="cam", subresource="status"
    )
    applied = await session.apply(status, {"status": {"devices": []}}, field_manager="me")
    assert applied["status"] == {"devices": []}
    assert api_server.queries[-1] == {"fieldManager": "me", "force": "true"}
    assert api_server.headers[-1]["Content-Type"] == "application/apply-patch+yaml"
    assert api_server.headers[-1]["User-Agent"] == "drakit-tests"
    await session.delete(CLAIM)
    assert api_server.object(CLAIM) is None


async def test_applying_creates_what_is_missing(session, api_server):
    await session.apply(CLAIM, {"spec": {}}, field_manager="me")
    assert api_server.object(CLAIM)["metadata"]["name"] == "cam"


async def test_a_dry_run_is_answered_and_stores_nothing(session, api_server):
    answer = await session.create(CLAIMS, {"metadata": {"name": "cam"}, "spec": {}}, dry_run=True)
    assert answer["metadata"]["name"] == "cam"
    assert api_server.queries[-1] == {"dryRun": "All"}
    assert api_server.object(CLAIM) is None
    old = api_server.store(CLAIM, {"spec": {"a": 1}})
    answer = await session.replace(CLAIM, old | {"spec": {"a": 2}}, dry_run=True)
    assert answer["spec"] == {"a": 2}
    assert api_server.queries[-1] == {"dryRun": "All"}
    assert api_server.object(CLAIM) == old


async def test_only_the_object_that_was_seen_is_deleted(session, api_server):
    uid = api_server.store(CLAIM, {})["metadata"]["uid"]
    with pytest.raises(ConflictError):
        await session.delete(CLAIM, uid="another")
    with pytest.raises(ConflictError):
        await session.delete(CLAIM, uid=uid, resource_version="1")
    await session.delete(CLAIM, uid=uid)
    assert api_server.object(CLAIM) is None


async def test_missing_existing_and_changed_objects_have_their_errors(session, api_server):
    with pytest.raises(NotFoundError, match=r"GET .*resourceclaims/cam.*not found"):
        await session.get(CLAIM)
    old = api_server.store(CLAIM, {"spec": {"a": 1}})
    with pytest.raises(AlreadyExistsError):
        await session.create(CLAIMS, {"metadata": {"name": "cam"}})
    api_server.store(CLAIM, {"spec": {"a": 2}})
    with pytest.raises(ConflictError):
        await session.replace(CLAIM, {**old, "spec": {"a": 3}})


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, ApiError),
        (410, GoneError),
        (422, InvalidError),
        (429, TooManyRequestsError),
        (500, UnavailableError),
        (503, UnavailableError),
    ],
)
async def test_a_status_has_its_error(session, api_server, status, expected):
    api_server.fail(status=status, reason="Because", message="no", headers={"Retry-After": "7"})
    with pytest.raises(ApiError) as caught:
        await session.get(CLAIM)
    assert type(caught.value) is expected
    assert (caught.value.status, caught.value.reason) == (status, "Because")
    assert caught.value.retry_after_seconds == 7
    assert (await asyncio.gather(session.get(CLAIM), return_exceptions=True))[0].status == 404


FORBIDDEN = {
    "the-servers-words": (
        "GET",
        resource_path("resource.k8s.io/v1", "resourceslices"),
        'resourceslices.resource.k8s.io is forbidden: User "x" cannot list resource '
        '"resourceslices" in API group "resource.k8s.io" at the cluster scope',
        'lacks the verb "list" on "resourceslices" of API group resource.k8s.io (cluster-wide)',
    ),
    "no-words-but-the-path": (
        "GET",
        CLAIM,
        "",
        'lacks the verb "get" on "resourceclaims" of API group resource.k8s.io (in namespace lab)',
    ),
    "core-group": (
        "GET",
        resource_path("v1", "nodes", name="n"),
        'nodes "n" is forbidden: User "x" cannot get resource "nodes" in API group "" at the '
        "cluster scope",
        'lacks the verb "get" on "nodes" of the core API group (cluster-wide)',
    ),
    "another-permission-than-the-requests": (
        "GET",
        CLAIM,
        'User "x" cannot associated-node:patch resource "resourceclaims/driver" in API group '
        '"resource.k8s.io" in the namespace "lab"',
        'lacks the verb "associated-node:patch" on "resourceclaims/driver"',
    ),
    "admission": (
        "GET",
        CLAIM,
        "exceeded quota: claims",
        "refused by the API server: exceeded quota: claims",
    ),
}


@pytest.mark.parametrize(
    ("method", "path", "message", "sentence"), FORBIDDEN.values(), ids=FORBIDDEN
)
async def test_forbidden_names_what_is_missing(
    session, api_server, method, path, message, sentence
):
    api_server.fail(method, path, status=403, reason="Forbidden", message=message)
    with pytest.raises(ForbiddenError) as caught:
        await session.get(path)
    assert sentence in str(caught.value)
    assert (caught.value.verb is None) == ("quota" in message)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(["bad gateway"], id="no-status"),
        pytest.param({"message": "bad gateway", "details": "upstream is down"}, id="other-details"),
        pytest.param(
            {"message": "bad gateway", "code": "?", "details": {"retryAfterSeconds": "soon"}},
            id="words-for-numbers",
        ),
    ],
)
async def test_an_answer_of_a_proxy_keeps_its_text(session, api_server, body):
    api_server.fail(status=502, reason="x", message="x")
    api_server._faults[0].error.body = body
    with pytest.raises(UnavailableError, match="bad gateway"):
        await session.get(CLAIM)


async def test_a_lost_connection_is_no_answer(session, api_server):
    api_server.fail("POST", disconnect=True)
    with pytest.raises(
        UnavailableError, match="closed the connection before the response"
    ) as caught:
        await session.create(CLAIMS, {})
    assert caught.value.status == 0


async def test_a_slow_server_is_no_answer(session, api_server):
    api_server.delay(5, "GET")
    began = asyncio.get_running_loop().time()
    with pytest.raises(UnavailableError, match=r"did not respond within 0\.1 s"):
        await session.get(CLAIM, timeout_seconds=0.1)
    assert asyncio.get_running_loop().time() - began < 2


async def test_an_unavailable_server_raises_unavailable(api_server, tmp_path):
    kubeconfig = api_server.write_kubeconfig(tmp_path)
    api_server_url = api_server.url
    await api_server.__aexit__()
    async with await connect(kubeconfig, user_agent="t") as session:
        assert session.server == api_server_url
        with pytest.raises(UnavailableError, match="cannot be reached: Connection refused; check"):
            await session.get(CLAIM)


async def test_a_refused_token_is_never_logged(api_server, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    api_server.token = "right"
    kubeconfig = api_server.write_kubeconfig(tmp_path, token="secret-but-wrong")
    async with await connect(kubeconfig, user_agent="t") as session:
        with pytest.raises(UnauthorizedError) as caught:
            await session.get(CLAIM)
    assert "secret" not in f"{caught.value!r} {caught.value} {vars(caught.value)}"
    assert "secret" not in caplog.text


async def test_a_broken_kubeconfig_is_refused_without_its_content(tmp_path):
    path = tmp_path / "kubeconfig"
    path.write_text("users: [{name: a, user: {token: secret\n")
    with pytest.raises(ConfigError) as caught:
        await connect(path, user_agent="t")
    assert str(path) in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_missing_kubeconfig_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"kubeconfig .*/absent does not exist"):
        await connect(tmp_path / "absent", user_agent="t")


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_list_that_expires_on_the_way_starts_again(session, api_server, times):
    for n in range(4):
        api_server.store(f"{CLAIMS}/c{n}", {})
    left = iter(range(times))
    real = api_server.cluster.request

    def request(method, path, params, body):
        answer = real(method, path, params, body)
        if "continue" not in params and next(left, None) is not None:
            api_server.expire_history()  # compacted right after the first page was read
        return answer

    api_server.cluster.request = request
    if times == 3:
        with pytest.raises(GoneError):
            await session.list(CLAIMS, page_size=3)
        return
    listing = await session.list(CLAIMS, params={"labelSelector": ""}, page_size=3)
    assert len(listing.items) == 4
    assert {query["limit"] for query in api_server.queries} == {"3"}, "never without pages"
    assert listing.resource_version == str(api_server.cluster.version)


async def test_selectors_are_passed_on(session, api_server):
    slices = "/apis/resource.k8s.io/v1/resourceslices"
    for n in range(3):
        api_server.store(f"{slices}/s{n}", {"spec": {"nodeName": f"node-{n}"}})
    listing = await session.list(slices, params={"fieldSelector": "spec.nodeName=node-1"})
    assert [item["metadata"]["name"] for item in listing.items] == ["s1"]


async def test_many_requests_share_a_few_connections(api_server, session):
    api_server.store("/api/v1/nodes/node-1", {"metadata": {"uid": "node-uid"}})
    answers = await asyncio.gather(*(session.get("/api/v1/nodes/node-1") for _ in range(100)))
    assert len(answers) == 100
    pooled = sum(len(idle) for idle in session.http.connector._conns.values())
    assert 1 < pooled <= MAX_REQUESTS


async def test_a_request_that_finds_no_place_in_time_reports_it(api_server, session):
    for _ in range(MAX_REQUESTS):
        await session._places.acquire()
    with pytest.raises(UnavailableError, match="16 other requests are waiting"):
        await session.get("/api/v1/nodes/node-1", timeout_seconds=0.05)
    for _ in range(MAX_REQUESTS):
        session._places.release()


@pytest.mark.parametrize(
    ("no_proxy", "proxy"),
    [
        pytest.param("", "http://proxy.example.com:3128", id="a-proxy-for-all"),
        pytest.param("10.0.0.1", None, id="not-for-this-server"),
        pytest.param("example.org", "http://proxy.example.com:3128", id="not-for-others"),
    ],
)
def test_the_proxy_is_that_of_the_environment_for_this_server(monkeypatch, no_proxy, proxy):
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.com:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert client_library._proxy_of_environment("https://10.0.0.1:6443") == proxy
