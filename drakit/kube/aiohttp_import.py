"""
Imports aiohttp without the certificates of all public authorities in memory.

aiohttp makes two TLS contexts when it is imported, each with the whole bundle of the system: a MiB
on every node, for servers that the daemons never ask. Where the system also has its certificates
in a directory by their hashes (Debian does), the contexts get that instead: OpenSSL reads from it
the one that it needs, when it needs it. A vendor's driver in our process that uses aiohttp finds
them there, and an authority of one's own, too, if it was added with ``update-ca-certificates``; not
one that was written into the bundle alone. Elsewhere, or where the environment names other
certificates, nothing is changed.

It must be imported before aiohttp itself, and must not know what is asked of which server.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ("hashed_directory",)

_HASHED = re.compile(r"[0-9a-f]{8}\.[0-9]+")


def hashed_directory() -> str | None:
    """Give the system's directory of certificates by their hashes, if it is what counts."""
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
    """Let contexts that are made meanwhile read certificates when they are needed."""
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


_import()
