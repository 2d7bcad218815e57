"""
``drakit``: its commands and exit codes.

0: done, no problems found. 1: problems were found, or the command failed. 2: wrong usage or invalid
settings. Results go to standard output, error messages to standard error.

It must not know what the commands do: each one is imported when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TypeAlias, cast

from drakit.cli.errors import CommandError

__all__ = ("main",)

# argparse has no public name for it.
_Group: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]

DEFAULT_CONFIG = Path("/etc/drakit/nodeplugin.yaml")
"""Where the chart mounts the node plugin's configuration."""

_EXTRAS = {"conformance": "drakit[testing]"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    options = _parser().parse_args(arguments)
    module, _, function = cast("str", options.command).rpartition(".")
    try:
        run = cast("Callable[..., int]", getattr(import_module(f"drakit.cli.{module}"), function))
        code = run(options)
        sys.stdout.flush()
        return code
    except CommandError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except ImportError as error:
        print(
            f"this command needs {_EXTRAS.get(module, 'drakit[nodeplugin]')}: {error}",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        # Whoever reads has enough (``| head``); the interpreter must not complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drakit",
        description="Looks after drakit on this node, and helps to write drivers.",
        epilog="Exit codes: 0 fine, 1 problems were found, 2 wrong use.",
    )
    commands = _group(parser)
    _add_checkpoint(_group(commands.add_parser("node", help="what the node plugin keeps")))
    _add_lint(_group(commands.add_parser("cdi", help="CDI files")))
    _add_new(commands)
    _add_conformance(commands)
    version = commands.add_parser("version", help="versions of drakit, Python and SQLite")
    version.set_defaults(command="version.show")
    return parser


def _group(parser: argparse.ArgumentParser) -> _Group:
    return parser.add_subparsers(required=True, metavar="COMMAND")


def _add_lint(group: _Group) -> None:
    lint = group.add_parser(
        "lint",
        help="find what runtimes refuse, or read in another way than it was meant",
        description="Checks CDI files, and directories of them as a runtime reads them together.",
    )
    lint.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="files, or directories with the weakest first (/etc/cdi /var/run/cdi)",
    )
    _add_json(lint)
    lint.set_defaults(command="cdi.lint")


def _add_new(group: _Group) -> None:
    new = group.add_parser(
        "new",
        help="write the project of a driver",
        description="Writes the project of a driver: package, tests, image, values of the chart, "
        "and a workflow that tests it. It works as it is; no file is overwritten.",
    )
    new.add_argument("name", metavar="NAME", help="the project's name: lamps, rack-lamps")
    new.add_argument(
        "--driver", help="the driver's name, below a domain of yours (NAME.example.com)"
    )
    new.add_argument(
        "--directory", type=Path, metavar="DIR", help="where the project is written (NAME)"
    )
    new.add_argument(
        "--image", help="the image's repository (registry.example.com/NAME), without -nodeplugin"
    )
    new.set_defaults(command="new.new")


def _add_conformance(group: _Group) -> None:
    conformance = group.add_parser(
        "conformance",
        help="hold a driver to the rules of the contract",
        description="Runs a driver on a node that is not there, and holds it to the rules of the "
        "contract. What it does not keep is printed, with what the kubelet needs it for.",
    )
    conformance.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="module:Class, or the name of an installed driver; unix:/path/to.sock, a backend that "
        "runs; backend:COMMAND or device-plugin:COMMAND, a program to be started ({directory} in "
        "it is the directory that it registers in)",
    )
    conformance.add_argument(
        "--config",
        dest="driver_config",
        type=Path,
        metavar="FILE",
        help="YAML: the configuration of a Python driver; {root} in it is the node's folder",
    )
    conformance.add_argument(
        "--parameters", type=Path, metavar="FILE", help="YAML: opaque parameters for its claims"
    )
    conformance.add_argument(
        "--setup",
        metavar="COMMAND",
        help="is run before the first start and after each reboot, with the node's folder as "
        "$DRAKIT_ROOT; what is below $DRAKIT_ROOT/run is lost at a reboot",
    )
    conformance.add_argument(
        "--rule", action="append", metavar="ID", help="only this one; may be repeated"
    )
    conformance.add_argument("--list", action="store_true", help="print the rules")
    conformance.add_argument(
        "--junit", type=Path, metavar="FILE", help="also write the results as JUnit XML"
    )
    conformance.set_defaults(command="conformance.conformance")


def _add_checkpoint(group: _Group) -> None:
    checkpoint = _group(group.add_parser("checkpoint", help="which claims are prepared"))
    show = checkpoint.add_parser(
        "show",
        help="print the entries",
        description="Prints the entries of the checkpoints. Nothing is written, and the node "
        "plugin may be running.",
    )
    show.set_defaults(command="checkpoint.show")
    verify = checkpoint.add_parser(
        "verify",
        help="check the entries, and CDI files against them",
        description="Checks the checkpoints, and CDI files against their entries. It "
        "writes nothing. Exit code 1: a check failed.",
    )
    verify.set_defaults(command="checkpoint.verify")
    forget = _group(group.add_parser("claim", help="one claim")).add_parser(
        "forget",
        help="release a claim's devices by hand, without its driver",
        description="Removes the entry and the CDI file of a claim. Its driver is not asked: what "
        "it did for the claim stays. The node plugin may be running.",
    )
    forget.add_argument("uid", metavar="UID", help="metadata.uid of the ResourceClaim")
    forget.add_argument(
        "--force", action="store_true", help="also where a container uses the claim, or may do so"
    )
    forget.set_defaults(command="claim.forget")
    for command in (show, verify):
        _add_json(command)
    for command in (show, verify, forget):
        command.add_argument("--driver", help="only this driver's")
        _add_place(command)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_place(parser: argparse.ArgumentParser) -> None:
    place = parser.add_argument_group("where things are on the node")
    place.add_argument(
        "--config", type=Path, help=f"the node plugin's configuration file ({DEFAULT_CONFIG})"
    )
    place.add_argument("--kubelet-root", type=Path, help="kubelet's root, before the file's")
    place.add_argument("--cdi-dir", type=Path, help="directory of CDI specs, before the file's")
    parser.set_defaults(default_config=DEFAULT_CONFIG)


if __name__ == "__main__":
    sys.exit(main())
