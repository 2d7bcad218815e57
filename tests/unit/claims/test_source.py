from __future__ import annotations

import asyncio
from typing import Any

import pytest

from drakit.kube import NotFoundError, TooManyRequestsError
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
    with pytest.raises(ClaimFetchError, match=r"claim lab/claim-a: .* is no ResourceClaim"):
        await source(body).fetch(reference("a"), timeout_seconds=1)


def not_found(*, reason: str = "NotFound", **details: str) -> NotFoundError:
    return NotFoundError(
        status=404, reason=reason, message="gone", method="GET", path="/x", details=details
    )


async def test_a_claim_of_which_the_server_says_so_is_gone():
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
async def test_any_other_404_says_nothing_about_the_claim(error):
    with pytest.raises(NoAnswerError):
        await source(error).fetch(reference("a"), timeout_seconds=1)


async def test_an_api_server_that_is_overloaded_says_nothing_about_the_claim():
    busy = TooManyRequestsError(
        status=429, reason="TooManyRequests", message="later", method="GET", path="/"
    )
    with pytest.raises(NoAnswerError):
        await source(busy).fetch(reference("a"), timeout_seconds=1)
