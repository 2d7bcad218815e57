"""Completion: the words that fit, names in the cluster, and the scripts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from drakit_cli.kubectl import completion
from drakit_cli.kubectl.arguments import SHELLS
from drakit_cli.kubectl.completion import script
from drakit_cli.kubectl.main import main


@pytest.fixture
def complete(site, capsys, tmp_path):
    """Complete words with the kubeconfig of the cluster, whose namespace is `default`."""
    site.pod("train")
    site.pod("train-2")
    site.node("n1")
    site.claim("mine")
    for name in ("lab", "elsewhere"):
        site.store(f"/api/v1/namespaces/{name}", {})
    kubeconfig = str(site.write_kubeconfig(tmp_path))

    async def ask(command: str, *words: str) -> list[str]:
        given = [command, "--kubeconfig", kubeconfig, "-n", "lab", *words]
        assert await asyncio.to_thread(completion.main, given) == 0
        return capsys.readouterr().out.splitlines()

    return ask


@pytest.mark.parametrize(
    ("words", "found"),
    [
        pytest.param(["d"], ["devices", "drivers", "doctor", "drain", ":4"], id="a-command"),
        pytest.param(["absent", ""], [":4"], id="no-command"),
        pytest.param(["devices", "-o", ""], ["wide", "json", "yaml", "name", ":4"], id="a-format"),
        pytest.param(["devices", "--na"], ["--namespace", ":4"], id="an-option"),
        pytest.param(["doctor", "--kubeconfig", "a"], [":0"], id="a-file"),
        pytest.param(["completion", "b"], ["bash", ":4"], id="a-shell"),
        pytest.param(["explain", "resourcec"], None, id="kinds"),
    ],
)
def test_what_needs_no_cluster(words, found, capsys):
    wanted = found or ["resourceclaim/", "resourceclaimtemplate/", ":6"]
    assert main(["__complete", *words]) == 0
    assert capsys.readouterr().out.splitlines() == wanted


@pytest.mark.parametrize(
    ("words", "found"),
    [
        pytest.param(["explain", "tr"], ["train", "train-2", ":4"], id="pods"),
        pytest.param(["explain", "po/"], ["po/train", "po/train-2", ":4"], id="kind-slash-name"),
        pytest.param(["explain", "no", ""], ["n1", ":4"], id="kind-and-name"),
        pytest.param(["explain", "claim/m"], ["claim/mine", ":4"], id="a-claim"),
        pytest.param(["explain", "jobs/"], [":4"], id="a-kind-without-objects"),
        pytest.param(["claims", "-n", ""], ["elsewhere", "lab", ":4"], id="namespaces"),
        pytest.param(["claims", "--context", ""], ["fake", ":4"], id="contexts"),
    ],
)
async def test_names_come_from_the_cluster_or_the_kubeconfig(complete, words, found):
    answer = await complete(*words)
    assert [*sorted(answer[:-1]), answer[-1]] == found


async def test_a_cluster_that_does_not_answer_completes_nothing(
    site, complete, monkeypatch, capsys
):
    monkeypatch.setattr(completion, "SECONDS", 0.2)
    site.delay(30, times=10)
    began = time.monotonic()
    assert await complete("explain", "pod/tr") == [":4"]
    assert time.monotonic() - began < 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_the_scripts_ask_the_program(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text == script(shell) + "\n"
    assert "__complete" in text


def test_bash_completes(tmp_path):
    program = tmp_path / "kubectl-drakit"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m drakit_cli.kubectl.main "$@"\n')
    program.chmod(0o755)
    words = f"COMP_WORDS=({program} d); COMP_CWORD=1; _kubectl_drakit\n"
    result = subprocess.run(
        ["bash", "-c", f"{script('bash')}\n{words}" + 'echo "${COMPREPLY[@]}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "devices drivers doctor drain\n"
