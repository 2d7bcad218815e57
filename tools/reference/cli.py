"""
The page of commands, from the argument parsers of the programs.

A parser's own help output differs between versions of Python, so this module writes its own.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from drakit_cli.kubectl.arguments import parser as kubectl
from drakit_cli.main import parser as drakit
from drakit_daemon.command_line import DAEMON_EXIT_CODES, Parser, PrintVersion
from drakit_driver import device_plugin
from drakit_driver.__main__ import parser as driver
from drakit_nodeplugin.__main__ import parser as nodeplugin
from drakit_operator.__main__ import parser as operator
from tools.reference import markdown


def page() -> str:
    """Return the page."""
    return markdown.document(
        "Commands",
        description="The commands, options and exit codes of kubectl drakit, drakit, and of the three daemons.",
        source="the argument parsers of the programs",
        body=[
            "drakit has two command lines, `kubectl drakit` and `drakit`, and three [daemons](#daemons).",
            markdown.paragraph(
                "All five programs have the option `--version`. They print a help with examples for `--help`, and for "
                "`help` with or without a command. Without arguments, `kubectl drakit` and `drakit` print their help "
                "and exit with 0. The daemons print it to standard error, and exit with 2. Error messages go to "
                "standard error, and begin with `error:`. On a terminal, messages wrap at its width."
            ),
            *_programs([make() for make in (kubectl, drakit)]),
            *_daemons([make() for make in (driver, nodeplugin, operator)]),
        ],
    )


def _daemons(parsers: Sequence[argparse.ArgumentParser]) -> Iterator[str]:
    """Describe the daemons, and the options that several of them have."""
    driver, *of_chart = parsers
    yield "## Daemons"
    yield markdown.paragraph(
        f"`{driver.prog}` runs a Python driver in its own container. The chart runs "
        f"{' and '.join(f'`{each.prog}`' for each in of_chart)}. {DAEMON_EXIT_CODES} Several daemons have:"
    )
    programs: dict[str, list[str]] = {}
    for parser in parsers:
        for each in parser._actions:
            if _is_documented(each):
                programs.setdefault(_form(each), []).append(f"`{parser.prog}`")
    yield markdown.table(
        ("Option", "Daemons"),
        [
            (markdown.code(option), ", ".join(names))
            for option, names in programs.items()
            if len(names) > 1
        ],
    )
    yield from _program(driver)
    yield from _device_plugin()
    for each in of_chart:
        yield from _program(each)


def _is_documented(action: argparse.Action) -> bool:
    return not isinstance(action, (argparse._HelpAction, PrintVersion))


def _device_plugin() -> Iterator[str]:
    """Describe a driver as a device plugin, from the docstring of its module."""
    yield "### A driver as a device plugin"
    parts: dict[str, list[str]] = {}
    introduction: list[str] = []
    part: list[str] | None = None
    for line in (device_plugin.__doc__ or "").strip().splitlines()[2:]:
        if line.startswith("    ") and part is None and introduction:
            part = parts[introduction.pop()] = []
        if line.startswith("    ") and part is not None:
            part.append(line.strip())
        elif line:
            introduction.append(line)
            part = None
    yield markdown.docstring("\n".join(introduction[:-1]))
    yield markdown.table(
        ("Part", "As a device plugin"),
        [(name, markdown.prose(" ".join(lines))) for name, lines in parts.items()],
    )


def _programs(parsers: Iterable[argparse.ArgumentParser]) -> Iterator[str]:
    described: set[str | None] = set()
    for parser in parsers:
        yield from _program(parser)
        shared: dict[str | None, argparse._ArgumentGroup] = {}
        for command, _ in _commands(parser):
            for group in _shared_groups(command):
                shared.setdefault(group.title, group)  # the first command has all formats
        for title, group in shared.items():
            if title not in described:  # otherwise, the page describes it for another program
                described.add(title)
                yield f"### Options: {title}"
                yield markdown.code_block("text", _arguments(group._group_actions))


def _program(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {parser.prog}"
    commands = list(_commands(parser))
    if not commands:
        # The section about daemons has the exit codes.
        yield markdown.paragraph(parser.description or "")
        yield from _usage(parser)
        return
    yield from _text(parser)
    yield markdown.table(
        ("Command", "Purpose"),
        [
            (f"[`{command.prog}`](#{command.prog.replace(' ', '-')})", _sentence(purpose))
            for command, purpose in commands
        ],
    )
    for command, purpose in commands:
        yield f"### {command.prog}"
        yield from _text(command) if command.description else [_sentence(purpose)]
        yield from _usage(command)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Find the commands of a parser that have no subcommands, with their help."""
    for group in parser._actions:
        if isinstance(group, argparse._SubParsersAction):
            texts = {each.dest: each.help or "" for each in group._choices_actions}
            for name, command in group.choices.items():
                below = list(_commands(command))
                yield from below or [(command, texts.get(name, ""))]


def _text(parser: argparse.ArgumentParser) -> Iterator[str]:
    for text in (parser.description, parser.epilog):
        if text:
            yield markdown.paragraph(text)


def _usage(parser: argparse.ArgumentParser) -> Iterator[str]:
    actions = [each for each in parser._actions if _is_documented(each)]
    operands = [each for each in actions if not each.option_strings]
    options = [each for each in actions if each.option_strings]
    words = [parser.prog, *(_form(each) for each in options if each.required)]
    words += ["[OPTIONS]"] * any(not each.required for each in options)
    groups = _shared_groups(parser)
    words += [f"[OPTIONS: {', '.join(str(each.title) for each in groups)}]"] * bool(groups)
    words += [_operand(each) for each in operands]
    shared = [each for group in groups for each in group._group_actions]
    own = [each for each in (*operands, *options) if each not in shared]
    examples = [f"  {each}" for each in parser.examples] if isinstance(parser, Parser) else []
    yield markdown.code_block(
        "text",
        [
            " ".join(words),
            *([""] if own else []),
            *_arguments(own),
            *(["", "Examples:", *examples] if examples else []),
        ],
    )


def _shared_groups(parser: argparse.ArgumentParser) -> list[argparse._ArgumentGroup]:
    """Return the groups of options that several commands share. argparse adds two of its own."""
    return [group for group in parser._action_groups[2:] if group._group_actions]


def _arguments(actions: Iterable[argparse.Action]) -> list[str]:
    """Return operands and options with their meanings, as in a help text."""
    lines: list[str] = []
    for each in actions:
        meaning = textwrap.wrap(_meaning(each), markdown.CODE_WIDTH - 6)
        lines += [f"  {_form(each, short=True)}", *(f"      {line}" for line in meaning)]
    return lines


def _form(action: argparse.Action, *, short: bool = False) -> str:
    if not action.option_strings:
        return _name(action)
    names = action.option_strings if short else action.option_strings[-1:]
    option = ", ".join(names)
    return option if action.nargs == 0 else f"{option} {_name(action)}"


def _operand(action: argparse.Action) -> str:
    name = _name(action)
    return {"*": f"[{name}...]", "?": f"[{name}]", "+": f"{name}..."}.get(str(action.nargs), name)


def _name(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def _meaning(action: argparse.Action) -> str:
    text = _sentence(action.help or "")
    return f"{text} Required." if action.option_strings and action.required else text


def _sentence(text: str) -> str:
    """Capitalize a help string, and end it with a period."""
    if not text:
        return ""
    return f"{text[0].upper()}{text[1:]}".rstrip(".") + "."
