"""
Errors of requests to the API server: one class for each reaction of a caller.

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

It must not know sessions or the HTTP library. No text contains a token: headers are never shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self, cast

import orjson

from drakit_daemon.kube.paths import parse_path

__all__ = (
    "AlreadyExistsError",
    "ApiError",
    "ConflictError",
    "ForbiddenError",
    "GoneError",
    "InvalidError",
    "NotFoundError",
    "TooManyRequestsError",
    "UnauthorizedError",
    "UnavailableError",
    "UnreadableError",
    "error_of_response",
    "error_of_status",
)

_MAX_MESSAGE_CHARACTERS = 2000
"""A proxy in between may answer with a page of HTML; a validation error lists every field."""


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
