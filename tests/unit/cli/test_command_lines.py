"""The parts that the five command lines share: version, help, examples, errors and exit codes."""

from __future__ import annotations

import io
import shlex
import sys
from argparse import _SubParsersAction
from importlib import import_module
from importlib.metadata import version

import pytest

from drakit_cli.kubectl.arguments import parser as kubectl
from drakit_cli.main import parser as drakit
from drakit_daemon.command_line import Parser, documentation_url, print_error, wrapped
from drakit_driver.__main__ import parser as driver
from drakit_nodeplugin.__main__ import parser as nodeplugin
from drakit_operator.__main__ import parser as operator

COMMANDS = {"drakit_cli.main": drakit, "drakit_cli.kubectl.main": kubectl}
DAEMONS = {
    "drakit_nodeplugin.__main__": nodeplugin,
    "drakit_operator.__main__": operator,
    "drakit_driver.__main__": driver,
}
PROGRAMS = {**COMMANDS, **DAEMONS}


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a program with arguments; return its exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NODE_NAME", raising=False)

    def run(module: str, *arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["x", *arguments])
        try:
            code: object = import_module(module).main()
        except SystemExit as error:
            code = error.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def parsers(root: Parser) -> list[Parser]:
    """Return a parser, and all parsers below it."""
    found = [root]
    for action in root._actions:
        if isinstance(action, _SubParsersAction):
            for each in action.choices.values():
                found += parsers(each)
    return found


@pytest.mark.parametrize("module", PROGRAMS)
def test_each_program_prints_its_version(module, run):
    name = PROGRAMS[module]().prog
    assert run(module, "--version") == (0, f"{name} {version('drakit')}\n", "")


@pytest.mark.parametrize("module", PROGRAMS)
def test_help_is_a_command_and_an_option(module, run):
    code, printed, _ = run(module, "help")
    assert code == 0
    assert printed == run(module, "--help")[1]
    assert f"usage: {PROGRAMS[module]().prog} " in printed


def test_help_names_a_command(run):
    assert "usage: drakit node checkpoint show " in run("drakit_cli.main", *HELP)[1]
    assert "usage: kubectl drakit devices " in run("drakit_cli.kubectl.main", "help", "devices")[1]


HELP = ("help", "node", "checkpoint", "show")


@pytest.mark.parametrize(
    ("module", "words", "usage"),
    [
        ("drakit_cli.main", (), "usage: drakit "),
        ("drakit_cli.main", ("node",), "usage: drakit node "),
        ("drakit_cli.main", ("node", "claim"), "usage: drakit node claim "),
        ("drakit_cli.kubectl.main", (), "usage: kubectl drakit "),
    ],
)
def test_a_program_without_a_command_prints_its_help(module, words, usage, run):
    code, printed, error = run(module, *words)
    assert (code, error) == (0, "")
    assert printed.startswith(usage)


@pytest.mark.parametrize("module", DAEMONS)
def test_a_daemon_without_arguments_prints_its_help_and_fails(module, run):
    code, printed, error = run(module)
    assert (code, printed) == (2, "")
    assert f"usage: {DAEMONS[module]().prog} " in error
    assert "examples:" in error


@pytest.mark.parametrize("module", PROGRAMS)
def test_each_help_has_two_examples_and_the_documentation(module):
    for each in parsers(PROGRAMS[module]()):
        assert len(each.examples) >= 2, each.prog
        shown = each.format_help()
        assert all(f"\n  {example}\n" in shown for example in each.examples)
        assert f"documentation: {documentation_url()}" in shown


@pytest.mark.parametrize("module", PROGRAMS)
def test_the_examples_are_commands_of_their_program(module, run):
    for each in parsers(PROGRAMS[module]()):
        for example in each.examples:
            command, _, rest = example.partition(" | ")
            assert rest in ("", "kubectl apply -f -")
            assert command.startswith(each.prog.removesuffix(" version")), example
            words = shlex.split(command.removeprefix(f"{PROGRAMS[module]().prog} "))
            if words != ["--version"]:
                assert PROGRAMS[module]().read(words), example


