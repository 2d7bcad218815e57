"""The words of the command line, its exit codes, and what it costs."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from drakit_cli.answers import table
from drakit_cli.main import main


def test_its_words_cost_nothing_of_the_daemons():
    heavy = "{'grpc', 'pydantic', 'yaml', 'sqlite3', 'drakit_nodeplugin', 'asyncio'}"
    program = (
        "import sys; from drakit_cli.main import parser; parser();"
        f"assert not {heavy} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_daemons_do_not_load_it():
    program = (
        "import sys; import drakit_nodeplugin.app, drakit_operator.app;"
        "assert not [name for name in sys.modules if name.startswith('drakit_cli')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_version(capsys):
    assert main(["version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"drakit {version('drakit')} (Python 3.")
    assert "SQLite 3." in said


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["node", "checkpoint", "destroy"], id="no-such-command"),
        pytest.param(["node", "claim", "forget"], id="no-uid"),
        pytest.param(["node", "checkpoint", "show", "--yaml"], id="no-such-flag"),
    ],
)
def test_wrong_use_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "\nSee 'drakit " in capsys.readouterr().err


def test_whoever_has_read_enough_is_no_error(site, tmp_path):
    program = (
        "import os, sys; from drakit_cli.main import main; r, w = os.pipe(); os.close(r);"
        "os.dup2(w, 1); sys.exit(main(['version']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        pytest.param(None, "cannot be read: No such file or directory", id="missing"),
        pytest.param(
            "kubeletRot: /x\ndrivers: []", "kubeletRot: is not a known key", id="a-wrong-key"
        ),
        pytest.param("]", "is not YAML", id="no-yaml"),
    ],
)
def test_wrong_settings_are_exit_code_2(site, config, told):
    if config is None:
        site.config.unlink()
    else:
        site.config.write_text(config)
    code, out, error = site.run("node", "checkpoint", "show")
    assert (code, out) == (2, "")
    assert told in error


def test_a_table_is_aligned_and_shows_what_cannot_be_printed():
    assert table(("A", "LONG NAME"), [("x\x1b[31m", ""), ("longer", "y")]) == (
        "A            LONG NAME\nx\\u001b[31m  -\nlonger       y"
    )
