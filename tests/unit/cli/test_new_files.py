"""The files that `drakit new` writes fit each other, drakit and its chart."""

from __future__ import annotations

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from drakit_cli.kubectl.arguments import SHELLS
from drakit_cli.new import FORMS, TEMPLATES, project_of
from tests.unit.cli.projects import (
    PROJECTS,
    commands,
    files_of,
    readme,
    run,
    values_of,
    write,
)
from tests.unit.docs.listings import ROOT, validated

# Programs are started in most of them.
pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("arguments", PROJECTS)
def test_its_values_are_those_of_the_chart(arguments, tmp_path):
    values = values_of(write(tmp_path / "project", *arguments))
    validated(values)
    defaults = validated({})
    assert defaults.keys() >= values.keys()
    assert defaults["nodeplugin"].keys() >= values["nodeplugin"].keys()


def test_its_readme_names_what_its_values_name(lamps):
    image = values_of(lamps)["image"]
    name = f"{image['repository']}-nodeplugin:{image['tag']}"
    (base,) = re.findall(r"^ARG BASE=(.*)", (lamps / "Dockerfile").read_text(), re.M)
    given = commands(readme(lamps))
    assert f"docker build -t {name} --build-arg BASE={base} ." in given
    assert f"docker push {name}" in given
    assert base == "registry.example.com/drakit-nodeplugin:0.1.0"
    # As drakit's own README says it.
    (label,) = re.findall(r"pod-security\S+", readme(lamps))
    assert label in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("drakit", "tag"),
    [
        pytest.param("0.1.0.dev0", "0.1.0", id="before-a-release"),
        pytest.param("0.3.2", "0.3.2", id="before-1"),
        pytest.param("1.4.2", "1.4.2", id="after-1"),
        pytest.param("2.0rc1+local.7", "2.0.0", id="a-build-of-ones-own"),
    ],
)
def test_its_base_follows_from_the_version_that_wrote_it(drakit, tag):
    project = project_of("lamps", driver=None, image=None, drakit=drakit)
    assert project.base == f"registry.example.com/drakit-nodeplugin:{tag}"


def test_nothing_in_it_installs_drakit_by_name(lamps):
    """Until a release, the name is free in the public index: anyone could register it."""
    for name in files_of(lamps):
        for line in (lamps / name).read_text().splitlines():
            if re.search(r"\bpip3? install\b", line):
                words = re.findall(r"""[^\s"'`]+""", line.partition(" install ")[2])
                assert not [word for word in words if re.match(r"drakit\b(?![-/])", word)], line


def install_step(project: Path) -> str:
    workflow = yaml.safe_load((project / ".github" / "workflows" / "ci.yaml").read_text())
    (step,) = [step for step in workflow["jobs"]["check"]["steps"] if step.get("name") == "install"]
    # Without the variable, its value is empty: there is no default.
    assert step["env"] == {"DRAKIT": "${{ vars.DRAKIT }}"}
    return step["run"]


@pytest.mark.parametrize(
    ("drakit", "accepted"),
    [
        pytest.param("", False, id="not-set"),
        pytest.param("drakit", False, id="a-name"),
        pytest.param("drakit[testing]", False, id="a-name-with-an-extra"),
        pytest.param("drakit[testing]==0.1.0", False, id="a-version"),
        pytest.param(
            "drakit[testing] @ git+https://git.example.com/drakit@0123abc", True, id="a-commit"
        ),
        pytest.param(
            "drakit[testing] @ https://files.example.com/drakit-0.1.0-py3-none-any.whl",
            True,
            id="a-wheel",
        ),
    ],
)
def test_its_workflow_fails_instead_of_installing_drakit_from_an_index(
    drakit, accepted, lamps, tmp_path
):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-e", "-c", install_step(lamps)],
        cwd=lamps,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "DRAKIT": drakit},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    arguments = tmp_path / "arguments"
    if accepted:
        assert done.returncode == 0, done.stderr
        assert arguments.read_text().splitlines() == [
            *("-m", "pip", "install", drakit, "--editable", ".[dev]")
        ]
    else:
        assert (done.returncode, arguments.exists()) == (1, False)
        (line,) = done.stdout.splitlines()
        assert line.startswith("::error::drakit has no release yet")
        assert "Set the repository variable DRAKIT to a requirement that pins a commit" in line


def test_its_workflow_runs_what_its_readme_describes_and_needs_no_secret(lamps):
    text = (lamps / ".github" / "workflows" / "ci.yaml").read_text()
    workflow = yaml.safe_load(text)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert "secrets" not in text
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 20 for job in workflow["jobs"].values())
    for step in steps:
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
    said = readme(lamps).replace(".venv/bin/", "").replace("'", '"')
    for step in steps:
        for line in step.get("run", "").splitlines():
            if step.get("name") == "install":
                continue
            program = line.removeprefix("python -m ")
            if not program.startswith(("pytest", "docker")):
                assert program in said, line
    tests = [step["run"] for step in steps if step.get("run", "").startswith("pytest")]
    assert tests == [
        "pytest --ignore=tests/test_conformance.py",
        "pytest tests/test_conformance.py",
    ]
    for variable in re.findall(r"vars\.(\w+)", text):
        assert f"`{variable}`" in readme(lamps)


def test_all_templates_and_scripts_are_in_the_wheel(tmp_path):
    run(ROOT, "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    folder = Path("drakit_cli/templates")
    assert {path.relative_to(folder) for path in names if path.is_relative_to(folder)} == {
        template.relative_to(TEMPLATES) for form in FORMS for template in form.files.values()
    }
    scripts = Path("drakit_cli/kubectl/scripts")
    assert {scripts / f"completion.{shell}" for shell in SHELLS} <= names
