"""
A session with one API server. Requests take a path, and return plain dictionaries or raise typed
errors.

Every request has a timeout and sends the current credentials. If the server rejects them, the
session reads them again and retries once. Nothing else is retried: the caller decides whether and
when. :mod:`.reflector` follows a collection continuously.

A pod's token file is replaced about every hour, and an exec plugin's token when it expires. Both
tokens may be revoked at any time, which only a 401 response from the API server shows. Tokens are
never logged, and error messages never contain them.

Does not depend on kinds. A session belongs to the event loop that opened it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import orjson

from drakit_daemon.kube.client_library import (
    ClusterAccess,
    ConfigError,
    Connection,
    Overrides,
    load_in_cluster,
    load_kubeconfig,
)
from drakit_daemon.kube.connection_errors import CHECK, connection_problem
from drakit_daemon.kube.listing import MAX_PAGE_BYTES, Listing, WatchEvent, read_events, read_list
from drakit_daemon.kube.request import (
    JsonResponse,
    UnavailableError,
    error_of_response,
    read_response,
)

logger: logging.Logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- credentials

REFRESH_SECONDS = 30.0
"""Maximum age of credentials. The kubelet replaces a token when a fifth of its lifetime is left,
which is at least two minutes before it expires."""


@dataclass(frozen=True, kw_only=True)
class ServiceAccount:
    """The files of a pod's credentials."""

    folder: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")

    @property
    def token(self) -> Path:
        return self.folder / "token"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def usable(self, environ: Mapping[str, str]) -> bool:
        there = self.token.is_file() and self.ca.is_file()
        return there and bool(environ.get("KUBERNETES_SERVICE_HOST"))


class Credentials:
    """The value of the Authorization header. It is read again when it is old or was rejected."""

    def __init__(self, fetch: Callable[[bool], Awaitable[str | None]]) -> None:
        """
        :param fetch: gets the value from its source. Its argument is whether the last value was
            rejected.
        """
        self._fetch = fetch
        self._value: str | None = None
        self._old_at = float("-inf")
        """The time at which the value becomes old (loop clock)."""
        self._lock = asyncio.Lock()

    async def current(self) -> str | None:
        now = asyncio.get_running_loop().time
        if now() >= self._old_at:
            async with self._lock:
                if now() >= self._old_at:  # no other request has updated it in the meantime
                    await self._ask(refused=False)
        return self._value

    async def replace(self, refused: str | None) -> bool:
        """Get the value again immediately after a 401 response. Return whether there is a different
        value to try."""
        async with self._lock:
            if self._value == refused:  # otherwise, another request has already replaced it
                await self._ask(refused=True)
            return self._value != refused

    async def _ask(self, *, refused: bool) -> None:
        try:
            self._value = await self._fetch(refused)
        except Exception as error:
            # Keep the old token, which may still be valid. Without a token, the server responds
            # with 401.
            logger.warning(
                "credentials cannot be reloaded, keeping the old ones",
                extra={"error": type(error).__name__},
            )
        # Set this even after a failure, so that an unavailable source is not queried for each
        # request.
        self._old_at = asyncio.get_running_loop().time() + REFRESH_SECONDS


async def find_cluster(
    kubeconfig: Path | None,
    *,
    context: str | None = None,
    overrides: Overrides | None = None,
    environ: Mapping[str, str] = os.environ,
    account: ServiceAccount | None = None,
) -> tuple[ClusterAccess, Credentials]:
    """
    Find the cluster with the given kubeconfig, otherwise with the pod's service account, otherwise
    with the user's kubeconfig.

    A context or overrides apply to a kubeconfig, so with them, the service account is not used.
    """
    account = account or ServiceAccount()
    in_pod = kubeconfig is None and context is None and overrides in (None, Overrides())
    if in_pod and await asyncio.to_thread(account.usable, environ):
        access = await load_in_cluster(account.token, account.ca, environ)

        async def read(refused: bool) -> str | None:
            return await asyncio.to_thread(_read_token, account.token)

        return access, Credentials(read)
    optional = context is None and overrides is not None and bool(overrides.server)
    paths = await asyncio.to_thread(_locate, kubeconfig, environ, optional=optional)
    access = await load_kubeconfig(paths, context=context, overrides=overrides)

    async def renew(refused: bool) -> str | None:
        return await access.renew(refused=refused)

    return access, Credentials(renew)


