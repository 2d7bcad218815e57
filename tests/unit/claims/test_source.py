from __future__ import annotations

import asyncio
from typing import Any

import pytest

from drakit_daemon.kube import NotFoundError, Session, TooManyRequestsError, UnreadableError
from drakit_nodeplugin.claims.errors import ClaimFetchError, ClaimGoneError, NoAnswerError
from drakit_nodeplugin.claims.source import ApiClaims
from tests.fakes.claims import claim_body, reference


class FakeSession:
    """Answers each request with one body, or raises."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def get(self, path: str, *, timeout_seconds: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def source(answer: Any) -> ApiClaims:
    session: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    session.set_result(FakeSession(answer))
    return ApiClaims(session)


async def test_a_claim_is_read():
    claim = await source(claim_body("a", "cam-0")).fetch(reference("a"), timeout_seconds=1)
    assert claim.uid == "a"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({}, id="empty"),
        pytest.param([], id="list"),
        pytest.param({"metadata": {"name": "a"}}, id="no-uid"),
        pytest.param(claim_body("a", {"pool": None}) | {"status": 7}, id="no-object"),
        pytest.param(claim_body("a", {"driver": "x"}), id="no-device"),
    ],
)
async def test_an_answer_that_is_no_claim_is_an_error_of_this_claim(body):
    with pytest.raises(ClaimFetchError, match=r"claim lab/claim-a: .* is not a ResourceClaim"):
        await source(body).fetch(reference("a"), timeout_seconds=1)


async def test_a_claim_that_cannot_be_parsed_is_an_error_of_this_claim():
    """The API server answers, so requests for other claims continue."""
    error = UnreadableError.no_answer("GET", "/x", why="depth limit exceeded")
    with pytest.raises(ClaimFetchError, match="depth limit exceeded"):
        await source(error).fetch(reference("a"), timeout_seconds=1)


def not_found(*, reason: str = "NotFound", **details: str) -> NotFoundError:
    return NotFoundError(
        status=404, reason=reason, message="gone", method="GET", path="/x", details=details
    )


async def test_a_claim_that_the_server_does_not_find_is_gone():
    with pytest.raises(ClaimGoneError):
        await source(not_found(name="claim-a")).fetch(reference("a"), timeout_seconds=1)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(not_found(), id="api-not-served"),
        pytest.param(not_found(name="lab"), id="another-object"),
        pytest.param(not_found(reason="Unknown", name="claim-a"), id="another-reason"),
    ],
)
async def test_any_other_404_proves_nothing_about_the_claim(error):
    with pytest.raises(NoAnswerError):
        await source(error).fetch(reference("a"), timeout_seconds=1)


async def test_an_api_server_that_is_overloaded_proves_nothing_about_the_claim():
    busy = TooManyRequestsError(
        status=429, reason="TooManyRequests", message="later", method="GET", path="/"
    )
    with pytest.raises(NoAnswerError):
        await source(busy).fetch(reference("a"), timeout_seconds=1)


def claims_of(session: Session) -> ApiClaims:
    future: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
    future.set_result(session)
    return ApiClaims(future)


def claim_path(version: str, uid: str) -> str:
    return f"/apis/resource.k8s.io/{version}/namespaces/lab/resourceclaims/claim-{uid}"


async def test_if_v1_is_served_a_claim_takes_one_request(session, api_server):
    api_server.store(claim_path("v1", "a"), claim_body("a", "cam-0"))
    await claims_of(session).fetch(reference("a"), timeout_seconds=1)
    assert api_server.requests == [("GET", claim_path("v1", "a"))]


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
async def test_an_older_cluster_is_asked_once_what_it_serves(session, api_server, version):
    api_server.served = {"resource.k8s.io": ["v1alpha3", version]}
    source = claims_of(session)
    for uid in "abc":
        body = claim_body(uid, {"device": "cam-0", "shareID": "share-1"})
        config = {"source": "FromClass", "opaque": {"driver": "x", "parameters": {"a": 1}}}
        body["status"]["allocation"]["devices"]["config"] = [config]
        api_server.store(claim_path(version, uid), body)
        claim = await source.fetch(reference(uid), timeout_seconds=1)
        assert claim.allocation.results[0].share_id == "share-1"
        assert claim.allocation.configs[0].from_class is True
    assert api_server.requests == [
        ("GET", claim_path("v1", "a")),
        ("GET", "/apis/resource.k8s.io"),
        ("GET", claim_path(version, "a")),
        ("GET", claim_path(version, "b")),
        ("GET", claim_path(version, "c")),
    ]


async def test_claims_of_one_pod_ask_together(session, api_server):
    api_server.served = {"resource.k8s.io": ["v1beta1"]}
    for uid in "abcdef":
        api_server.store(claim_path("v1beta1", uid), claim_body(uid, "cam-0"))
    source = claims_of(session)
    fetched = [source.fetch(reference(uid), timeout_seconds=1) for uid in "abcdef"]
    assert [claim.uid for claim in await asyncio.gather(*fetched)] == list("abcdef")
    assert api_server.requests.count(("GET", "/apis/resource.k8s.io")) == 1


async def test_a_version_that_an_update_removed_is_detected(session, api_server):
    api_server.served = {"resource.k8s.io": ["v1beta1"]}
    api_server.store(claim_path("v1beta1", "a"), claim_body("a", "cam-0"))
    source = claims_of(session)
    await source.fetch(reference("a"), timeout_seconds=1)
    api_server.served = {"resource.k8s.io": ["v1"]}
    api_server.store(claim_path("v1", "a"), claim_body("a", "cam-0"))
    assert (await source.fetch(reference("a"), timeout_seconds=1)).uid == "a"


async def test_a_claim_that_an_older_cluster_does_not_have_is_gone(session, api_server):
    api_server.served = {"resource.k8s.io": ["v1beta1"]}
    with pytest.raises(ClaimGoneError):
        await claims_of(session).fetch(reference("a"), timeout_seconds=1)


async def test_a_cluster_without_the_api_proves_nothing_about_claims(session, api_server):
    api_server.served = {"resource.k8s.io": []}
    with pytest.raises(NoAnswerError, match="does not serve it at all"):
        await claims_of(session).fetch(reference("a"), timeout_seconds=1)


async def test_a_proxy_that_knows_no_path_proves_nothing_about_claims(session, api_server):
    api_server.store(claim_path("v1", "a"), claim_body("a", "cam-0"))
    api_server.fail("GET", claim_path("v1", "a"), status=404, reason="Unknown")
    source = claims_of(session)
    with pytest.raises(NoAnswerError):
        await source.fetch(reference("a"), timeout_seconds=1)
    assert (await source.fetch(reference("a"), timeout_seconds=1)).uid == "a"
