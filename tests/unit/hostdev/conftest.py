from __future__ import annotations

import pytest

from tests.fakes.sysfs import FakeHost


@pytest.fixture
def host(tmp_path) -> FakeHost:
    return FakeHost(tmp_path)