def _read_token(path: Path) -> str:
    token = path.read_text().strip()
    if not token:
        raise ConfigError(f"{path} is empty")
    return f"Bearer {token}"


def user_kubeconfig(environ: Mapping[str, str]) -> str:
    """Return the paths of the user's kubeconfig: those in ``$KUBECONFIG``, otherwise
    ``~/.kube/config``. The files do not have to exist."""
    return environ.get("KUBECONFIG") or os.path.join(environ.get("HOME", "/root"), ".kube/config")


def kubeconfig_exists(paths: str) -> bool:
    """Return whether any of a kubeconfig's paths is a file."""
    # Don't use Path.is_file, which raises an error if the user is not allowed to read the
    # directory.
    return any(map(os.path.isfile, paths.split(os.pathsep)))


def _locate(kubeconfig: Path | None, environ: Mapping[str, str], *, optional: bool) -> str:
    """Return the paths of the kubeconfig. If it is optional and does not exist, return ""."""
    paths = user_kubeconfig(environ) if kubeconfig is None else str(kubeconfig)
    if not kubeconfig_exists(paths):
        if optional and kubeconfig is None:
            return ""
        raise ConfigError(
            f"no API server is configured: kubeconfig {paths} does not exist, and this is not a "
            "pod with a service account; set --kubeconfig or $KUBECONFIG"
        )
    return paths


# ---------------------------------------------------------------- requests


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """The timeouts of the session."""

    connect_seconds: float = 3.0
    """The timeout for a connection. If a node's network is down, the session must notice that
    before the kubelet's deadline."""

    request_seconds: float = 10.0
    """The timeout for a request including its response, unless the caller sets another one."""

    watch_seconds: int = 300
    """How long the server keeps a watch open, so that watches are redistributed over its
    replicas."""

    watch_silence_seconds: float = 70.0
    """How long a watch can receive nothing before it ends, because its connection may be dead. A
    server sends a bookmark every minute, or less often while etcd does not report progress (by
    default, every 10 minutes if no object of the kind changes)."""


_DRY_RUN = {"dryRun": "All"}
_STRICT = {"fieldValidation": "Strict"}

MAX_REQUESTS = 16
"""Maximum number of concurrent requests, not including watches. An open TLS connection takes 256
KiB, and 64 reads are not faster (median) with 64 connections than with 16."""

MAX_LINE = 1 << 20
"""Maximum length of a line of text."""

PAGE_SIZE = 100
"""The number of objects per page. A page of full slices is 3 MiB of JSON."""

_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

Kept = TypeVar("Kept")


async def connect(
    kubeconfig: Path | None = None,
    *,
    user_agent: str,
    context: str | None = None,
    overrides: Overrides | None = None,
    timeouts: Timeouts | None = None,
) -> Session:
    """
    Return a session that uses the kubeconfig, otherwise the pod's service account, otherwise the
    user's kubeconfig.

    Does not send a request yet. Raises ConfigError if there is no usable configuration.
    """
    access, credentials = await find_cluster(kubeconfig, context=context, overrides=overrides)
    return Session(access, credentials, user_agent=user_agent, timeouts=timeouts)


