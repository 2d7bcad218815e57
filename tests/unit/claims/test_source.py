"""Claims as read from the API server; only a definite answer proves that a claim is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from drakit_daemon.kube import NotFoundError, TooManyRequestsError, UnreadableError
from drakit_nodeplugin.claims.errors import ClaimFetchError, ClaimGoneError, NoResponseError
from drakit_nodeplugin.claims.source import ApiClaims
from tests.fakes.claims import claim_body, opaque, reference


class FakeSession:
    """Answers each request with one body, or raises."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def get(self, path: str, *, timeout_seconds: float = 10) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def source(session: Any) -> ApiClaims:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(session)
    return ApiClaims(future)


def not_found(*, reason: str = "NotFound", **details: str) -> NotFoundError:
    return NotFoundError(
        status=404, reason=reason, message="gone", method="GET", path="/x", details=details
    )


BUSY = TooManyRequestsError(
    status=429, reason="TooManyRequests", message="later", method="GET", path="/"
)
DEEP = UnreadableError.no_response("GET", "/x", why="depth limit exceeded")
NO_CLAIM = "claim lab/claim-a: .* is not a ResourceClaim"


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        pytest.param({}, ClaimFetchError, NO_CLAIM, id="empty"),
        pytest.param([], ClaimFetchError, NO_CLAIM, id="list"),
        pytest.param({"metadata": {"name": "a"}}, ClaimFetchError, NO_CLAIM, id="no-uid"),
        pytest.param(
            claim_body("a", {"pool": None}) | {"status": 7},
            ClaimFetchError,
            NO_CLAIM,
            id="status-is-a-number",
        ),
        pytest.param(
            claim_body("a", {"driver": "x"}), ClaimFetchError, NO_CLAIM, id="device-without-name"
        ),
        # The API server answers, so requests for other claims continue.
        pytest.param(DEEP, ClaimFetchError, "depth limit exceeded", id="unreadable"),
        pytest.param(not_found(name="claim-a"), ClaimGoneError, None, id="not-found"),
        pytest.param(not_found(), NoResponseError, None, id="api-not-served"),
        pytest.param(not_found(name="lab"), NoResponseError, None, id="another-object-not-found"),
        pytest.param(
            not_found(reason="Unknown", name="claim-a"), NoResponseError, None, id="404-of-a-proxy"
        ),
        pytest.param(BUSY, NoResponseError, None, id="overloaded"),
    ],
)
async def test_the_error_shows_what_an_answer_proves_about_the_claim(answer, error, text):
    with pytest.raises(ClaimFetchError, match=text) as caught:
        await source(FakeSession(answer)).fetch(reference("a"), timeout_seconds=1)
    assert type(caught.value) is error


def claim_path(version: str, uid: str) -> str:
    return f"/apis/resource.k8s.io/{version}/namespaces/lab/resourceclaims/claim-{uid}"


async def test_if_v1_is_served_a_claim_takes_one_request(session, api_server):
    api_server.store(claim_path("v1", "a"), claim_body("a", "cam-0"))
    claim = await source(session).fetch(reference("a"), timeout_seconds=1)
    assert claim.uid == "a"
    assert api_server.requests == [("GET", claim_path("v1", "a"))]


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
async def test_an_older_cluster_is_asked_once_what_it_serves(session, api_server, version):
    api_server.served = {"resource.k8s.io": ["v1alpha3", version]}
    claims = source(session)
    for uid in "abc":
        config = opaque({"a": 1}, source="FromClass", driver="x")
        body = claim_body(uid, {"device": "cam-0", "shareID": "share-1"}, config=[config])
        api_server.store(claim_path(version, uid), body)
        claim = await claims.fetch(reference(uid), timeout_seconds=1)
        assert claim.allocation.results[0].share_id == "share-1"
        assert claim.allocation.configs[0].from_class is True
    assert api_server.requests == [
        ("GET", claim_path("v1", "a")),
        ("GET", "/apis/resource.k8s.io"),
        ("GET", claim_path(version, "a")),
        ("GET", claim_path(version, "b")),
        ("GET", claim_path(version, "c")),
    ]
    with pytest.raises(ClaimGoneError):
        await claims.fetch(reference("d"), timeout_seconds=1)


async def test_claims_of_one_pod_ask_together(session, api_server):
    api_server.served = {"resource.k8s.io": ["v1beta1"]}
    for uid in "abcdef":
        api_server.store(claim_path("v1beta1", uid), claim_body(uid, "cam-0"))
    claims = source(session)
    fetched = [claims.fetch(reference(uid), timeout_seconds=1) for uid in "abcdef"]
    assert [claim.uid for claim in await asyncio.gather(*fetched)] == list("abcdef")
    assert api_server.requests.count(("GET", "/apis/resource.k8s.io")) == 1


async def test_a_version_that_an_update_removed_is_detected(session, api_server):
    api_server.served = {"resource.k8s.io": ["v1beta1"]}
    api_server.store(claim_path("v1beta1", "a"), claim_body("a", "cam-0"))
    claims = source(session)
    await claims.fetch(reference("a"), timeout_seconds=1)
    api_server.served = {"resource.k8s.io": ["v1"]}
    api_server.store(claim_path("v1", "a"), claim_body("a", "cam-0"))
    assert (await claims.fetch(reference("a"), timeout_seconds=1)).uid == "a"


async def test_a_cluster_without_the_api_proves_nothing_about_claims(session, api_server):
    api_server.served = {"resource.k8s.io": []}
    with pytest.raises(NoResponseError, match="does not serve it at all"):
        await source(session).fetch(reference("a"), timeout_seconds=1)


async def test_after_a_proxy_that_knows_no_path_the_claim_is_read(session, api_server):
    api_server.store(claim_path("v1", "a"), claim_body("a", "cam-0"))
    api_server.fail("GET", claim_path("v1", "a"), status=404, reason="Unknown")
    claims = source(session)
    with pytest.raises(NoResponseError):
        await claims.fetch(reference("a"), timeout_seconds=1)
    assert (await claims.fetch(reference("a"), timeout_seconds=1)).uid == "a"