@pytest.mark.parametrize("module", PROGRAMS)
def test_wrong_arguments_are_an_error_with_exit_code_2(module, run):
    code, printed, error = run(module, "--nonsense")
    assert (code, printed) == (2, "")
    name = PROGRAMS[module]().prog
    assert error.startswith("error: ")
    assert error.endswith(f"See '{name} --help'.\n")


@pytest.mark.parametrize(
    ("module", "arguments", "text"),
    [
        pytest.param(
            "drakit_nodeplugin.__main__", ["--config", "/absent"], "name of this node", id="no-node"
        ),
        pytest.param(
            "drakit_nodeplugin.__main__",
            ["--config", "/absent", "--node-name=n"],
            "/absent: cannot be read",
            id="node-plugin",
        ),
        pytest.param(
            "drakit_operator.__main__",
            ["--config", "/absent"],
            "/absent: cannot be read",
            id="operator",
        ),
        pytest.param(
            "drakit_driver.__main__",
            ["--driver=simulated", "--socket=/a.sock"],
            "name of this node",
            id="no-node-of-a-driver",
        ),
        pytest.param(
            "drakit_driver.__main__",
            ["--driver=simulated", "--socket=/a.sock", "--node-name=n", "--config=/absent"],
            "/absent: cannot be read",
            id="driver",
        ),
    ],
)
def test_wrong_settings_of_a_daemon_are_an_error_with_exit_code_2(
    module, arguments, text, run, monkeypatch
):
    monkeypatch.setattr("drakit_daemon.logs.configure", lambda **_: None)
    code, printed, error = run(module, *arguments)
    assert (code, printed) == (2, "")
    assert error.startswith("error: ")
    assert text in error


@pytest.mark.parametrize("make", DAEMONS.values())
def test_the_daemons_have_the_same_options_for_logs(make):
    actions = {name: each for each in make()._actions for name in each.option_strings}
    assert tuple(actions["--log-level"].choices or ()) == ("DEBUG", "INFO", "WARNING", "ERROR")
    assert tuple(actions["--log-format"].choices or ()) == ("json", "text")


@pytest.mark.parametrize(
    ("module", "reads"),
    [
        ("drakit_nodeplugin.__main__", "drakit_nodeplugin.config.load_config"),
        ("drakit_operator.__main__", "drakit_operator.__main__.read_config"),
    ],
)
@pytest.mark.parametrize(
    ("options", "used"),
    [
        ((), {"level": "ERROR", "form": "text"}),
        (
            ("--log-level=DEBUG", "--log-format=json"),
            {"level": "DEBUG", "form": "json"},
        ),
    ],
)
def test_an_option_takes_precedence_over_the_configuration_file(
    module, reads, options, used, run, monkeypatch, tmp_path
):
    file = tmp_path / "config.yaml"
    file.write_text("logging: {level: ERROR, format: text}\n")
    if "nodeplugin" in module:
        file.write_text(f"{file.read_text()}drivers: [{{driver: simulated}}]\n")
    seen: list[dict[str, str]] = []

    def configure(**settings: str) -> None:
        seen.append(settings)
        sys.exit(7)

    monkeypatch.setattr("drakit_daemon.logs.configure", configure)
    more = ["--node-name=n"] if "nodeplugin" in module else []
    assert run(module, "--config", str(file), *more, *options)[0] == 7
    assert seen == [used]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_errors_wrap_at_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    text = "the first sentence is longer than a line"
    for stream, shown in (
        (Terminal(), "error: the first sentence is\n  longer than a line\nsecond\n"),
        (io.StringIO(), f"error: {text}\nsecond\n"),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        print_error(f"{text}\nsecond")
        assert stream.getvalue() == shown
    assert wrapped(text, Terminal(), indent=2).splitlines()[1].startswith("    ")
