"""
The pytest plugin of ``drakit[testing]``: fixtures for tests with a kubelet.

Every pytest session in an environment with drakit loads it, so it must not import large modules.
The rules of the contract are in :mod:`.suite`, and need no plugin.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def drakit_root() -> Iterator[Path]:
    """An empty folder for a kubelet and drivers. The path is short, because a Unix socket path can
    have at most 107 bytes, and ``tmp_path`` itself may be longer."""
    root = Path(tempfile.mkdtemp(prefix="dk-", dir="/tmp"))
    yield root
    shutil.rmtree(root, ignore_errors=True)
