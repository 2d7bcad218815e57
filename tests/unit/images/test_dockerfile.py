"""The Dockerfile: one argument sets the base of all stages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from e2e.images.go import CEL_MINORS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "folder", [".", "examples/driver", "examples/sensor", "examples/nvidia", "e2e/scripted/image"]
)
def test_every_stage_is_built_on_the_base_that_is_an_argument(folder):
    text = (ROOT / folder / "Dockerfile").read_text()
    argument, *_ = re.findall(r"^(?:ARG|FROM) .*", text, re.M)
    assert argument.startswith("ARG BASE=")
    known = {"${BASE}"}
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?", text, re.M)
    assert stages
    for base, name in stages:
        assert base in known
        known.add(name)


def test_the_operators_default_helper_is_that_of_the_newest_minor_release():
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^ENV DRAKIT_CEL=.*/(.*)$", text, re.M) == [f"drakit-cel-{CEL_MINORS[-1]}"]
