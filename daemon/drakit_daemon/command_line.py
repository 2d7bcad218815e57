"""
The parts that all command lines share: the parser, error messages and the options of daemons.

Does not depend on what a program does. Imports little, because it is imported for every command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias, get_args

from drakit.text import escaped

INVALID = 2
"""The exit code for invalid arguments or settings."""

MIN_WIDTH = 20
"""Minimum width of a terminal to wrap lines."""

# argparse does not export the type of a subcommand group.
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # pyright: ignore[reportPrivateUsage]


# ---------------------------------------------------------------- messages


class Terminal(Protocol):
    """A stream that can be a terminal."""

    def isatty(self) -> bool: ...


def columns(stream: Terminal) -> int:
    """Return the width of the terminal, or 0 for files and pipes."""
    import shutil

    return shutil.get_terminal_size().columns if stream.isatty() else 0


def wrapped(text: str, stream: Terminal, *, indent: int = 0) -> str:
    """Wrap a line at the terminal's width. Lines for files and pipes are not wrapped."""
    import textwrap

    prefix = " " * indent
    width = columns(stream)
    if width <= MIN_WIDTH or len(prefix + text) <= width:
        return f"{prefix}{text}"
    return textwrap.fill(
        text,
        width,
        initial_indent=prefix,
        subsequent_indent=f"{prefix}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_error(message: object) -> None:
    """Print an error message on standard error, with the prefix that all programs use."""
    for line in f"error: {message}".split("\n"):
        sys.stderr.write(f"{wrapped(escaped(line), sys.stderr)}\n")


def refuse(errors: Iterable[object]) -> NoReturn:
    """Print one message for each problem in the arguments or settings, and exit."""
    for error in errors:
        print_error(error)
    sys.exit(INVALID)


# ---------------------------------------------------------------- parsers


class Parser(argparse.ArgumentParser):
    """A parser whose help contains examples and the URL of the documentation."""

    def __init__(self, *, examples: Sequence[str] = (), **more: Any) -> None:
        """
        :param examples: complete command lines. A command with subcommands does not need any,
            because its help shows the examples of its subcommands.
        """
        super().__init__(**more)
        self._examples = tuple(examples)
        self._subcommands: dict[str, Parser] = {}

    @property
    def examples(self) -> Sequence[str]:
        """Command lines that show how to use the command."""
        below = [each for parser in self._subcommands.values() for each in parser.examples[:1]]
        more = [each for parser in self._subcommands.values() for each in parser.examples[1:2]]
        return self._examples or [*below, *more][:2]

    def add_commands(self) -> Commands:
        """Add subcommands. Without a subcommand, the command prints its help."""
        self.set_defaults(print_help=self.print_help)
        commands = self.add_subparsers(metavar="COMMAND", parser_class=Parser)
        self._subcommands = commands.choices  # the mapping to which argparse adds the parsers
        return commands

    def format_help(self) -> str:
        """Add the examples and the URL of the documentation."""
        examples = "".join(f"  {each}\n" for each in self.examples)
        text = super().format_help()
        if examples:
            text += f"\nexamples:\n{examples}"
        return f"{text}\ndocumentation: {documentation_url()}\n"

    def error(self, message: str) -> NoReturn:
        """Print a message about the arguments, and exit."""
        refuse([f"{message}\nSee '{self.prog} --help'."])


class ProgramParser(Parser):
    """The parser of a program, with ``--version`` and ``help``."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.add_argument("--version", action=PrintVersion)

    def read(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """
        Parse the arguments of the process, or the given ones.

        Without arguments, print the help. A program with commands then succeeds, as kubectl does.
        For a daemon, this is an error, because a container without arguments is misconfigured.
        """
        words = list(sys.argv[1:] if arguments is None else arguments)
        if words[:1] == ["help"]:
            words = [*words[1:], "--help"]
        if not words and not self._subcommands:
            self.print_help(sys.stderr)
            sys.exit(INVALID)
        options = self.parse_args(words)
        if self._subcommands and not hasattr(options, "command"):
            print_help: Callable[[], None] = options.print_help
            print_help()
            sys.exit(0)
        return options


class PrintVersion(argparse.Action):
    """The option ``--version``."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(
            option_strings,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            nargs=0,
            help="show the version, and exit",
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print the version, and exit."""
        from importlib.metadata import version

        sys.stdout.write(f"{parser.prog} {version('drakit')}\n")
        sys.exit(0)


def documentation_url() -> str:
    """Return the documentation's URL from the package metadata."""
    from importlib.metadata import metadata

    urls = dict(each.split(", ", 1) for each in metadata("drakit").get_all("Project-URL") or ())
    return urls["Documentation"]


# ---------------------------------------------------------------- options


DAEMON_EXIT_CODES = (
    "Exit codes: 0 stopped by SIGTERM or SIGINT, 1 failed, 2 invalid arguments or settings."
)


def add_logging(parser: Parser, *, level: str | None = None, form: str | None = None) -> None:
    """
    Add the options for the log of a daemon.

    :param level: the default level. None if the daemon's configuration file sets it.
    :param form: the default format, or None.
    """
    from drakit.settings import Logging

    for name, default, text in (
        ("level", level, "lowest level of the messages that are logged"),
        ("format", form, "json writes one JSON object per line, text writes human-readable lines"),
    ):
        source = default or f"logging.{name} of the configuration file"
        parser.add_argument(
            f"--log-{name}",
            choices=get_args(Logging.model_fields[name].annotation),
            default=default,
            help=f"{text} (default: {source})",
        )
