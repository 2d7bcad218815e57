"""`drakit new` writes a project that works."""

from __future__ import annotations

import json
import re
import sys

import pytest

from drakit_cli.new import CONTAINER, FORMS, GO, PLUGIN, TEMPLATES
from tests.unit.cli.projects import (
    CONTAINERS,
    PROJECTS,
    files_of,
    installed,
    run,
    write,
)
from tests.unit.docs.listings import ROOT

# Programs are started in most of them.
pytestmark = pytest.mark.timeout(120)


def test_every_template_is_a_file_of_the_project(tmp_path):
    for form, arguments in ((PLUGIN, ""), (CONTAINER, "--container"), (GO, "--language go")):
        project = write(tmp_path / f"lamps{arguments}", *arguments.split())
        assert files_of(project) == {path.format(package="lamps") for path in form.files}
        assert not [name for name in files_of(project) if "@@" in (project / name).read_text()]
    assert {each for form in FORMS for each in form.files.values()} == {
        path for path in TEMPLATES.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("arguments", [*PROJECTS, *CONTAINERS])
def test_a_projects_tests_and_lint_pass(arguments, tmp_path):
    project = write(tmp_path / "project", *arguments)
    run(project, "ruff", "format", "--no-cache", "--check", ".")
    run(project, "ruff", "check", "--no-cache", ".")
    said = run(project, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_driver.py")
    assert re.fullmatch(r"\.+ +\[100%\]\n\d+ passed in .*\n", said)


MISTAKES = {
    "test_a_container_gets_the_device_and_its_level": (
        *("src/lamps/driver.py", "{device.request}__{device.name}", "{device.request}"),
    ),
    "test_a_device_that_is_gone_is_named": (
        *("src/lamps/driver.py", "if not file.is_file()", "if False"),
    ),
    "test_a_broken_device_is_unhealthy": ("src/lamps/driver.py", '"broken" in', '"fine" in'),
    "test_invalid_parameters_are_refused[parameters0]": (
        *("src/lamps/driver.py", "le=100", "le=1000"),
    ),
    "test_a_file_is_a_device": (
        "src/lamps/driver.py",
        "if file.is_file()",
        "if not file.is_file()",
    ),
    "test_admin_access_leaves_the_device_as_it_is": (
        "src/lamps/driver.py",
        "        level = str(device",
        '        file.write_text("on")\n        level = str(device',
    ),
    "test_the_config_in_values_yaml_is_valid": (
        *("values.yaml", "        directory: /", "        folder: /"),
    ),
    "test_the_parameters_in_pod_yaml_are_valid": ("pod.yaml", '"level": 80', '"lebel": 80'),
}
"""Mistakes in a project, by the test that notices them: file, right and wrong text."""


def test_a_projects_tests_notice_mistakes(tmp_path):
    project = write(tmp_path / "lamps")
    for name, right, wrong in MISTAKES.values():
        text = (project / name).read_text()
        assert text.count(right) == 1
        (project / name).write_text(text.replace(right, wrong))
    said = run(project, "pytest", "-p", "no:cacheprovider", "tests/test_driver.py", status=1)
    assert set(re.findall(r"^FAILED tests/test_driver\.py::(\S+)", said, re.M)) == set(MISTAKES)


def test_a_project_for_a_container_notices_mistakes_in_its_config(tmp_path):
    project = write(tmp_path / "lamps", "--container")
    values = project / "chart" / "values.yaml"
    values.write_text(values.read_text().replace("  directory: /", "  folder: /"))
    said = run(project, "pytest", "-p", "no:cacheprovider", "tests/test_driver.py", status=1)
    assert re.findall(r"^FAILED tests/test_driver\.py::(\S+)", said, re.M) == [
        "test_the_config_in_values_yaml_is_valid"
    ]


# All rules take a minute and more: `make conformance` and the page python-driver.md have them.
def test_a_project_is_held_to_the_rules(lamps):
    test = "tests/test_conformance.py"
    said = run(lamps, "pytest", "-p", "no:cacheprovider", test, "-k", "cdi-valid")
    ran = re.search(r"1 passed, (\d+) deselected", said)
    assert ran is not None, said
    assert int(ran[1]) > 20


def test_a_projects_driver_is_tested_by_its_entry_point(lamps, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("directory: '{root}/devices'")
    given = ("--config", str(config), "--rule", "prepare")
    setup = ("--setup", "mkdir $DRAKIT_ROOT/devices && touch $DRAKIT_ROOT/devices/first")
    path = {"PYTHONPATH": str(installed(lamps))}
    run(tmp_path, "drakit_cli.main", "conformance", "lamps", *given, *setup, **path)


def test_a_projects_types_are_right(lamps, tmp_path):
    # From another folder, so that the settings of this repository do not hold.
    settings = {
        "typeCheckingMode": "basic",
        "include": [str(lamps)],
        "extraPaths": [str(lamps / "src"), str(ROOT)],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    said = run(tmp_path, "pyright", "--pythonpath", sys.executable)
    assert "0 errors, 0 warnings" in said


def test_the_package_is_where_the_dockerfile_takes_it_from(lamps):
    target = installed(lamps)
    text = (lamps / "Dockerfile").read_text()
    assert re.search(r"^COPY build/driver (\S+)\nENV PYTHONPATH=\1$", text, re.M)
    assert (lamps / ".dockerignore").read_text().splitlines() == ["*", "!build/driver"]
    assert {path.name for path in target.iterdir()} == {"lamps", "lamps-0.1.0.dist-info"}
