"""
``kubectl drakit``: its commands and exit codes.

0: nothing is wrong. 1: a problem was found, or the result is undecided. 2: wrong usage, or an
unusable kubeconfig. 3: the API server does not answer, or denies all requests.

It must not know what the commands compute: the modules of commands are imported when they run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from drakit_cli.answers import CommandError, UsageError

_Group: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]

_FORMATS = ("wide", "json", "yaml")

_NEEDS_EXTRA = "error: kubectl drakit needs the extra kubectl: pip install 'drakit[kubectl]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        from drakit_cli.kubectl.commands import run

        code = run(options)
        sys.stdout.flush()
        return code
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ImportError as error:
        print(f"{_NEEDS_EXTRA} ({error})", file=sys.stderr)
        return UsageError.exit_code
    except BrokenPipeError:
        # The reader closed the pipe (``| head``). Avoid a second error when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kubectl drakit",
        description="Explains pods that wait for devices, and shows the devices in the cluster. "
        "Uses your kubeconfig and your permissions, and stores nothing in the cluster.",
        epilog="Exit codes: 0 no problem, 1 a problem, or drakit cannot determine why a pod "
        "waits, 2 invalid arguments or kubeconfig, 3 the API server is unavailable or denies all "
        "requests.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_explain(commands)
    _add_listings(commands)
    completion = commands.add_parser(
        "completion",
        help="print a shell completion script",
        description="Prints a shell completion script for the program `kubectl-drakit`. You do not "
        "need it for `kubectl drakit`: kubectl's own completion already supports the plugin.",
    )
    completion.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    completion.set_defaults(command="completion")
    return parser


def _add_explain(commands: _Group) -> None:
    explain = commands.add_parser(
        "explain",
        help="explain why a pod or a claim waits, does not start, or is not deleted",
        description="Explains why a pod waits for its devices. Shows the devices that match each "
        "request, the reasons why they cannot be allocated, and the remedy. Also explains why a "
        "pod does not start on its node, or why Kubernetes has not yet deleted a pod or claim. For "
        "an unallocated claim, the command assumes a pod without a node selector, affinity or "
        "resource requests.",
    )
    explain.add_argument("target", metavar="KIND/NAME", help="the object: pod/NAME or claim/NAME")
    explain.set_defaults(command="explain")
    _add_connection(explain)


def _add_listings(commands: _Group) -> None:
    devices = commands.add_parser(
        "devices",
        help="show the pools of devices, and the free devices",
        description="Shows the free, allocated, tainted and unhealthy devices of each pool, and "
        "the claims to which devices are allocated.",
    )
    claims = commands.add_parser(
        "claims",
        help="show claims with their devices and pods",
        description="Shows claims with their state, node, devices, and pods.",
    )
    doctor = commands.add_parser(
        "doctor",
        help="check the cluster, and your permissions",
        description="Checks API versions and feature gates, pools, nodes, classes, your "
        "permissions, and drakit's releases with their values and permissions. Each finding "
        "has a remedy.",
    )
    for name, each in (("devices", devices), ("claims", claims), ("doctor", doctor)):
        each.set_defaults(command=name)
        _add_connection(each)
    claims.add_argument(
        "-A", "--all-namespaces", action="store_true", help="show the claims in all namespaces"
    )


def _add_connection(parser: argparse.ArgumentParser) -> None:
    connection = parser.add_argument_group("connection and output")
    connection.add_argument(
        "--context", metavar="NAME", help="kubeconfig context (default: the current context)"
    )
    connection.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="kubeconfig file (default: $KUBECONFIG, then ~/.kube/config)",
    )
    connection.add_argument(
        "-n",
        "--namespace",
        metavar="NAME",
        help="namespace (default: the namespace of the context)",
    )
    connection.add_argument(
        "-o", "--output", choices=_FORMATS, default="", help="output format; wide adds columns"
    )


if __name__ == "__main__":
    sys.exit(main())
