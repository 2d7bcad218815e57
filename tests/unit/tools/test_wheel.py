"""The wheel of one platform: its tags, and the programs in the place where it is installed."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from e2e.images.go import CEL_MINORS, cel_programs
from tests.programs import needs_go
from tests.unit.docs.listings import ROOT
from tools.wheel import PLACE, build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the programs are for Linux")

ASK = """
import json, os
from drakit_explain.cel.helper import Helper, find_helper, find_release
found = {minor: find_release(minor, {}) for minor in os.environ["MINORS"].split()}
answers = {}
for minor, program in found.items():
    with Helper(program) as helper:
        answers[minor] = helper.release()
print(json.dumps({"programs": [str(found[each]) for each in found], "answers": answers}))
"""

PROGRAM = """#!/usr/bin/env python3
import json, sys
for line in sys.stdin:
    empty = "reads" in json.loads(line)
    print(json.dumps({"reads": []} if empty else {"kubernetes": "v%s.0"}), flush=True)
"""


@pytest.fixture
def installed(tmp_path):
    """Install a wheel in a new environment, as a user does, and ask its programs."""

    def ask(wheel):
        place = tmp_path / "venv"
        venv.create(place, with_pip=False)
        python = place / "bin" / "python"
        install = ("install", "--quiet", "--no-deps", "--no-index", str(wheel))
        subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
        # The dependencies, from the environment of the tests: no index is needed.
        (own,) = place.glob("lib/python*/site-packages")
        (own / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        done = subprocess.run(
            [python, "-I", "-c", ASK],
            check=True,
            capture_output=True,
            text=True,
            cwd="/",
            env={"MINORS": " ".join(CEL_MINORS), "PATH": "/usr/bin:/bin"},
        )
        answer = json.loads(done.stdout)
        assert answer["programs"] == [
            str(own / PLACE / f"drakit-cel-{minor}") for minor in CEL_MINORS
        ]
        plugin = place / "bin" / "kubectl-drakit"
        said = subprocess.run([plugin, "--help"], check=True, capture_output=True, text=True)
        assert "kubectl drakit" in said.stdout
        return answer["answers"]

    return ask


def test_an_installed_wheel_has_a_program_for_each_release(tmp_path, installed):
    programs = tmp_path / "programs"
    programs.mkdir()
    for minor in CEL_MINORS:
        program = programs / f"drakit-cel-{minor}"
        program.write_text(PROGRAM % minor)
        program.chmod(0o755)
    wheel = build(programs, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/WHEEL"))
        described = archive.read(name).decode()
    assert "Root-Is-Purelib: false" in described
    assert f"Tag: py3-none-manylinux_2_17_{platform.machine()}\n" in described
    assert f"manylinux_2_17_{platform.machine()}" in wheel.name
    assert installed(wheel) == {minor: f"v{minor}.0" for minor in CEL_MINORS}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_go
def test_the_programs_of_a_wheel_are_those_of_the_releases(tmp_path, installed):
    answers = installed(build(cel_programs(), tmp_path / "wheel"))
    assert {minor: each.split(".")[1] for minor, each in answers.items()} == {
        minor: minor.split(".")[1] for minor in CEL_MINORS
    }


def test_the_wheel_for_all_platforms_has_no_program(tmp_path):
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(argv, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [each for each in archive.namelist() if each.startswith(PLACE)]
        # `drakit package` reads the versions of the image's packages.
        pinned = archive.read("drakit_cli/nodeplugin.txt")
    assert pinned == (ROOT / "requirements" / "nodeplugin.txt").read_bytes()
