"""The rig of these tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.rig import Rig


@pytest.fixture
def rig(api_server) -> Iterator[Rig]:
    # Unix socket paths have at most 107 bytes: pytest's own directories are too deep.
    folder = Path(tempfile.mkdtemp(prefix="drakit-", dir="/tmp"))
    yield Rig(folder, api_server)
    shutil.rmtree(folder)
