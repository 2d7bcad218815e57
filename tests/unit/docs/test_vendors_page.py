"""
docs/vendors/index.md: commands that need no cluster run here, and the others elsewhere.

The commands that install and apply are shown to name values and files that there are, and that
tests on a real cluster install and apply; what `drakit conformance` is told, `make conformance`
runs.
"""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
import yaml

from drakit.cli.main import main
from drakit.testing.conformance.targets import parse_target
from tests.unit.docs.listings import ROOT, listing, listings

PAGE = "docs/vendors/index.md"
CHART = ROOT / "charts" / "drakit"


def commands(program: str) -> list[list[str]]:
    """The words of each command of a program on the page; what stands behind a # is none of it."""
    texts = "".join(listings(PAGE, "console")).replace("\\\n", " ")
    lines = re.findall(r"^\$ (.*)$", texts, re.M)
    return [words for line in lines if (words := shlex.split(line, comments=True))[0] == program]


def after(words: list[str], option: str) -> list[str]:
    return [value for name, value in pairwise(words) if name == option]


def test_every_command_of_the_page_is_of_a_program_that_is_looked_at_here():
    texts = "".join(listings(PAGE, "console"))
    programs = set(re.findall(r"^\$ (\S+)", texts, re.M))
    assert programs == {"helm", "kubectl", "drakit", "docker", "pip", "go", "mkdir"}


def test_values_that_are_installed_are_those_of_the_chart(tmp_path):
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for words in commands("helm"):
        for file in after(words, "-f"):
            given = yaml.safe_load(
                listing(PAGE, file) if not (ROOT / file).exists() else (ROOT / file).read_text()
            )
            for section, values in given.items():
                jsonschema.validate(defaults | {section: defaults[section] | values}, schema)
        for assignment in after(words, "--set"):
            key, _, value = assignment.partition("=")
            section, name = key.split(".")
            assert name in defaults[section]
            values = {section: defaults[section] | {name: yaml.safe_load(value)}}
            jsonschema.validate(defaults | values, schema)
    # The only listing that is no file of the examples.
    (ours,) = (yaml.safe_load(text) for text in listings("README.md", "yaml") if "policies" in text)
    theirs = yaml.safe_load(listing(PAGE, "serial.yaml"))["hostdev"]["policies"]
    assert theirs.items() <= ours["hostdev"]["policies"].items()


def test_files_that_are_applied_are_applied_by_the_tests_on_a_cluster():
    files = [Path(file) for words in commands("kubectl") for file in after(words, "-f")]
    assert len(files) == 5
    tests = "".join(path.read_text() for path in (ROOT / "e2e").glob("*.py"))
    for file in files:
        assert list(yaml.safe_load_all((ROOT / file).read_text()))
        assert file.name in tests, f"no test applies {file}"


def test_the_image_that_is_built_is_the_one_that_the_manifest_names():
    build, push = commands("docker")
    (image,) = after(build, "-t")
    assert image in push
    assert (ROOT / build[-1] / "Dockerfile").exists()
    assert f"image: {image}\n" in (ROOT / build[-1] / "backend.yaml").read_text()


def test_the_backend_that_is_started_has_a_device_for_the_pod():
    (words,) = commands("mkdir")
    folder, device = words[words.index("-p") + 1], words[-1]
    assert words == ["mkdir", "-p", folder, "&&", "touch", device]
    assert Path(device).parent == Path(folder)
    assert f"-blinkers={folder}" in (ROOT / "examples/backend/backend.yaml").read_text()


def test_the_sample_device_plugin_that_is_built_is_a_tool_of_the_tests():
    (words,) = commands("go")
    (module,) = after(words, "-C")
    assert f"tool {words[-1]}\n" in (ROOT / module.removeprefix("CHECKOUT/") / "go.mod").read_text()
    (target,) = [w[2] for w in commands("drakit") if w[2].startswith("device-plugin:")]
    assert Path(target.removeprefix("device-plugin:")).name == Path(words[-1]).name


def test_the_project_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (words,) = [words for words in commands("drakit") if words[1] == "new"]
    assert main(words[1:]) == 0
    assert (tmp_path / "lamps" / "values.yaml").exists()
    assert "lamps.driver:" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [pytest.param(w, id=w[2].split(":")[0]) for w in commands("drakit") if w[1] != "new"]
)
def test_targets_of_the_kit_are_some(words):
    setup = (after(words, "--setup") or [None])[0]
    target = parse_target(words[2], setup=setup)
    assert target.kind in ("python", "backend", "device-plugin")
    if target.kind == "backend":
        flags = set(re.findall(r" (-[a-z-]+)", words[2]))
        main_go = (ROOT / "examples/backend/main.go").read_text()
        assert all(f'"{flag.removeprefix("-")}"' in main_go for flag in flags)