class Session:
    """Requests to one API server. Close the session, or use it as an async context manager."""

    def __init__(
        self,
        access: ClusterAccess,
        credentials: Credentials,
        *,
        user_agent: str,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.timeouts: Timeouts = timeouts or Timeouts()
        self._credentials = credentials
        self._places = asyncio.Semaphore(MAX_REQUESTS)
        self._connection = Connection(
            access,
            headers={"User-Agent": user_agent, "Accept": "application/json"},
            middlewares=(self._authorize,),
        )
        self.server: str = access.server
        """The API server's URL."""
        self.namespace: str = access.namespace
        """The namespace of the kubeconfig's context. Empty if the context does not set one."""
        self.http: aiohttp.ClientSession = self._connection.http
        """The HTTP client of the session, for a framework that sends its own requests (Kopf)."""

    async def close(self) -> None:
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def get(
        self,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Get an object, or one page of a collection."""
        response = await self._request("GET", path, params=params, timeout_seconds=timeout_seconds)
        return response.body

    async def create(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        dry_run: bool = False,
        strict: bool = False,
        timeout_seconds: float | None = None,
    ) -> dict[str, Any]:
        """
        Create an object in a collection.

        :param dry_run: whether to get the response without storing the object.
        :param strict: whether to reject the object if it has unknown fields.
        """
        params = {**(_DRY_RUN if dry_run else {}), **(_STRICT if strict else {})}
        response = await self._request(
            "POST", path, params=params, body=body, timeout_seconds=timeout_seconds
        )
        return response.body

    async def replace(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        dry_run: bool = False,
        timeout_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Replace an object. Raises ConflictError if its resourceVersion is not current. For
        `dry_run` see `create`."""
        params = _DRY_RUN if dry_run else None
        response = await self._request(
            "PUT", path, params=params, body=body, timeout_seconds=timeout_seconds
        )
        return response.body

    async def patch(
        self, path: str, body: Mapping[str, Any], *, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        """Change parts of an object with a merge patch."""
        response = await self._request(
            "PATCH",
            path,
            body=body,
            content_type="application/merge-patch+json",
            timeout_seconds=timeout_seconds,
        )
        return response.body

    async def apply(
        self, path: str, body: Mapping[str, Any], *, field_manager: str, dry_run: bool = False
    ) -> dict[str, Any]:
        """Apply an object on the server side. Take ownership of exactly these fields, even if
        another client owns them now, and create the object if it is missing. For `dry_run` see
        `create`. A dry run also rejects unknown fields."""
        response = await self._request(
            "PATCH",
            path,
            params={
                **(_DRY_RUN | _STRICT if dry_run else {}),
                "fieldManager": field_manager,
                "force": "true",
            },
            body=body,
            content_type="application/apply-patch+yaml",  # JSON is valid YAML
        )
        return response.body

    async def delete(
        self, path: str, *, uid: str | None = None, resource_version: str | None = None
    ) -> dict[str, Any]:
        """Delete an object. Raises ConflictError if it is not the object, or the version of it,
        that the caller has read."""
        wanted = {"uid": uid, "resourceVersion": resource_version}
        preconditions = {name: value for name, value in wanted.items() if value is not None}
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}
        response = await self._request("DELETE", path, body=body if preconditions else None)
        return response.body

    async def list(
        self, path: str, *, params: Mapping[str, str] | None = None, page_size: int = PAGE_SIZE
    ) -> Listing[dict[str, Any]]:
        """List a collection in pages."""
        return await self.read_list(path, lambda item: item, params=params, page_size=page_size)

    async def read_list(
        self,
        path: str,
        keep: Callable[[dict[str, Any]], Kept],
        *,
        params: Mapping[str, str] | None = None,
        page_size: int = PAGE_SIZE,
        max_page_bytes: int = MAX_PAGE_BYTES,
    ) -> Listing[Kept]:
        """List a collection in pages, and keep the result of ``keep`` for each object."""

        async def fetch(
            params: Mapping[str, str], *, max_bytes: int, metadata_only: bool
        ) -> JsonResponse:
            return await self._request(
                "GET",
                path,
                params=params,
                accept=_METADATA_ONLY if metadata_only else None,
                max_bytes=max_bytes,
                one_metadata=metadata_only,
            )

        return await read_list(
            fetch, keep, params=params or {}, page_size=page_size, max_page_bytes=max_page_bytes
        )

    async def lines(self, path: str) -> AsyncGenerator[bytes]:
        """Get a potentially large text, such as metrics, line by line."""
        timeout = aiohttp.ClientTimeout(
            total=self.timeouts.request_seconds, sock_connect=self.timeouts.connect_seconds
        )
        async with self._opened("GET", path, timeout=timeout, accept="text/plain") as response:
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MAX_LINE:
                    why = f"a line has more than {MAX_LINE} bytes"
                    raise UnavailableError.no_response("GET", path, why=why)
                for line in lines:
                    yield line
            if rest:
                yield rest

    async def watch(
        self, path: str, *, resource_version: str, params: Mapping[str, str] | None = None
    ) -> AsyncGenerator[WatchEvent]:
        """
        Watch a collection over one connection. Returns when the server ends the watch, or has sent
        nothing for ``watch_silence_seconds``.

        Raises GoneError if the resource version is too old: list again. Raises UnavailableError if
        the connection broke: resume from the last version.
        """
        query = {
            **(params or {}),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(self.timeouts.watch_seconds),
        }
        silence = self.timeouts.watch_silence_seconds
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self.timeouts.connect_seconds, sock_read=silence
        )
        async with self._opened("WATCH", path, params=query, timeout=timeout) as response:
            try:
                async for event in read_events(response.content.iter_any(), path=path):
                    yield event
            except TimeoutError:
                return

    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        accept: str | None = None,
        max_bytes: int | None = None,
        one_metadata: bool = False,
        timeout_seconds: float | None = None,
    ) -> JsonResponse:
        timeout = aiohttp.ClientTimeout(
            total=timeout_seconds or self.timeouts.request_seconds,
            sock_connect=self.timeouts.connect_seconds,
        )
        data = None if body is None else orjson.dumps(body)
        try:
            # Only requests take a place. The limit does not apply to watches.
            async with asyncio.timeout(timeout.total if self._places.locked() else None):
                await self._places.acquire()
        except TimeoutError:
            why = f"{MAX_REQUESTS} other requests are waiting for responses from the API server"
            raise UnavailableError.no_response(method, path, why=why) from None
        try:
            async with self._opened(
                method,
                path,
                params=params,
                data=data,
                content_type=content_type,
                accept=accept,
                timeout=timeout,
            ) as response:
                chunks = response.content.iter_any()
                return await read_response(
                    chunks, method=method, path=path, max_bytes=max_bytes, one_metadata=one_metadata
                )
        finally:
            self._places.release()

    @asynccontextmanager
    async def _opened(
        self,
        method: str,
        path: str,
        *,
        timeout: aiohttp.ClientTimeout,
        params: Mapping[str, str] | None = None,
        data: bytes | None = None,
        content_type: str | None = None,
        accept: str | None = None,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request. Yield the response if it is successful. Otherwise, raise its error."""
        headers: dict[str, str] = {}
        if data and content_type:
            headers["Content-Type"] = content_type
        if accept:
            headers["Accept"] = accept
        try:
            async with asyncio.timeout(timeout.total or self.timeouts.request_seconds):
                response = await self.http.request(
                    "GET" if method == "WATCH" else method,
                    self.server + path,
                    params=params,
                    data=data,
                    headers=headers,
                    timeout=timeout,
                    allow_redirects=False,  # don't send the token to another server
                    server_hostname=self._connection.server_hostname,
                )
            async with response:
                if response.status >= 300:
                    raise error_of_response(
                        response.status,
                        await response.read(),
                        method=method,
                        path=path,
                        retry_after=response.headers.get("Retry-After"),
                    )
                yield response
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                why = f"cannot be reached within {self.timeouts.connect_seconds:g} s{CHECK}"
            else:
                is_silent = isinstance(error, aiohttp.SocketTimeoutError)
                limit = timeout.sock_read if is_silent else timeout.total
                seconds = limit or self.timeouts.request_seconds
                why = f"did not respond within {seconds:g} s{CHECK}"
            raise self._no_response(method, path, why) from None
        except (aiohttp.ClientError, OSError) as error:
            # Don't chain the cause: the representation of some aiohttp errors contains the request
            # headers.
            raise self._no_response(method, path, connection_problem(error)) from None

    def _no_response(self, method: str, path: str, problem: str) -> UnavailableError:
        why = f"the API server {self.server} {problem}"
        return UnavailableError.no_response(method, path, why=why)

    async def _authorize(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Add the current token to each request. After a 401 response, retry once with a new
        token."""
        value = await self._credentials.current()
        if value is not None:
            request.headers["Authorization"] = value
        response = await send(request)
        if response.status == 401 and await self._credentials.replace(value):
            response.release()
            if (value := await self._credentials.current()) is not None:
                request.headers["Authorization"] = value
            response = await send(request)
        return response
