"""
Imports aiohttp so that TLS needs little memory: neither the certificates of all public authorities,
nor large buffers.

At import, aiohttp creates two TLS contexts, each with the whole bundle of the system: a MiB on
every node, for servers that the daemons never call. If the system also has a directory of its
certificates by their hashes (Debian does), the contexts get that instead: OpenSSL reads a
certificate from it when it needs one. A vendor's driver in our process that uses aiohttp finds them
there, also a private authority that ``update-ca-certificates`` has added, but not one that only the
bundle contains. On other systems, or if the environment names other certificates, nothing changes.

asyncio fills a buffer of 256 KiB with zeros for each TLS connection, and the node plugin keeps four
connections at rest. Smaller buffers save 0.8 MiB on every node. asyncio has no parameter for the
size, only an attribute of a class.

It must be imported before aiohttp itself, and must not know the requests.
"""

from __future__ import annotations

import os
import re
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Generator
from contextlib import contextmanager

BUFFER_BYTES = 64 * 1024
"""The most that one call receives from a TLS connection: three records of 16 KiB, the largest."""

_HASHED = re.compile(r"[0-9a-f]{8}\.[0-9]+")


def hashed_directory() -> str | None:
    """Return the system's directory of certificates by their hashes, if it is in effect."""
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
def _directories_alone(directory: str) -> Generator[None]:
    """Let new contexts read certificates when they are needed."""
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
    with _directories_alone(directory):
        import aiohttp as aiohttp


SSLProtocol.max_size = BUFFER_BYTES
_import()
