"""
The path of a request to the API server, and its response or error.

Paths are built from names, and parsed again for error messages. The paths of all groups, versions
and resources have the same form. The body of a response is read up to a limit, and parsed. There is
an error class for each way in which a caller may react:

    ApiError                    any response that is not a success
      UnauthorizedError         401: the server rejects our token, even after it was read again
      ForbiddenError            403: the message names the missing verb, or the other cause
      NotFoundError             404
      AlreadyExistsError        409: an object of this name exists
      ConflictError             409: the object has changed since it was read; read again
      GoneError                 410: the resource version is too old; list again
      InvalidError              422: the server will never accept this object
      TooManyRequestsError      429: ask again after ``retry_after_seconds``
      UnavailableError          no response (connection, timeout), or 5xx; ask again later
        UnreadableError         a response that is too large, or that cannot be parsed as JSON

Does not depend on sessions, kinds, timeouts or the HTTP library: the caller passes the chunks.
Messages never contain a token, because they do not include headers.
"""

from __future__ import annotations

import gc
import re
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, cast
from urllib.parse import quote

import orjson

# ---------------------------------------------------------------- paths


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The resource that a path names. The core group is the empty string."""

    group: str
    resource: str
    namespace: str | None = None
    name: str | None = None
    subresource: str | None = None


def resource_path(
    api_version: str,
    resource: str,
    *,
    namespace: str | None = None,
    name: str | None = None,
    subresource: str | None = None,
) -> str:
    """
    Build the path of a collection (without a name) or of an object.

    ``resource`` is the plural: ``resource_path("resource.k8s.io/v1", "resourceclaims", ...)``.
    """
    if subresource is not None and name is None:
        raise ValueError(f"a subresource needs a name: {resource}/{subresource}")
    parts = ["apis" if "/" in api_version else "api", *api_version.split("/")]
    if namespace is not None:
        parts += ["namespaces", namespace]
    parts += [part for part in (resource, name, subresource) if part is not None]
    if not all(parts):
        # With an empty name, a request for one object would become a request for all objects.
        raise ValueError(f"a part of the path is empty: /{'/'.join(parts)}")
    return "/" + "/".join(quote(part, safe="") for part in parts)


def parse_path(path: str) -> Target | None:
    """Parse a path. Return None if it is not the path of a resource (such as ``/version``)."""
    parts = path.partition("?")[0].strip("/").split("/")
    match parts:
        case ["api", _, *rest] if rest:
            group = ""
        case ["apis", group, _, *rest] if rest:
            pass
        case _:
            return None
    namespace = None
    # ".../namespaces/lab" is the namespace itself, ".../namespaces/lab/pods" is a collection in it.
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    resource, name, subresource = (*rest, None, None)[:3]
    return Target(
        group=group,
        resource=resource or "",
        namespace=namespace,
        name=name,
        subresource=subresource,
    )


# ---------------------------------------------------------------- errors

_MAX_MESSAGE_CHARACTERS = 2000
"""Maximum length of a message. A proxy can return an HTML page, and a validation error can list
every field."""


_NOT_PROCESSED = frozenset([0, 401, 429, 503, 504])
"""Statuses that do not depend on the content of the request. 500 is not included, because it is
also the status of a failed webhook."""


class ApiError(Exception):
    """A request to the API server failed. The message is a sentence for logs and Events."""

    def __init__(
        self,
        *,
        status: int,
        reason: str,
        message: str,
        method: str,
        path: str,
        details: Mapping[str, Any] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        self.status = status
        """The HTTP status. 0 if there was no response."""
        self.reason = reason
        """The server's reason, such as ``NotFound``."""
        self.message: str = message[:_MAX_MESSAGE_CHARACTERS]
        self.method = method
        self.path = path
        self.details: Mapping[str, Any] = details or {}
        self.retry_after_seconds = retry_after_seconds
        super().__init__(self.sentence())

    @property
    def is_refusal(self) -> bool:
        """Whether the API server, or a webhook that it calls, refused the request. Another attempt
        can succeed only after somebody has changed something."""
        return self.status not in _NOT_PROCESSED

    def sentence(self) -> str:
        return f"{self.method} {self.path}: {self.message} ({self.status} {self.reason})"


