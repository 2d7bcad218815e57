"""Control characters that others put into names and messages do not reach a terminal."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import pytest

from drakit.text import escaped
from drakit_cli.kubectl import commands, manifests

EVIL = "\x1b]0;owned\x07\x7f\u009b2J\u202e\u2066\u200f"


def test_an_escaped_json_document_is_the_same_document():
    body = {EVIL: [f"\U000e0001{EVIL}", "Kamera für жук"]}
    shown = escaped(json.dumps(body, ensure_ascii=False))
    assert shown.isprintable()
    assert "für жук" in shown
    assert json.loads(shown) == body


MANIFEST = '{apiVersion: v1, kind: Pod, metadata: {name: ["\\e]0;owned\\a"]}}'


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        pytest.param("drakit_cli.main", ["cdi", "lint", "{directory}"], id="drakit"),
        pytest.param("drakit_cli.kubectl.main", ["explain", "-f", "pod.yaml"], id="kubectl"),
        pytest.param("drakit_nodeplugin.__main__", ["--config", "{config}"], id="node-plugin"),
        pytest.param("drakit_operator.__main__", ["--config", "{config}"], id="operator"),
        pytest.param(
            "drakit_driver.__main__",
            ["--driver", "simulated", "--socket", "/tmp/a.sock", "--config", "{config}"],
            id="drakit-driver",
        ),
    ],
)
def test_no_command_line_prints_them(module, arguments, tmp_path, monkeypatch, capsys):
    (folder := tmp_path / "cdi").mkdir()
    (folder / f"{EVIL}.json").write_text("x")
    (config := tmp_path / f"{EVIL}.yaml").write_text("]")
    monkeypatch.setenv("NODE_NAME", "n1")
    monkeypatch.setattr("drakit_daemon.logs.configure", lambda **_: None)
    monkeypatch.setattr(commands, "run", lambda _: manifests.read_documents(MANIFEST, "lab"))
    places = {"directory": folder, "config": config}
    monkeypatch.setattr(sys, "argv", ["x", *(each.format(**places) for each in arguments)])
    code = None
    try:
        code = import_module(module).main()
    except SystemExit as error:
        code = error.code
    assert code not in (None, 0)
    printed = "".join(capsys.readouterr())
    assert r"\u001b" in printed or r"\x1b" in printed
    assert printed.replace("\n", "").isprintable()
