"""
The cache of artifacts that take a long time to build: folders named after their sources' digest.

A folder is created atomically, under a lock, so that two clones can build at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster import api

REPOSITORY = Path(__file__).resolve().parents[2]


class ImageError(Exception):
    """An image cannot be built. The message is a sentence for the user of make."""


def cache_folder() -> Path:
    """Return this user's cache folder: `DRAKIT_CACHE`, or otherwise according to the XDG rules."""
    if chosen := os.environ.get("DRAKIT_CACHE"):
        return Path(chosen).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "drakit")


def digest(*parts: str | bytes | Path) -> str:
    """Return a name for the result of these strings and files."""
    state = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            part = part.read_bytes()
        elif isinstance(part, str):
            part = part.encode()
        # The length distinguishes ("ab", "c") from ("a", "bc").
        state.update(f"{len(part)}:".encode() + part)
    return state.hexdigest()[:20]


@contextmanager
def locked(kind: str) -> Generator[Path]:
    """Yield the folder of one kind of artifact, locked against other processes."""
    folder = cache_folder() / kind
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def kept(kind: str, key: str, make: Callable[[Path], None], *, keep: int = 3) -> Path:
    """
    Return the folder `kind`/`key`, which `make` fills if it does not exist.

    :param keep: how many folders of the kind are kept. The least recently used are removed first.
    """
    with locked(kind) as folder:
        place = folder / key
        if not place.exists():
            # This process has the lock, so these are remains of a killed process.
            for remains in folder.glob(".new-*"):
                shutil.rmtree(remains)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as unfinished:
                content = Path(unfinished, "content")
                content.mkdir()
                make(content)
                content.replace(place)
        os.utime(place)
        _forget_oldest(folder, keep=keep)
        return place


def _forget_oldest(folder: Path, *, keep: int) -> None:
    places = sorted(
        (place for place in folder.iterdir() if not place.name.startswith(".")),
        key=lambda place: place.stat().st_mtime,
        reverse=True,
    )
    for place in places[keep:]:
        # Another clone may be loading from it.
        if time.time() - place.stat().st_mtime > 3600:
            shutil.rmtree(place)


def run(
    argv: Sequence[str | Path],
    *,
    what: str,
    timeout_seconds: float,
    input: str | None = None,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a program to its end and return its output. A failure quotes its last lines."""
    words = [str(part) for part in argv]
    try:
        done = api.run(
            words, input=input, timeout_seconds=timeout_seconds, check=False, env=env, cwd=cwd
        )
    except api.ClusterError as error:
        raise ImageError(f"{what} failed: {error}") from None
    if done.returncode != 0:
        output = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        raise ImageError(f"{what} failed (code {done.returncode}):\n  {output}")
    return done.stdout
