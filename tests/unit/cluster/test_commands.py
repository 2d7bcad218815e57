"""The commands for users of a cluster: `make cluster-env`, and those that `make demo` prints."""

from __future__ import annotations

import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from drakit_explain.cel.helper import find_release
from e2e.cluster import __main__ as commands
from e2e.demo import CHOICES, REPOSITORY, helm_command


@pytest.fixture
def environment(tmp_path, monkeypatch, capsys):
    """Return the variables of a shell that has evaluated the output of `make cluster-env`."""
    monkeypatch.setattr(commands, "PLUGINS", tmp_path / "plugins")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "drakit-cel-1.36").touch(mode=0o755)
    monkeypatch.setattr("e2e.images.go.cel_program", lambda minor: programs / f"drakit-cel-{minor}")
    (programs.parent / "go").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(programs.parent))

    def evaluate(kubectl: str) -> dict[str, str]:
        chosen = SimpleNamespace(
            program=lambda _: kubectl, kubeconfig=tmp_path / "kubeconfig", minor="1.36"
        )
        assert commands.environment(chosen, None) == 0
        shell = subprocess.run(
            ["/bin/sh", "-c", f"{capsys.readouterr().out}\nenv"],
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        return dict(line.split("=", 1) for line in shell.stdout.splitlines())

    return evaluate


def test_kubectl_finds_the_plugins_and_the_users_python_stays(environment, tmp_path):
    for _ in range(2):
        variables = environment("/cluster/bin/kubectl")
    plugins, *path = variables["PATH"].split(":")
    linked = ["drakit-cel-1.36", "kubectl-drakit", "kubectl_complete-drakit"]
    assert sorted(os.listdir(plugins)) == linked
    assert path == ["/cluster/bin", "/usr/bin", "/bin"]
    assert variables["KUBECONFIG"] == str(tmp_path / "kubeconfig")
    helped = subprocess.run(
        ["kubectl-drakit", "--help"], env=variables, capture_output=True, text=True, check=True
    )
    assert "explain" in helped.stdout
    assert find_release("1.36", variables) == Path(plugins, "drakit-cel-1.36")


def test_without_go_kubectl_drakit_has_no_allocator(environment, monkeypatch):
    environment("/cluster/bin/kubectl")
    monkeypatch.setenv("PATH", "/nowhere")
    plugins = environment("/cluster/bin/kubectl")["PATH"].split(":")[0]
    assert sorted(os.listdir(plugins)) == ["kubectl-drakit", "kubectl_complete-drakit"]


def test_the_helm_command_of_the_demo_has_all_values_of_the_release(tmp_path):
    example = CHOICES[0]
    values = {"nodeplugin": {"bootIDFile": "/run/boot_id"}, **example.values()}
    command = shlex.split(helm_command(values, tmp_path / "values.yaml"))
    files = [name for option, name in pairwise(command) if option == "-f"]
    ours, given = (yaml.safe_load((REPOSITORY / name).read_text()) for name in files)
    assert ours["image"]["repository"] == "localhost/drakit"
    assert given == values
    assert (REPOSITORY / command[command.index("drakit") + 1] / "Chart.yaml").exists()
