"""Texts for users name only commands of ours that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from drakit_cli.kubectl.main import main as plugin
from drakit_cli.main import main as drakit

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("cli", "explain", "operator", "nodeplugin")
QUOTED = re.compile(r"['`\"]((?:kubectl )?drakit(?: [a-z][a-z-]+){1,2})\b")


def commands():
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield from QUOTED.findall(node.value)


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_a_command_in_a_text_exists(command, capsys):
    words = command.removeprefix("kubectl ").split()[1:]
    run = plugin if command.startswith("kubectl") else drakit
    with pytest.raises(SystemExit) as ended:
        run([*words, "--help"])
    assert ended.value.code == 0, capsys.readouterr().err
    assert capsys.readouterr().out.startswith(f"usage: {command} ")


def test_the_texts_name_commands():
    assert {"drakit node devices", "kubectl drakit doctor"} <= set(commands())
