"""The chart as text, and rendered where there is a helm."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.images.cache import cache_folder

REPOSITORY = Path(__file__).resolve().parents[3]
CHART = REPOSITORY / "charts" / "drakit"

IMAGE = "image.repository=registry.example.com/drakit"
"""The value without which the chart is not rendered."""

Render = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.fixture(scope="session")
def schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


@pytest.fixture(scope="session")
def helm() -> str:
    """The path of helm; skips where none was built or installed yet."""
    found = shutil.which("helm") or next(
        (str(path) for path in cache_folder().glob("programs/*/helm")), None
    )
    if found is None:
        pytest.skip("no helm: `make cluster-up` builds one")
    return found


@pytest.fixture(scope="session")
def render(helm: str, tmp_path_factory: pytest.TempPathFactory) -> Render:
    """Render the chart with some values."""

    def rendered(
        overrides: dict[str, Any] | None = None,
        *,
        release: str = "drakit",
        api_versions: Sequence[str] = (),
        upgrade: bool = False,
    ) -> list[dict[str, Any]]:
        file = tmp_path_factory.mktemp("values") / "values.yaml"
        image = {"repository": "registry.example.com/drakit"}
        given = overrides or {}
        file.write_text(json.dumps({**given, "image": image | given.get("image", {})}))
        done = subprocess.run(
            [
                *(helm, "template", release, str(CHART), "--namespace", "drakit-system"),
                *("--kube-version", "1.36.3", "--values", str(file)),
                *(["--is-upgrade"] if upgrade else []),
                *(part for each in api_versions for part in ("--api-versions", each)),
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [body for body in yaml.safe_load_all(done.stdout) if body]

    return rendered
