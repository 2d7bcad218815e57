"""
A session with the Kubernetes API, with parts for lists, watches, work queues, Leases and Events.

Objects are plain dictionaries, as the server sent them; :mod:`drakit_formats.resource` reads claims
and slices. Reflector, queue, Lease and Events are separate, optional modules.

Does not depend on drivers or devices. Only :mod:`.client_library` may import the client library. It
never loads the library's models, which would take 30 MiB on every node.
"""

from __future__ import annotations

# isort: split
from drakit_daemon.kube import (
    aiohttp_import as aiohttp_import,
)  # must come before everything that imports aiohttp

# isort: split
from drakit_daemon.kube.listing import Listing, WatchEvent
from drakit_daemon.kube.request import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    TooManyRequestsError,
    UnauthorizedError,
    UnavailableError,
    UnreadableError,
    resource_path,
)
from drakit_daemon.kube.session import ConfigError, Overrides, Session, connect

__all__ = (
    "AlreadyExistsError",
    "ApiError",
    "ConfigError",
    "ConflictError",
    "ForbiddenError",
    "GoneError",
    "InvalidError",
    "Listing",
    "NotFoundError",
    "Overrides",
    "Session",
    "TooManyRequestsError",
    "UnauthorizedError",
    "UnavailableError",
    "UnreadableError",
    "WatchEvent",
    "connect",
    "resource_path",
)
