"""
The connection options of all commands that need a cluster. They are the same as kubectl's.

Does not depend on sessions, because their libraries may be missing when arguments are parsed.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, TypeAlias

# argparse does not export the common type of parsers and option groups.
_Place: TypeAlias = "argparse._ActionsContainer"  # pyright: ignore[reportPrivateUsage]


def add_option(place: _Place, words: str, text: str, **more: Any) -> None:
    """
    Add an option.

    :param words: the names of the option, and the word for its value, as in ``-o --output FILE``.
        Without such a word, the option is a flag. The value of a FILE, DIR or PATH is a path.
    """
    names = [each for each in words.split() if each.startswith("-")]
    kind: dict[str, Any] = {"action": "store_true"}
    if value := " ".join(words.split()[len(names) :]):
        kind = {"metavar": value, "type": Path if value in ("FILE", "DIR", "PATH") else str}
    place.add_argument(*names, help=text, **kind | more)


def add_connection(parser: argparse.ArgumentParser, *, user_agent: str) -> None:
    """Add the connection options to a command."""
    parser.set_defaults(user_agent=user_agent)
    group = parser.add_argument_group("connection")
    add_option(
        group,
        "--kubeconfig FILE",
        "kubeconfig file (default: the files of $KUBECONFIG, then ~/.kube/config, then the pod's "
        "service account)",
    )
    add_option(group, "--context NAME", "kubeconfig context (default: the current context)")
    add_option(
        group, "--cluster NAME", "cluster of the kubeconfig (default: the cluster of the context)"
    )
    add_option(group, "--user NAME", "user of the kubeconfig (default: the user of the context)")
    add_option(group, "--as NAME", "user to impersonate", dest="as_")
    add_option(group, "--as-uid UID", "UID of the user to impersonate")
    add_option(group, "-s --server URL", "URL of the API server")
    add_option(group, "--token TOKEN", "bearer token for the API server")
    add_option(
        group,
        "--certificate-authority FILE",
        "certificates of the authorities that can sign the API server's certificate",
        type=str,
    )
    add_option(group, "--tls-server-name NAME", "host name in the API server's certificate")
    again = "group to impersonate; you can repeat the option"
    add_option(group, "--as-group GROUP", again, action="append", default=[])
    add_option(group, "--insecure-skip-tls-verify", "do not check the API server's certificate")
    add_option(
        group,
        "--request-timeout DURATION",
        "time limit of a request, such as 30s or 2m (default: 30s)",
        type=duration,
    )


_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001, "": 1.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")


def duration(text: str) -> float:
    """
    Return the seconds of a duration in kubectl's format, such as 1m30s. A plain number is a number
    of seconds.

    :raises argparse.ArgumentTypeError: the string is not a duration.
    """
    if text.isdecimal():
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(map("".join, parts)) != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 30s or 5m")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
