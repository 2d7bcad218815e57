"""
Reads claims from the API server within the time limit for a kubelet call, and writes their status.

:mod:`.allocation` checks the claims.

Does not depend on the checkpoint, drivers or gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal

from drakit.device import ClaimReference
from drakit_daemon.kube import (
    ApiError,
    NotFoundError,
    Session,
    TooManyRequestsError,
    UnavailableError,
    UnreadableError,
    resource_path,
)
from drakit_daemon.kube.discovery import VersionNotServedError, served_version
from drakit_formats.resource.claim import Claim, parse_claim
from drakit_formats.resource.objects import GROUP, VERSIONS
from drakit_nodeplugin.claims.errors import (
    ClaimError,
    ClaimFetchError,
    ClaimGoneError,
    NoResponseError,
)

FetchResult = Literal["success", "gone", "no_response", "error"]
"""The result of a read, as a metric label."""


class ApiClaims:
    """
    Reads claims in the served API version, through a session that may not be connected yet.

    The first read uses ``v1``, which every cluster since 1.34 serves, so that no claim waits for
    discovery. The served versions are queried only if the API itself is missing, rather than just
    the claim.
    """

    def __init__(
        self,
        session: asyncio.Future[Session],
        *,
        observe: Callable[[float, FetchResult], None] = lambda _seconds, _result: None,
    ) -> None:
        """Create the reader. `observe` is called with the duration and the result of each
        :meth:`fetch` whose caller did not give up."""
        self._session = session
        self._observe = observe
        self._version = VERSIONS[0]
        self._asking = asyncio.Lock()
        self._asked = 0
        """The number of version queries that the API server has responded to."""

    async def fetch(self, reference: ClaimReference, *, timeout_seconds: float) -> Claim:
        """
        Read a claim. Raises :class:`NoResponseError`, :class:`ClaimGoneError` or another
        :class:`ClaimFetchError`. The fields that the plugin reads are the same in all versions of
        the API.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            body = await self._body(reference, until=began + timeout_seconds)
            try:
                claim = parse_claim(body)
            except (AttributeError, KeyError, TypeError) as error:
                # An invalid response from a proxy must not fail the pod's other claims.
                cause = "the response is not a ResourceClaim; check proxies of the API server"
                raise ClaimFetchError(claim=str(reference), cause=cause) from error
        except ClaimError as error:
            is_gone = isinstance(error, ClaimGoneError)
            is_silent = isinstance(error, NoResponseError)
            result = "gone" if is_gone else "no_response" if is_silent else "error"
            self._observe(clock() - began, result)
            raise
        self._observe(clock() - began, "success")
        return claim

    async def body(self, reference: ClaimReference, *, timeout_seconds: float) -> dict[str, Any]:
        """Read a claim as JSON. Raises the same errors as :meth:`fetch`."""
        until = asyncio.get_running_loop().time() + timeout_seconds
        return await self._body(reference, until=until)

    async def apply_status(
        self,
        reference: ClaimReference,
        status: Mapping[str, Any],
        *,
        field_manager: str,
    ) -> None:
        """Set exactly these fields in the status of a claim that was read with :meth:`body`, if the
        claim still has this UID. Raises :class:`ApiError`."""
        await self._session.result().apply(
            f"{_path(reference, self._version)}/status",
            {
                "apiVersion": f"{GROUP}/{self._version}",
                "kind": "ResourceClaim",
                "metadata": {
                    "namespace": reference.namespace,
                    "name": reference.name,
                    "uid": reference.uid,
                },
                **({"status": status} if status else {}),
            },
            field_manager=field_manager,
        )

    async def _body(self, reference: ClaimReference, *, until: float) -> dict[str, Any]:
        name = str(reference)
        try:
            if not self._session.done():
                async with asyncio.timeout_at(until):
                    await asyncio.shield(self._session)
            return await self._get(reference, until=until)
        # the response for this claim is unreadable, for example nested too deeply
        except UnreadableError as error:
            raise ClaimFetchError(claim=name, cause=str(error)) from None
        except (UnavailableError, TooManyRequestsError, TimeoutError):
            # A response from an overloaded server proves nothing about the claim either.
            raise NoResponseError(claim=name, cause="the API server does not respond") from None
        except VersionNotServedError as error:
            raise NoResponseError(claim=name, cause=str(error)) from None
        except NotFoundError as error:
            if _is_of(reference, error):
                raise ClaimGoneError(claim=name) from None
            # The API is missing, rather than the claim: the server is being upgraded, or a proxy
            # responded.
            raise NoResponseError(claim=name, cause=str(error)) from None
        except ApiError as error:
            raise ClaimFetchError(claim=name, cause=str(error)) from error

    async def _get(self, reference: ClaimReference, *, until: float) -> dict[str, Any]:
        session, version, asked = self._session.result(), self._version, self._asked
        left = max(until - asyncio.get_running_loop().time(), 0.001)
        try:
            return await session.get(_path(reference, version), timeout_seconds=left)
        except NotFoundError as error:
            if _is_of(reference, error):
                raise
            async with asyncio.timeout_at(until):
                served = await self._ask(session, asked=asked)
                if served == version:
                    raise
                return await session.get(_path(reference, served))

    async def _ask(self, session: Session, *, asked: int) -> str:
        """Query the served version. All claims that found the API missing share one query."""
        async with self._asking:
            if self._asked == asked:
                self._version = await served_version(session, GROUP, VERSIONS)
                self._asked += 1
            return self._version


def _is_of(reference: ClaimReference, error: NotFoundError) -> bool:
    """Return whether the claim is missing, rather than its API or namespace."""
    return error.reason == "NotFound" and error.details.get("name") == reference.name


def _path(reference: ClaimReference, version: str) -> str:
    return resource_path(
        f"{GROUP}/{version}",
        "resourceclaims",
        namespace=reference.namespace,
        name=reference.name,
    )
