"""The Dockerfiles: which images they are built on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from e2e.images.context import RELEASED

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "folder", [".", "examples/driver", "examples/sensor", "examples/nvidia", "e2e/scripted/image"]
)
def test_every_stage_is_built_on_the_base_that_is_an_argument(folder):
    text = (ROOT / folder / "Dockerfile").read_text()
    argument, *_ = re.findall(r"^(?:ARG|FROM) .*", text, re.M)
    assert argument.startswith("ARG BASE=")
    # A stage of scratch contains only what is copied to it; a stage with pip is not the image.
    known = {"${BASE}", "scratch", "python:3.13-slim"}
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?", text, re.M)
    assert stages[-1][0] != "python:3.13-slim"
    for base, name in stages:
        assert base in known
        known.add(name)


def test_the_operators_default_helper_is_that_of_the_newest_minor_release():
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^ENV DRAKIT_CEL=.*/(.*)$", text, re.M) == [f"drakit-cel-{RELEASED[-1]}"]


def test_the_base_is_pinned_by_digest_and_the_final_stages_run_nothing():
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=python:3\.13\.\d+-slim-trixie@sha256:[0-9a-f]{64}$", text, re.M)
    _, final = text.split("FROM scratch AS runtime\n")
    assert not re.search(r"^(RUN|ADD) ", final, re.M)
