"""
Runs every command and manifest of the pages for users, in the order of the page, on a real cluster.

These tests run before the other tests of a session, which install a release with the same name. To
run one page, use `pytest e2e/pages -m e2e -k quickstart`, with KEEP_CLUSTER=1 to repeat it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.api import Cluster
from e2e.fixtures import build_of
from e2e.images.deviceplugins import device_plugins_image
from e2e.pages.page import DOCS, Program, is_slow, is_tested, parse, user_pages
from e2e.pages.run import StepError, opened
from e2e.pages.state import State

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.feature("pages")]

LEFT_BEHIND_SECONDS = 30

PROGRAMS = {Program.SAMPLE_DEVICE_PLUGIN: device_plugins_image}
"""The images of programs that a page may need."""


@pytest.fixture(scope="module")
def state(cluster: Cluster, images: list[Path]) -> Iterator[State]:
    state = State(cluster, build=build_of(images))
    state.shorten_grace()
    state.empty_default_namespace()
    yield state
    state.restore_grace()
    if os.environ.get("KEEP_CLUSTER") != "1":
        state.clear()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=str(path.relative_to(DOCS)),
            marks=[pytest.mark.slow] if is_slow(path) else [],
        )
        for path in user_pages()
        if is_tested(path)
    ],
)
def test_a_page_runs(
    path: Path, cluster: Cluster, state: State, images: list[Path], tmp_path: Path
) -> None:
    page = parse(path)
    if not page.steps:
        return
    for program in page.programs:
        cluster.load_image(PROGRAMS[program]())
    if page.clean:
        state.clean()
    state.ensure(page.needs, nodes=page.nodes)
    before = state.objects()
    failure = ""
    with opened(page, cluster, build=build_of(images), folder=tmp_path) as runner:
        try:
            runner.run()
        except StepError as error:
            failure = str(error)
        if runner.changed_release:
            state.forget()
    left = state.left_behind(before, seconds=0 if failure else LEFT_BEHIND_SECONDS)
    if failure or left:
        state.recover(left)
    if failure:
        pytest.fail(failure, pytrace=False)
    names = ", ".join(f"{kind} {name}" for kind, _, name in sorted(left))
    assert not left, f"the page leaves {names} behind: remove them in its last section"