class UnauthorizedError(ApiError):
    def sentence(self) -> str:
        return (
            f"{self.method} {self.path}: the API server does not accept the client's credentials; "
            f"check that the service account or the kubeconfig's user still exists"
        )


class ForbiddenError(ApiError):
    """
    RBAC or an admission plugin denied the request.

    ``verb``, ``resource`` and ``group`` name the missing permission. ``verb`` is None if the cause
    is not RBAC but, for example, a quota or a policy. In that case, more permissions do not help.
    """

    _RBAC = re.compile(r'cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)" in API group "(.*?)"')

    verb: str | None = None
    resource: str = ""
    group: str = ""

    def sentence(self) -> str:
        target = parse_path(self.path)
        if found := self._RBAC.search(self.message):
            # The server's message takes precedence: the missing permission can differ from that of
            # the request ("associated-node:update" on "resourceclaims/driver").
            self.verb, self.resource, self.group = found.groups()
        elif target is not None and (not self.message or self.message == self.reason):
            self.verb = _verb(self.method, named=target.name is not None)
            self.resource = "/".join(filter(None, (target.resource, target.subresource)))
            self.group = target.group
        if self.verb is None:
            return f"{self.method} {self.path}: refused by the API server: {self.message}"
        namespace = target.namespace if target else None
        where = f"in namespace {namespace}" if namespace else "cluster-wide"
        group = f"API group {self.group}" if self.group else "the core API group"
        return (
            f"{self.method} {self.path}: the RBAC role of the client lacks the verb "
            f'"{self.verb}" on "{self.resource}" of {group} ({where})'
        )


class NotFoundError(ApiError):
    pass


class AlreadyExistsError(ApiError):
    pass


class ConflictError(ApiError):
    pass


class GoneError(ApiError):
    pass


class InvalidError(ApiError):
    pass


class TooManyRequestsError(ApiError):
    pass


class UnavailableError(ApiError):
    @classmethod
    def no_response(cls, method: str, path: str, *, why: str) -> Self:
        """Return the error for a request without a usable response. `why` is a sentence."""
        return cls(status=0, reason="NoResponse", message=why, method=method, path=path)

    def sentence(self) -> str:
        if self.status == 0:
            return f"{self.method} {self.path}: {self.message}"
        return super().sentence()


class UnreadableError(UnavailableError):
    def sentence(self) -> str:
        return (
            f"{self.method} {self.path}: the API server's response cannot be read: {self.message}"
        )


_CLASSES: Mapping[int, type[ApiError]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    422: InvalidError,
    429: TooManyRequestsError,
}


def _number(value: object) -> float | None:
    """Return a positive number of a response, or None."""
    return value if isinstance(value, (int, float)) and value > 0 else None


def error_of_status(
    status: Mapping[str, Any],
    *,
    method: str,
    path: str,
    code: int | None = None,
    retry_after_seconds: float | None = None,
) -> ApiError:
    """Return the error for a ``Status`` object from a response or a watch's ERROR event."""
    code = code or int(_number(status.get("code")) or 500)
    reason = str(status.get("reason") or "Unknown")
    found = cast("object", status.get("details"))
    # A proxy can return any JSON.
    details = cast("Mapping[str, Any]", found if isinstance(found, Mapping) else {})
    kind = _CLASSES.get(code, UnavailableError if code >= 500 else ApiError)
    if reason == "AlreadyExists":
        kind = AlreadyExistsError
    if retry_after_seconds is None:
        retry_after_seconds = _number(details.get("retryAfterSeconds"))
    return kind(
        status=code,
        reason=reason,
        message=str(status.get("message") or reason),
        method=method,
        path=path,
        details=details,
        retry_after_seconds=retry_after_seconds,
    )


def error_of_response(
    code: int, body: bytes, *, method: str, path: str, retry_after: str | None = None
) -> ApiError:
    """Return the error for a response with any body. A proxy may return text or an empty body."""
    status: dict[str, Any] = {"message": body.decode(errors="replace").strip()}
    try:
        response: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        response = None
    if isinstance(response, dict):
        status = cast("dict[str, Any]", response)
    seconds = float(retry_after) if retry_after and retry_after.isdecimal() else None
    return error_of_status(status, method=method, path=path, code=code, retry_after_seconds=seconds)


