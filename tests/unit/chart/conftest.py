"""The chart as text, and rendered where there is a helm."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import programs

REPOSITORY = Path(__file__).resolve().parents[3]
CHART = REPOSITORY / "charts" / "drakit"

IMAGE = "image.repository=registry.example.com/drakit"
"""The value without which the chart is not rendered."""

Render = Callable[..., list[dict[str, Any]]]
Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.fixture(scope="session")
def schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Run helm on a chart with some values; skips if it is not built."""
    found = programs.helm()
    file = tmp_path_factory.mktemp("values") / "values.yaml"

    def run(*arguments: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        file.write_text(json.dumps(values))
        return subprocess.run(
            [found, *arguments, "--values", str(file)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def render(helm: Helm) -> Render:
    """Render the chart with some values; the same values are rendered once."""
    known: dict[str, list[dict[str, Any]]] = {}

    def rendered(
        overrides: dict[str, Any] | None = None,
        *,
        release: str = "drakit",
        api_versions: Sequence[str] = (),
        upgrade: bool = False,
    ) -> list[dict[str, Any]]:
        given = overrides or {}
        image = {"repository": "registry.example.com/drakit"} | given.get("image", {})
        arguments = [
            *("template", release, str(CHART), "--namespace", "drakit-system"),
            *("--kube-version", "1.36.3"),
            *(["--is-upgrade"] if upgrade else []),
            *(part for each in api_versions for part in ("--api-versions", each)),
        ]
        key = json.dumps([arguments, given])
        if key not in known:
            done = helm(*arguments, values={**given, "image": image})
            assert done.returncode == 0, done.stderr
            known[key] = [body for body in yaml.safe_load_all(done.stdout) if body]
        return copy.deepcopy(known[key])

    return rendered


@pytest.fixture(scope="session")
def refusal(helm: Helm) -> Callable[[dict[str, Any]], str]:
    """Render the chart with values that it must reject. Return helm's message."""

    def refused(values: dict[str, Any]) -> str:
        done = helm("template", "drakit", str(CHART), "--kube-version", "1.36.3", values=values)
        assert done.returncode != 0
        return done.stderr

    return refused
