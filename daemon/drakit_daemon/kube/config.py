"""
The API server's address, and credentials that are refreshed.

The file of a pod's token is replaced about every hour, an exec plugin's token when it expires. Both
may be revoked at any time, which only the API server's 401 shows.

It must not know requests. Tokens are never logged and never part of an error's text.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from drakit_daemon.kube.client_library import (
    ClusterAccess,
    ConfigError,
    load_in_cluster,
    load_kubeconfig,
)

__all__ = ("ConfigError", "Credentials", "ServiceAccount", "find_cluster")

logger: logging.Logger = logging.getLogger(__name__)

REFRESH_SECONDS = 30.0
"""The maximum age of credentials; the kubelet replaces a token when a fifth of its life is left, at
least two minutes before its end."""


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
    """The Authorization header's value, read again when it is old or was rejected."""

    def __init__(
        self,
        fetch: Callable[[bool], Awaitable[str | None]],
        *,
        refresh_seconds: float = REFRESH_SECONDS,
    ) -> None:
        """``fetch`` asks the source; its argument is whether the last value was rejected."""
        self._fetch = fetch
        self._refresh_seconds = refresh_seconds
        self._value: str | None = None
        self._old_at = float("-inf")
        """The time from which the value is old; loop time."""
        self._lock = asyncio.Lock()

    async def current(self) -> str | None:
        now = asyncio.get_running_loop().time
        if now() >= self._old_at:
            async with self._lock:
                if now() >= self._old_at:  # no other request has asked meanwhile
                    await self._ask(refused=False)
        return self._value

    async def replace(self, refused: str | None) -> bool:
        """After a 401: ask the source at once. Return whether there is another value to try."""
        async with self._lock:
            if self._value == refused:  # otherwise another request has replaced it
                await self._ask(refused=True)
            return self._value != refused

    async def _ask(self, *, refused: bool) -> None:
        try:
            self._value = await self._fetch(refused)
        except Exception as error:
            # The old token is better than none; without one, the server answers 401.
            logger.warning(
                "credentials cannot be reloaded, keeping the old ones",
                extra={"error": type(error).__name__},
            )
        # Also after a failure: an unavailable source is not asked on each request.
        self._old_at = asyncio.get_running_loop().time() + self._refresh_seconds


async def find_cluster(
    kubeconfig: Path | None,
    *,
    context: str | None = None,
    environ: Mapping[str, str] = os.environ,
    account: ServiceAccount | None = None,
) -> tuple[ClusterAccess, Credentials]:
    """
    Use the given kubeconfig, else the pod's service account, else the user's kubeconfig.

    A context is one of a kubeconfig: with it, the service account is not used.
    """
    account = account or ServiceAccount()
    in_pod = kubeconfig is None and context is None
    if in_pod and await asyncio.to_thread(account.usable, environ):
        access = await load_in_cluster(account.token, account.ca, environ)

        async def read(refused: bool) -> str | None:
            return await asyncio.to_thread(_read_token, account.token)

        return access, Credentials(read)
    paths = await asyncio.to_thread(_locate, kubeconfig, environ)
    access = await load_kubeconfig(paths, context=context)

    async def renew(refused: bool) -> str | None:
        return await access.renew(refused=refused)

    return access, Credentials(renew)


def _read_token(path: Path) -> str:
    token = path.read_text().strip()
    if not token:
        raise ConfigError(f"{path} is empty")
    return f"Bearer {token}"


def _locate(kubeconfig: Path | None, environ: Mapping[str, str]) -> str:
    if kubeconfig is not None:
        paths = str(kubeconfig)
    else:
        default = Path(environ.get("HOME", "/root"), ".kube", "config")
        paths = environ.get("KUBECONFIG") or str(default)
    if not any(Path(path).is_file() for path in paths.split(os.pathsep)):
        raise ConfigError(
            f"no API server is configured: kubeconfig {paths} does not exist, and this is not a "
            "pod with a service account; set --kubeconfig or KUBECONFIG"
        )
    return paths
