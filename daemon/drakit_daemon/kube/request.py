"""
The two ends of a request to the API server: its path, and the answer or the error.

Paths are made from names, and read back for error sentences: any group, version and resource has a
path of the same shape. The body of a response is read up to a limit, and parsed. There is one class
of errors for each reaction of a caller:

    ApiError                    any answer that is not a success
      UnauthorizedError         401: the server rejects our token, even after it was read again
      ForbiddenError            403: the text names the missing verb, or what else denied it
      NotFoundError             404
      AlreadyExistsError        409: an object of this name exists
      ConflictError             409: the object has changed since it was read; read again
      GoneError                 410: the resource version is too old; list again
      InvalidError              422: the server will never accept this object
      TooManyRequestsError      429: ask again after ``retry_after_seconds``
      UnavailableError          no answer (connection, timeout), or 5xx; ask again later
        UnreadableError         a response that is too large, or that cannot be parsed as JSON

It must not know sessions, kinds, timeouts or the HTTP library: the caller passes the chunks. No
text contains a token: headers are never shown.
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
    """The resource that a path names; the core group is the empty string."""

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
    Make the path of a collection (no name) or of an object.

    ``resource`` is the plural: ``resource_path("resource.k8s.io/v1", "resourceclaims", ...)``.
    """
    if subresource is not None and name is None:
        raise ValueError(f"a subresource needs a name: {resource}/{subresource}")
    parts = ["apis" if "/" in api_version else "api", *api_version.split("/")]
    if namespace is not None:
        parts += ["namespaces", namespace]
    parts += [part for part in (resource, name, subresource) if part is not None]
    if not all(parts):
        # An empty name would turn a request for one object into one for all of them.
        raise ValueError(f"a part of the path is empty: /{'/'.join(parts)}")
    return "/" + "/".join(quote(part, safe="") for part in parts)


def parse_path(path: str) -> Target | None:
    """Read a path back; None if it is not that of a resource (``/version``)."""
    parts = path.partition("?")[0].strip("/").split("/")
    match parts:
        case ["api", _, *rest] if rest:
            group = ""
        case ["apis", group, _, *rest] if rest:
            pass
        case _:
            return None
    namespace = None
    # ".../namespaces/lab" is the namespace itself, ".../namespaces/lab/pods" what is in it.
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
"""A proxy in between may answer with a page of HTML; a validation error lists every field."""


_NO_ANSWER = frozenset([0, 401, 429, 503, 504])
"""Statuses that say nothing about the request itself; a webhook that fails is a 500."""


