"""`drakit new` writes a project that works."""

from __future__ import annotations

import json
import re
import sys

import pytest

from drakit import Inventory
from drakit_cli.new import FILES
from drakit_formats.resource.inventory import check_inventory
from tests.unit.cli.projects import (
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
    project = write(tmp_path / "lamps")
    assert files_of(project) == {path.format(package="lamps") for path in FILES}
    templates = ROOT / "cli" / "drakit_cli" / "templates"
    assert sorted(FILES.values()) == sorted(path.name for path in templates.iterdir())
    assert not [name for name in files_of(project) if "@@" in (project / name).read_text()]


@pytest.mark.parametrize("arguments", PROJECTS)
def test_a_projects_tests_and_lint_pass(arguments, tmp_path):
    project = write(tmp_path / "project", *arguments)
    run(project, "ruff", "format", "--no-cache", "--check", ".")
    run(project, "ruff", "check", "--no-cache", ".")
    said = run(project, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_driver.py")
    assert re.fullmatch(r"\.+ +\[100%\]\n\d+ passed in .*\n", said)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("{device.request}__{device.name}", "{device.request}", id="variables"),
        pytest.param("if not file.is_file()", "if False", id="a-device-that-is-gone"),
        pytest.param('"broken" in', '"fine" in', id="health"),
        pytest.param("le=100", "le=1000", id="bounds-of-parameters"),
        pytest.param("if file.is_file()", "if not file.is_file()", id="devices"),
        pytest.param(
            "        level = str(device",
            '        file.write_text("on")\n        level = str(device',
            id="admin-access",
        ),
    ],
)
def test_a_projects_tests_notice_a_driver_that_is_wrong(right, wrong, tmp_path):
    project = write(tmp_path / "lamps")
    source = project / "src" / "lamps" / "driver.py"
    text = source.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))
    tests = "tests/test_driver.py"
    assert "1 failed" in run(project, "pytest", "-p", "no:cacheprovider", tests, status=1)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "failed"),
    [
        pytest.param(
            "values.yaml",
            "        directory: /",
            "        folder: /",
            "test_the_config_in_values_yaml_is_valid",
            id="config",
        ),
        pytest.param(
            "pod.yaml",
            "{level: 80}",
            "{lebel: 80}",
            "test_the_parameters_in_pod_yaml_are_valid",
            id="parameters",
        ),
        pytest.param(
            "pod.yaml",
            "driver: lamps.example.com",
            "driver: lamp.example.com",
            "test_the_parameters_in_pod_yaml_are_valid",
            id="the-parameters-of-another-driver",
        ),
    ],
)
def test_a_projects_tests_notice_files_that_do_not_fit_it(name, right, wrong, failed, tmp_path):
    project = write(tmp_path / "lamps")
    text = (project / name).read_text()
    assert text.count(right) == 1
    (project / name).write_text(text.replace(right, wrong))
    said = run(project, "pytest", "-p", "no:cacheprovider", "tests/test_driver.py", status=1)
    assert "1 failed" in said
    assert f"FAILED tests/test_driver.py::{failed}" in said


@pytest.mark.parametrize(
    "name", ["values.yaml", "deviceclass.yaml", "pod.yaml", "tests/test_conformance.py"]
)
def test_what_follows_the_driver_is_marked(name, lamps):
    assert "REPLACE" in (lamps / name).read_text()
    assert name in (lamps / "README.md").read_text().partition("## 2.")[0]


# All rules take a minute and more: `make conformance` and the page python-driver.md have them.
def test_a_project_is_held_to_the_rules(lamps):
    test = "tests/test_conformance.py"
    said = run(lamps, "pytest", "-p", "no:cacheprovider", test, "-k", "cdi-valid or stable-names")
    assert "2 passed" in said
    rules = run(lamps, "pytest", "-q", "-p", "no:cacheprovider", test, "--collect-only")
    assert len(re.findall(r"^tests/test_conformance\.py::test_conformance\[", rules, re.M)) > 20


def test_a_project_that_breaks_a_rule_gets_an_error_that_names_it(tmp_path):
    project = write(tmp_path / "lamps")
    source = project / "src" / "lamps" / "driver.py"
    source.write_text(source.read_text().replace("device.parameters.level", "id(claim)"))
    test = "tests/test_conformance.py::test_conformance[prepare-again]"
    said = run(project, "pytest", "-p", "no:cacheprovider", test, status=1)
    assert "the rule: a claim that is prepared again gets the same result" in said


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


async def test_its_driver_is_found_by_its_entry_point_and_publishes_devices(driver, tmp_path):
    assert driver.name == "lamps.example.com"
    (tmp_path / "first").touch()
    made = driver.make()
    stream = made.devices()
    found = await anext(stream)
    await stream.aclose()
    assert [device.name for device in found] == ["first"]
    assert not check_inventory(Inventory(devices=found)).left_out


def test_the_package_is_where_the_dockerfile_takes_it_from(lamps):
    target = installed(lamps)
    text = (lamps / "Dockerfile").read_text()
    assert re.search(r"^COPY build/driver (\S+)\nENV PYTHONPATH=\1$", text, re.M)
    assert (lamps / ".dockerignore").read_text().splitlines() == ["*", "!build/driver"]
    assert {path.name for path in target.iterdir()} == {"lamps", "lamps-0.1.0.dist-info"}
    assert not list(target.rglob("*.pyc"))
