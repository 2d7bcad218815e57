"""
The only module that imports kubernetes-asyncio. The library implements in-cluster configuration,
kubeconfig files, exec plugins, OIDC, TLS settings and proxies.

A normal import of any of its modules imports all of its models, which takes 32 MiB more on every
node and up to two seconds. Therefore, this module registers the library's packages as empty
packages that know only their folder, and imports only the required modules. urllib3, which the
library needs only for basic authentication, is loaded on first use, which saves 1 MiB. All this
relies on the library's private layout. If the layout changes, the library is imported as usual, and
one log line reports it.

Does not depend on requests, errors or objects. This module does not expose untyped values of the
library.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    # This import is only for readers and import-linter. At run time, _library() imports the
    # package.
    import kubernetes_asyncio as kubernetes_asyncio

logger: logging.Logger = logging.getLogger(__name__)

_ROOT = "kubernetes_asyncio"
_EMPTY_PACKAGES = (_ROOT, f"{_ROOT}.client", f"{_ROOT}.client.models", f"{_ROOT}.config")
_LOAD_TIMEOUT_SECONDS = 30.0
"""The time limit for loading credentials. An exec plugin may request a token from a cloud provider.
If the plugin hangs, the daemon must not hang."""

_SERVER_ONLY: dict[str, Any] = {
    "clusters": [{"name": "", "cluster": {}}],
    "users": [{"name": "", "user": {}}],
    "contexts": [{"name": "", "context": {"cluster": "", "user": ""}}],
    "current-context": "",
}
"""The kubeconfig for a user who specifies only the server's URL."""

_import_lock = threading.Lock()
"""Protects the imports, because two event loops in two threads may connect at the same time."""


class ConfigError(Exception):
    """No usable configuration for the API server was found. The message names the locations that
    were searched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """Replacements for parts of a kubeconfig, like kubectl's options. Empty fields do not replace
    anything."""

    cluster: str = ""
    """The name of the kubeconfig's cluster to use instead of the context's cluster. `user` replaces
    the context's user in the same way."""

    user: str = ""
    server: str = ""
    token: str = field(default="", repr=False)
    certificate_authority: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    as_user: str = ""
    as_uid: str = ""
    as_groups: tuple[str, ...] = ()

    @property
    def of_cluster(self) -> dict[str, Any]:
        """The fields to replace in the kubeconfig's cluster."""
        fields = {
            "server": self.server,
            "certificate-authority": self.certificate_authority
            and os.path.abspath(self.certificate_authority),
            "insecure-skip-tls-verify": self.insecure_skip_tls_verify,
            "tls-server-name": self.tls_server_name,
        }
        return {name: value for name, value in fields.items() if value}

    @property
    def of_user(self) -> dict[str, Any]:
        """The fields to replace in the kubeconfig's user."""
        fields = {
            "as": self.as_user,
            "as-uid": self.as_uid,
            "as-groups": list(self.as_groups),
            "token": self.token,
        }
        return {name: value for name, value in fields.items() if value}


@dataclass(kw_only=True)
class ClusterAccess:
    """The API server's address and credentials, from one configuration."""

    server: str
    authorization: str | None
    """The value of the Authorization header. None if the user has a client certificate instead, if
    there is no user, or in a pod, whose token is read from its file."""
    configuration: Any
    loader: Any = None
    """The library's kubeconfig loader. None in a pod."""

    impersonation: tuple[tuple[str, str], ...] = ()
    """The headers to impersonate another user."""

    @property
    def namespace(self) -> str:
        """The namespace of the kubeconfig's context. Empty if the context does not set one."""
        found = self.loader and self.loader.current_context
        return str(found["context"].get("namespace") or "") if found else ""

    async def renew(self, *, refused: bool) -> str | None:
        """
        Get credentials from the source in the kubeconfig: a file, an exec plugin or OIDC.

        If a plugin's token does not have an expiry time, the plugin runs again only after the API
        server has rejected the token.
        """
        loader = self.loader
        if loader is None:
            return self.authorization
        if not refused and _has_endless_token(loader):
            return self.authorization
        if refused and hasattr(loader, "exec_plugin_expiry"):
            del loader.exec_plugin_expiry  # otherwise, the loader would return its cached token
        await _in_thread(loader._load_authentication)
        self.authorization = getattr(loader, "token", None)
        return self.authorization


class Connection:
    """A pool of connections with the TLS and proxy settings of a configuration."""

    def __init__(
        self,
        access: ClusterAccess,
        *,
        headers: Mapping[str, str],
        middlewares: tuple[aiohttp.ClientMiddlewareType, ...],
    ) -> None:
        """Create the pool without opening a connection. Requires a running event loop."""
        self.server: str = access.server
        self._pool: Any = _library().rest.RESTClientObject(access.configuration)
        # Create a separate session on the library's pool, for the headers and middlewares.
        self.http: aiohttp.ClientSession = aiohttp.ClientSession(
            connector=self._pool.pool_manager.connector,
            connector_owner=False,
            headers=[*headers.items(), *access.impersonation],
            middlewares=middlewares,
            # Don't use `trust_env`: it would read the environment and a .netrc file in threads for
            # each request, which doubles the cost of a request.
            proxy=_proxy_for(access, configured=self._pool.proxy),
        )
        self.server_hostname: str | None = self._pool.server_hostname

    async def close(self) -> None:
        await self.http.close()
        await self._pool.close()