class ApiError(Exception):
    """The API server did not fulfil a request. The text is a sentence for logs and Events."""

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
        """The HTTP status; 0 if there was no answer."""
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
        """Whether the API server, or a webhook that it asks, does not accept the request: another
        attempt can succeed only after somebody has changed something."""
        return self.status not in _NO_ANSWER

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
    Refused, by RBAC or by an admission plugin.

    ``verb``, ``resource`` and ``group`` name the missing permission; ``verb`` is None if it was
    not RBAC that refused (a quota, a policy), where granting more would not help.
    """

    _RBAC = re.compile(r'cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)" in API group "(.*?)"')

    verb: str | None = None
    resource: str = ""
    group: str = ""

    def sentence(self) -> str:
        target = parse_path(self.path)
        if found := self._RBAC.search(self.message):
            # The server's word comes first: the missing permission can be another than that of
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
    def no_answer(cls, method: str, path: str, *, why: str) -> Self:
        return cls(status=0, reason="NoAnswer", message=why, method=method, path=path)

    def sentence(self) -> str:
        if self.status == 0:
            return f"{self.method} {self.path}: no answer from the API server: {self.message}"
        return super().sentence()


class UnreadableError(UnavailableError):
    def sentence(self) -> str:
        return f"{self.method} {self.path}: the API server's answer cannot be read: {self.message}"


_CLASSES: Mapping[int, type[ApiError]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    422: InvalidError,
    429: TooManyRequestsError,
}


def error_of_status(
    status: Mapping[str, Any],
    *,
    method: str,
    path: str,
    code: int | None = None,
    retry_after_seconds: float | None = None,
) -> ApiError:
    """Build the error for a ``Status`` object, as in answers and in ERROR events of watches."""
    code = code or int(status.get("code") or 500)
    reason = str(status.get("reason") or "Unknown")
    details: Mapping[str, Any] = status.get("details") or {}
    kind = _CLASSES.get(code, UnavailableError if code >= 500 else ApiError)
    if reason == "AlreadyExists":
        kind = AlreadyExistsError
    if retry_after_seconds is None and details.get("retryAfterSeconds"):
        retry_after_seconds = float(details["retryAfterSeconds"])
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
    """Build the error for an answer with any body: proxies answer with text or nothing."""
    status: dict[str, Any] = {"message": body.decode(errors="replace").strip()}
    try:
        answer: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    if isinstance(answer, dict):
        status = cast("dict[str, Any]", answer)
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


# ---------------------------------------------------------------- answers

MAX_ANSWER_BYTES = 32 * 2**20
"""Bytes of a response, unless the caller sets another limit."""


_MANAGERS = b',"managedFields":['
"""The last field of an object's metadata (ObjectMeta). Its writers can nest it at will, because the
API server keeps it as it comes. Within a JSON string these quotes would be escaped."""

_AFTER_MANAGERS = re.compile(rb'\](?=\}?,"[A-Za-z]+":)')
"""The end of a list before another member: of the metadata (custom resources have sorted fields),
or of the object. Within a JSON string it would be the end of the string, and not followed by a
name."""

MAX_ENDS = 10_000
"""Lists in managed fields that are followed by a member: each costs 4 us, and there are none in
fields that the API server made."""

STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
"""A string in JSON."""


def nesting(part: bytes) -> int:
    """
    Return by how many levels a part of a JSON text nests; it begins and ends outside strings.

    There is no loop over each bracket: 1.5 MiB of them would keep everything else waiting.
    """
    brackets = STRING.sub(b"", part)
    opened = brackets.count(b"{") + brackets.count(b"[")
    return opened - brackets.count(b"}") - brackets.count(b"]")


def parse(data: bytes | bytearray) -> Any:
    """
    Parse JSON while Python's cyclic collector is stopped; raises orjson.JSONDecodeError.

    With each 700 values, the collector would look for garbage among all new ones: of a pod of
    1.4 MB, this takes longer than the rest.
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
    Parse the JSON of an object that cannot be parsed with its `managedFields`; None if it cannot be
    parsed without them, either.

    Nobody needs them, and whoever may write an object could make it unreadable.
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
class Answer:
    """A JSON object, and its size in bytes."""

    body: dict[str, Any]
    size_bytes: int = 0


async def read_answer(
    chunks: AsyncIterable[bytes],
    *,
    method: str,
    path: str,
    max_bytes: int | None = None,
    one_metadata: bool = False,
) -> Answer:
    """
    Read a response; UnreadableError if it is too large, or is not a JSON object.

    With `one_metadata`, it is a list with the metadata of at most one object, whose `managedFields`
    are dropped before parsing.
    """
    bound = max_bytes or MAX_ANSWER_BYTES
    answer = bytearray()
    async for chunk in chunks:
        answer += chunk
        if len(answer) > bound:
            why = f"it has more than {bound} bytes"
            raise UnreadableError.no_answer(method, path, why=why)
    if one_metadata and (end := answer.find(_MANAGERS)) >= 0:
        answer[end:] = b"}}]}"  # of the metadata, the object, the items and the list
    try:
        parsed: Any = parse(answer) if answer else {}
    except orjson.JSONDecodeError as error:
        parsed = parse_without_managers(answer)
        if parsed is None:
            why = f"it cannot be parsed ({error.msg})"
            raise UnreadableError.no_answer(method, path, why=why) from None
    if not isinstance(parsed, dict):
        why = "it is not a JSON object; is there a proxy in between?"
        raise UnreadableError.no_answer(method, path, why=why)
    return Answer(body=cast("dict[str, Any]", parsed), size_bytes=len(answer))
