"""`make check-proto` accepts additions to the backend contract, and rejects all other changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BACKEND = Path("proto", "drakit_proto", "backend", "v1", "backend.proto")
KUBELET = Path("proto", "drakit_proto", "kubelet", "dra", "v1", "dra.proto")
FIELD = "string version = 2;"
ADDED = f"{FIELD}\n  string vendor = 99;"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Without the variables of a `make` or a git hook that runs this test.
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def git(*arguments: str, cwd: Path) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    done = run("git", *identity, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(repository: Path) -> str:
    git("add", "--all", cwd=repository)
    git("commit", "--quiet", "--message", "a change", cwd=repository)
    return git("rev-parse", "HEAD", cwd=repository)


def replace(repository: Path, old: str, new: str, *, file: Path = BACKEND) -> None:
    text = (repository / file).read_text()
    assert old in text, f"{file} does not contain {old!r}"
    (repository / file).write_text(text.replace(old, new, 1))


def check(repository: Path) -> subprocess.CompletedProcess[str]:
    programs = Path(sys.executable).parent
    return run("make", "-o", "venv", "check-proto", f"BIN={programs}", cwd=repository)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the contract, whose first commit is the baseline."""
    folder = tmp_path / "drakit"
    shutil.copytree(ROOT / "proto", folder / "proto")
    shutil.copy(ROOT / "Makefile", folder)
    git("init", "--quiet", cwd=folder)
    (folder / "proto" / "BASELINE").write_text(commit(folder))
    commit(folder)
    return folder


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(FIELD, ADDED, id="field"),
        pytest.param("enum TaintEffect {", "message New {}\nenum TaintEffect {", id="message"),
    ],
)
def test_an_addition_passes(repository, old, new):
    replace(repository, old, new)
    done = check(repository)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(FIELD, "string version = 98;", id="renumbered-field"),
        pytest.param("rpc GetInfo(", "rpc Info(", id="renamed-method"),
        pytest.param("v1;backendv1", "v1", id="other-go-package"),
    ],
)
def test_any_other_change_fails(repository, old, new):
    replace(repository, old, new)
    done = check(repository)
    assert done.returncode != 0
    assert f"{BACKEND}:" in done.stdout


def test_contracts_of_the_kubelet_are_not_compared(repository):
    replace(repository, "string uid = 2;", "string uid = 9;", file=KUBELET)
    assert check(repository).returncode == 0


def test_the_newest_release_precedes_the_baseline(repository):
    git("tag", "v0.1.0", cwd=repository)
    replace(repository, FIELD, ADDED)
    commit(repository)
    git("tag", "v0.2.0", cwd=repository)
    assert check(repository).returncode == 0
    replace(repository, ADDED, FIELD)
    done = check(repository)
    assert done.returncode != 0
    assert '"vendor"' in done.stdout


def test_a_shallow_clone_reports_the_remedy(repository, tmp_path):
    git("clone", "--quiet", "--depth=1", f"file://{repository}", "shallow", cwd=tmp_path)
    shallow = tmp_path / "shallow"
    replace(shallow, FIELD, "")
    done = check(shallow)
    assert done.returncode == 0
    assert "is not checked" in done.stdout
    assert "run 'git fetch --unshallow --tags'" in done.stdout
    git("fetch", "--quiet", "--unshallow", "--tags", cwd=shallow)
    assert check(shallow).returncode != 0