async def load_in_cluster(token: Path, ca: Path, environ: Mapping[str, str]) -> ClusterAccess:
    """Use a pod's service account. The returned value does not contain the token, because the
    kubelet replaces it every hour."""
    return await asyncio.to_thread(_load_in_cluster, token, ca, environ)


async def load_kubeconfig(
    path: str, *, context: str | None = None, overrides: Overrides | None = None
) -> ClusterAccess:
    """
    Use a kubeconfig's current context, or the given one.

    ``path`` may be a list, as in ``$KUBECONFIG``: the first file that sets a value takes
    precedence. The path is empty if the overrides contain the server and there is no kubeconfig.
    """
    library = await asyncio.to_thread(_library)
    kube_config = await asyncio.to_thread(library.import_config, "kube_config")
    configuration = _configuration(library)

    async def load() -> Any:
        if path:
            merged = kube_config.KubeConfigMerger(path)
            _use_first_context(merged)
            loader = kube_config.KubeConfigLoader(
                config_dict=merged.config,
                config_base_path=None,
                active_context=context,
                config_persister=merged.save_changes,
            )
        else:
            loader = kube_config.KubeConfigLoader(config_dict=_SERVER_ONLY)
        _add_empty_user(loader)
        _override(loader, overrides or Overrides())
        await loader.load_and_set(configuration)
        return loader

    place = f"kubeconfig {path}" if path else "--server"
    try:
        loader = await _in_thread(load)
    except TimeoutError:
        raise ConfigError(
            f"{place}: no credentials within {_LOAD_TIMEOUT_SECONDS:.0f} s; "
            f"run its exec plugin manually to see why it blocks"
        ) from None
    except Exception as error:  # the library can raise any error, from AssertionError to YAMLError
        raise ConfigError(f"{place}: {_reason(error)}") from None
    if not configuration.host.startswith(("https://", "http://")):
        raise ConfigError(
            f"{place}: the URL of the API server, {configuration.host}, must begin with "
            f"https:// or http://"
        )
    return ClusterAccess(
        server=configuration.host,
        authorization=getattr(loader, "token", None),
        configuration=configuration,
        loader=loader,
        impersonation=tuple(_impersonation(loader)),
    )


def _add_empty_user(loader: Any) -> None:
    """Add an empty user if the context has no user. kubectl then sends no credentials, but the
    library fails if the server has an https URL."""
    if loader._user is None:
        loader._user = loader._cluster.__class__("user", {})


def _use_first_context(merged: Any) -> None:
    """Use the current context of the first file that has one, as kubectl does. The library would
    use the current context of the last file."""
    for path in merged.paths:
        if current := merged.config_files[path].get("current-context"):
            merged.config.value["current-context"] = current
            return


def _override(loader: Any, overrides: Overrides) -> None:
    """Replace parts of the cluster and the user. Change copies, because the library can write the
    originals to the file."""
    if name := overrides.cluster:
        loader._cluster = loader._config["clusters"].get_with_name(name)["cluster"]
    if name := overrides.user:
        loader._user = loader._config["users"].get_with_name(name)["user"]
        loader.provider = loader._user.safe_get("auth-provider") and loader._user[
            "auth-provider"
        ].safe_get("name")
    node: Any = loader._cluster.__class__
    if fields := overrides.of_cluster:
        kept = dict(loader._cluster.value)
        if overrides.certificate_authority:
            kept.pop("certificate-authority-data", None)
        loader._cluster = node("cluster", {**kept, **fields}, loader._cluster.path)
    if fields := overrides.of_user:
        user = loader._user
        kept = dict(user.value) if user is not None else {}
        if overrides.token:
            loader.provider = None
            for name in ("auth-provider", "exec", "tokenFile", "username", "password"):
                kept.pop(name, None)
        # Compare with None, because an empty user is falsy.
        path = user.path if user is not None else None
        loader._user = node("user", {**kept, **fields}, path)


def _impersonation(loader: Any) -> Iterator[tuple[str, str]]:
    user: dict[str, Any] = dict(loader._user.value) if loader._user is not None else {}
    extra: dict[str, list[str]] = user.get("as-user-extra") or {}
    if user.get("as"):
        yield "Impersonate-User", str(user["as"])
    if user.get("as-uid"):
        yield "Impersonate-Uid", str(user["as-uid"])
    for group in user.get("as-groups") or ():
        yield "Impersonate-Group", str(group)
    for key, values in extra.items():
        for value in values:
            yield f"Impersonate-Extra-{urllib.parse.quote(key, safe='')}", value