def _verb(method: str, *, named: bool) -> str:
    match method:
        case "GET":
            return "get" if named else "list"
        case "DELETE":
            return "delete" if named else "deletecollection"
        case _:
            verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "WATCH": "watch"}
            return verbs.get(method, method.lower())


# ---------------------------------------------------------------- responses

MAX_RESPONSE_BYTES = 32 * 2**20
"""Default maximum size of a response."""


_MANAGERS = b',"managedFields":['
"""The start of the last field in an object's metadata (ObjectMeta). Clients can nest this field
arbitrarily, because the API server stores it unchanged. These bytes cannot occur inside a JSON
string, because quotes are escaped there."""

_AFTER_MANAGERS = re.compile(rb'\](?=\}?,"[A-Za-z]+":)')
"""Matches the end of a list that precedes another field of the metadata (custom resources have
sorted fields) or of the object. It cannot match inside a JSON string: the quote would end the
string, and no name would follow."""

MAX_ENDS = 10_000
"""Maximum number of lists to try as the end of the managed fields. Each costs 4 us. The managed
fields that the API server writes do not contain such lists."""

STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
"""Matches a JSON string."""


def nesting(part: bytes) -> int:
    """
    Return by how much a JSON fragment changes the nesting depth. The fragment starts and ends
    outside strings.

    The function does not loop over the brackets, because 1.5 MiB of brackets would block everything
    else.
    """
    brackets = STRING.sub(b"", part)
    opened = brackets.count(b"{") + brackets.count(b"[")
    return opened - brackets.count(b"}") - brackets.count(b"]")


def parse(data: bytes | bytearray) -> Any:
    """
    Parse JSON while Python's cyclic garbage collector is stopped. Raises orjson.JSONDecodeError.

    Otherwise, the collector would run after every 700 new values, and inspect all of them. For a
    pod of 1.4 MB, that takes longer than the parsing.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(data)
    finally:
        if collects:
            gc.enable()


def parse_without_managers(data: bytes | bytearray) -> Any:
    """
    Parse the JSON of an object that cannot be parsed with its `managedFields`. Return None if it
    cannot be parsed without them either.

    These fields are not needed, and anyone who may write an object could use them to make it
    unreadable.
    """
    rest = _without_managers(bytes(data))
    try:
        return None if rest is None else parse(rest)
    except orjson.JSONDecodeError:
        return None


def _without_managers(data: bytes) -> bytes | None:
    start = data.find(_MANAGERS)
    if start < 0:
        return None
    depth, counted = 0, start + len(_MANAGERS) - 1
    for end in islice(_AFTER_MANAGERS.finditer(data, counted), MAX_ENDS):
        depth += nesting(data[counted : end.end()])
        counted = end.end()
        if depth == 0:
            return data[:start] + data[counted:]
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonResponse:
    """A JSON object, and its size in bytes."""

    body: dict[str, Any]
    size_bytes: int = 0


async def read_response(
    chunks: AsyncIterable[bytes],
    *,
    method: str,
    path: str,
    max_bytes: int | None = None,
    one_metadata: bool = False,
) -> JsonResponse:
    """
    Read a response. Raises UnreadableError if it is too large, or is not a JSON object.

    With `one_metadata`, the response is a list with the metadata of at most one object, whose
    `managedFields` are dropped before parsing.
    """
    bound = max_bytes or MAX_RESPONSE_BYTES
    response = bytearray()
    async for chunk in chunks:
        response += chunk
        if len(response) > bound:
            why = f"it has more than {bound} bytes"
            raise UnreadableError.no_response(method, path, why=why)
    if one_metadata and (end := response.find(_MANAGERS)) >= 0:
        response[end:] = b"}}]}"  # close the metadata, the object, the items and the list
    try:
        parsed: Any = parse(response) if response else {}
    except orjson.JSONDecodeError as error:
        parsed = parse_without_managers(response)
        if parsed is None:
            why = f"it cannot be parsed ({error.msg})"
            raise UnreadableError.no_response(method, path, why=why) from None
    if not isinstance(parsed, dict):
        why = "it is not a JSON object; is there a proxy in between?"
        raise UnreadableError.no_response(method, path, why=why)
    return JsonResponse(body=cast("dict[str, Any]", parsed), size_bytes=len(response))
