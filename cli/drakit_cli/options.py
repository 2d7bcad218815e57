"""
The options for a connection, in all commands that need a cluster: those of kubectl.

It must not know sessions: their libraries may be missing when arguments are read.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the options for a connection to a command."""
    connection = parser.add_argument_group("connection")
    connection.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="kubeconfig file (default: the files of $KUBECONFIG, then ~/.kube/config, then the "
        "pod's service account)",
    )
    for option, metavar, text in (
        ("--context", "NAME", "kubeconfig context (default: the current context)"),
        ("--cluster", "NAME", "cluster of the kubeconfig (default: the cluster of the context)"),
        ("--user", "NAME", "user of the kubeconfig (default: the user of the context)"),
        ("--as", "NAME", "user to impersonate"),
        ("--as-uid", "UID", "UID of the user to impersonate"),
        ("-s --server", "URL", "URL of the API server"),
        ("--token", "TOKEN", "bearer token for the API server"),
        ("--certificate-authority", "FILE", "certificates that may sign the API server's"),
        ("--tls-server-name", "NAME", "host name in the API server's certificate"),
    ):
        connection.add_argument(
            *option.split(),
            dest=option.split()[-1].strip("-").replace("-", "_") + "_" * (option == "--as"),
            metavar=metavar,
            help=text,
        )
    connection.add_argument(
        "--as-group",
        action="append",
        default=[],
        metavar="GROUP",
        help="group to impersonate; you can repeat the option",
    )
    connection.add_argument(
        "--insecure-skip-tls-verify",
        action="store_true",
        help="do not check the API server's certificate",
    )
    connection.add_argument(
        "--request-timeout",
        type=duration,
        metavar="DURATION",
        help="time limit of a request, such as 30s or 2m (default: 30s)",
    )


_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "": 1.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")


def duration(text: str) -> float:
    """
    Return the seconds of a duration as kubectl reads it, such as 1m30s; a plain number is seconds.

    :raises argparse.ArgumentTypeError: it is no duration.
    """
    if text.isdecimal():
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(map("".join, parts)) != text:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 30s or 5m")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
