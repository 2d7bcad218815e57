"""
Where claims are read: the API server, with an answer within the time that a kubelet's call has.

What a claim must look like is checked in :mod:`.allocation`.

It must not know the checkpoint, drivers or gRPC.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from drakit.device import ClaimReference
from drakit.kube import (
    ApiError,
    NotFoundError,
    Session,
    TooManyRequestsError,
    UnavailableError,
    resource_path,
)
from drakit.resource.claim import Claim, parse_claim
from drakit_nodeplugin.claims.errors import ClaimFetchError, ClaimGoneError, NoAnswerError

__all__ = ("ApiClaims", "ClaimSource")


class ClaimSource(Protocol):
    """What the engine needs to read claims."""

    async def fetch(self, reference: ClaimReference, *, timeout_seconds: float) -> Claim:
        """Read a claim; raise :class:`NoAnswerError`, :class:`ClaimGoneError` or another
        :class:`ClaimFetchError`."""
        ...


class ApiClaims:
    """Reads claims through a session that may not be there yet."""

    def __init__(self, session: asyncio.Future[Session]) -> None:
        self._session = session

    async def fetch(self, reference: ClaimReference, *, timeout_seconds: float) -> Claim:
        """Read a claim of ``resource.k8s.io/v1``."""
        path = resource_path(
            "resource.k8s.io/v1",
            "resourceclaims",
            namespace=reference.namespace,
            name=reference.name,
        )
        name = str(reference)
        try:
            if not self._session.done():
                async with asyncio.timeout(timeout_seconds):
                    await asyncio.shield(self._session)
            body = await self._session.result().get(path, timeout_seconds=timeout_seconds)
        except (UnavailableError, TooManyRequestsError, TimeoutError):
            # One that is overloaded says nothing about the claim either.
            raise NoAnswerError(claim=name, cause="it gives no answer") from None
        except NotFoundError as error:
            if error.reason == "NotFound" and error.details.get("name") == reference.name:
                raise ClaimGoneError(claim=name) from None
            # Not the claim but the API is missing: a server that is being upgraded, or a proxy.
            raise NoAnswerError(claim=name, cause=str(error)) from None
        except ApiError as error:
            raise ClaimFetchError(claim=name, cause=str(error)) from error
        try:
            return parse_claim(body)
        except (AttributeError, KeyError, TypeError) as error:
            # Its other claims must not fail for what a proxy in between has answered.
            raise ClaimFetchError(
                claim=name,
                cause=f"the answer is no ResourceClaim ({type(error).__name__}: {error})",
            ) from error