def _load_in_cluster(token: Path, ca: Path, environ: Mapping[str, str]) -> ClusterAccess:
    library = _library()
    incluster_config = library.import_config("incluster_config")
    configuration = _configuration(library)
    loader = incluster_config.InClusterConfigLoader(
        token_filename=str(token),
        cert_filename=str(ca),
        try_refresh_token=False,
        environ=dict(environ),
    )
    try:
        loader.load_and_set(configuration)
    except Exception as error:
        raise ConfigError(f"service account in {token.parent}: {_reason(error)}") from None
    return ClusterAccess(server=configuration.host, authorization=None, configuration=configuration)


async def _in_thread(work: Any) -> Any:
    """
    Run a coroutine of the library in a separate thread with its own event loop.

    The coroutine reads and writes files and starts programs, which would block the caller's loop.
    """

    async def bounded() -> Any:
        return await asyncio.wait_for(work(), _LOAD_TIMEOUT_SECONDS)

    def run_apart() -> Any:
        return asyncio.run(bounded())

    return await asyncio.to_thread(run_apart)


def _proxy_for(access: ClusterAccess, *, configured: str | None) -> str | None:
    # In a pod, don't use a proxy for the API server's Service. Clusters exclude the Service with a
    # CIDR in NO_PROXY, which Python does not support.
    if access.loader is None:
        return None
    return configured or _proxy_of_environment(access.server)


def _proxy_of_environment(server: str) -> str | None:
    """Return the proxy for the API server (``HTTPS_PROXY``, ``NO_PROXY``)."""
    url = urllib.parse.urlsplit(server)
    if urllib.request.proxy_bypass(url.netloc):
        return None
    return urllib.request.getproxies().get(url.scheme)


def _has_endless_token(loader: Any) -> bool:
    user = getattr(loader, "_user", None)
    return user is not None and "exec" in user and not hasattr(loader, "exec_plugin_expiry")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"it cannot be read: {error.strerror or error}"
    # Don't report the message of a YAML error, because it quotes the file, including its tokens.
    return str(error) if type(error).__name__ == "ConfigException" else "its content is malformed"


def _configuration(library: _Library) -> Any:
    configuration = library.configuration.Configuration()
    # Since Python 3.13, a certificate must have an authority key identifier. The certificates of
    # many clusters do not, so relax the verification to what Go clients require.
    configuration.disable_strict_ssl_verification = True
    return configuration


@dataclass(frozen=True, kw_only=True)
class _Library:
    configuration: Any
    rest: Any

    @staticmethod
    def import_config(name: str) -> Any:
        """Import a module of the library's ``config`` on first use."""
        with _import_lock:
            return importlib.import_module(f"{_ROOT}.config.{name}")


_loaded: _Library | None = None


def _library() -> _Library:
    """Import the required parts of the library on the first call."""
    global _loaded
    with _import_lock:
        if _loaded is None:
            try:
                _loaded = _import_parts() if _ROOT not in sys.modules else _import_usual()
            except Exception as error:
                logger.warning(
                    "the reduced import of kubernetes-asyncio failed; memory use is higher",
                    extra={"error": repr(error)},
                )
                for name in [name for name in sys.modules if name.partition(".")[0] == _ROOT]:
                    del sys.modules[name]
                _loaded = _import_usual()
        return _loaded


def _import_parts() -> _Library:
    spec = importlib.util.find_spec(_ROOT)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{_ROOT} is not installed, or is not a package")
    folder = Path(spec.submodule_search_locations[0])
    packages: dict[str, Any] = {}
    for name in _EMPTY_PACKAGES:
        package = ModuleType(name, "Registered empty by drakit_daemon.kube.client_library.")
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        packages[name] = sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(packages[parent], child, package)
    with _urllib3_on_first_use():
        configuration: Any = importlib.import_module(f"{_ROOT}.client.configuration")
    rest = importlib.import_module(f"{_ROOT}.client.rest")
    # The config modules import these two names from the package. ApiClient is used only in
    # annotations there, and the real class would take 2 MiB.
    packages[f"{_ROOT}.client"].Configuration = configuration.Configuration
    packages[f"{_ROOT}.client"].ApiClient = object
    return _Library(configuration=configuration, rest=rest)


@contextmanager
def _urllib3_on_first_use() -> Generator[None]:
    """
    While the block runs, importers of urllib3 get a module that imports it when an attribute is
    read.

    Doesn't use importlib's LazyLoader, because before Python 3.12.3, it breaks if several threads
    use a module for the first time at the same time. The lazy module is only for the importers in
    the block.
    """
    module = "urllib3"
    if module in sys.modules:
        yield
        return
    stand_in = ModuleType(module, "Imports urllib3 on first use.")

    def withdraw() -> None:
        if sys.modules.get(module) is stand_in:
            del sys.modules[module]

    def attribute(name: str) -> Any:
        withdraw()
        return getattr(importlib.import_module(module), name)

    stand_in.__getattr__ = attribute
    sys.modules[module] = stand_in
    try:
        yield
    finally:
        withdraw()


def _import_usual() -> _Library:
    return _Library(
        configuration=importlib.import_module(f"{_ROOT}.client.configuration"),
        rest=importlib.import_module(f"{_ROOT}.client.rest"),
    )
