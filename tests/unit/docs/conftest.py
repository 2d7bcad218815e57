"""The facts with which tests compare the documentation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.docs.listings import ROOT


@pytest.fixture(scope="session")
def schema() -> dict[str, Any]:
    """The schema of the chart's values."""
    return json.loads((ROOT / "charts" / "drakit" / "values.schema.json").read_text())
