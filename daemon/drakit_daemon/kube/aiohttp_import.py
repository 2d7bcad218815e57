"""
Imports aiohttp without loading the certificates of all public authorities, which saves memory.

At import, aiohttp creates two TLS contexts, each with the system's whole certificate bundle. They
take 1 MiB on every node, for servers that the daemons never call. Some systems, such as Debian,
also have a directory in which the certificates are named by their hashes. On these systems, the
contexts use the directory, from which OpenSSL reads a certificate only when it needs it. A vendor's
driver that uses aiohttp in the same process also uses the directory. The directory includes private
authorities that ``update-ca-certificates`` has added, but not those that only the bundle contains.
On other systems, or if the environment specifies other certificates, nothing changes.

Import this module before aiohttp.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Generator
from contextlib import contextmanager

_HASHED = re.compile(r"[0-9a-f]{8}\.[0-9]+")


def hashed_directory() -> str | None:
    """Return the system's directory of certificates named by their hashes, if OpenSSL uses it."""
    paths = ssl.get_default_verify_paths()
    chosen = {paths.openssl_cafile_env, paths.openssl_capath_env} & os.environ.keys()
    if not paths.capath or chosen:
        return None
    try:
        with os.scandir(paths.capath) as entries:
            found = any(_HASHED.fullmatch(entry.name) for entry in entries)
    except OSError:
        return None
    return paths.capath if found else None


@contextmanager
def _only_directory(directory: str) -> Generator[None]:
    """While the block runs, new TLS contexts use only the directory, so they read a certificate
    only when it is needed."""
    original = ssl.SSLContext.set_default_verify_paths

    def set_default_verify_paths(self: ssl.SSLContext) -> None:
        self.load_verify_locations(capath=directory)

    ssl.SSLContext.set_default_verify_paths = set_default_verify_paths
    try:
        yield
    finally:
        ssl.SSLContext.set_default_verify_paths = original


def _import() -> None:
    directory = hashed_directory()
    if directory is None:
        return
    with _only_directory(directory):
        import aiohttp as aiohttp


_import()
