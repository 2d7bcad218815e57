"""
Completes the words of ``kubectl drakit``: commands, options, kinds, and names in the cluster.

kubectl's own completion runs the program ``kubectl_complete-drakit`` to complete a plugin. The
scripts for ``kubectl-drakit`` as a separate program run ``kubectl-drakit __complete``. Both print
one word per line and then a directive, as programs with cobra do. After an error, they print no
words and no message, because the user is typing.

Does not depend on what the commands do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from drakit.text import escaped_streams
from drakit_cli.kubectl.arguments import COMPLETE, parser
from drakit_cli.kubectl.targets import KINDS, POD, ObjectKind, find_kind

SECONDS = 2.0
"""The time limit for listing names in the cluster."""

MAX_NAMES = 200
"""Maximum number of names to print. A longer list does not help, and takes longer."""

FILES, NO_SPACE, WORDS = ":0", ":6", ":4"
"""The directives (cobra's ShellCompDirective): the default, which completes file names; NoSpace
with NoFileComp; NoFileComp."""

_FILES = ("kubeconfig", "filename", "certificate_authority")
_OF_KUBECONFIG = {"context": "contexts", "cluster": "clusters", "user": "users"}


@escaped_streams()
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the completions of the last word, and a directive."""
    words = list(sys.argv[1:] if arguments is None else arguments) or [""]
    *before, last = words
    with contextlib.redirect_stderr(io.StringIO()):
        found, directive = _complete(before, last)
    for word in dict.fromkeys(found):
        if word.startswith(last):
            print(word)
    print(directive)
    return 0


def _complete(before: Sequence[str], last: str) -> tuple[Iterable[str], str]:
    root: Any = parser()
    commands: dict[str, argparse.ArgumentParser] = dict(root._subparsers._group_actions[0].choices)
    if not before:
        return commands, WORDS
    command = commands.get(before[0])
    if command is None:
        return (), WORDS
    options = {name: each for each in command._actions for name in each.option_strings}
    previous = options.get(before[-1])
    if previous is not None and previous.nargs != 0:
        return _values(previous, before)
    if last.startswith("-"):
        return [each.option_strings[-1] for each in command._actions if each.option_strings], WORDS
    positionals = [each for each in command._actions if not each.option_strings]
    if not positionals:
        return (), WORDS
    if choices := positionals[0].choices:
        return list(choices), WORDS
    given = _parsed(before)
    return _targets(given, last) if given is not None and "target" in given else ((), WORDS)


def _values(option: argparse.Action, before: Sequence[str]) -> tuple[Iterable[str], str]:
    """Return the values of an option."""
    if option.choices:
        return list(option.choices), WORDS
    if option.dest in _FILES:
        return (), FILES
    given = _parsed(before[:-1])
    if given is None:
        return (), WORDS
    if section := _OF_KUBECONFIG.get(option.dest):
        return _names_in_kubeconfig(given, section), WORDS
    if option.dest == "namespace":
        return _names(given, _NAMESPACE), WORDS
    return (), WORDS


def _targets(given: argparse.Namespace, last: str) -> tuple[Iterable[str], str]:
    """Return the objects that can be explained: kinds, pods, and names of a kind."""
    word, slash, _ = last.partition("/")
    if len(given.target) == 1 and (kind := find_kind(given.target[0])) is not None:
        return _names(given, kind), WORDS
    if given.target:
        return (), WORDS
    if slash:
        kind = find_kind(word)
        names = _names(given, kind) if kind is not None else ()
        return [f"{word}/{name}" for name in names], WORDS
    kinds = [f"{each.singular}/" for each in KINDS if each.singular.startswith(last)]
    if last and (pods := [name for name in _names(given, POD) if name.startswith(last)]):
        return (*kinds, *pods), WORDS
    return kinds, NO_SPACE


def _parsed(words: Sequence[str]) -> argparse.Namespace | None:
    """Parse the options of a command that may be incomplete."""
    try:
        return parser().parse_known_args(words)[0]
    except SystemExit:
        return None


# ---------------------------------------------------------------- names


_NAMESPACE = ObjectKind("Namespace", namespaced=False)


def _names(given: argparse.Namespace, kind: ObjectKind) -> list[str]:
    """List names in the cluster. The result is empty if that fails, or takes too long."""
    from drakit_cli.connection import namespace_of, open_session
    from drakit_daemon.kube import resource_path

    async def read() -> list[str]:
        async with asyncio.timeout(SECONDS):
            async with await open_session(given) as session:
                inside = namespace_of(given, session) if kind.namespaced else None
                path = resource_path(kind.api, kind.plural, namespace=inside)
                page = await session.get(path, params={"limit": str(MAX_NAMES)})
                return [str(each["metadata"]["name"]) for each in page["items"]]

    try:
        return asyncio.run(read())
    except Exception:  # Never interrupt the user's typing with an error.
        return []


def _names_in_kubeconfig(given: argparse.Namespace, section: str) -> list[str]:
    import os

    import yaml

    from drakit_cli.connection import find_kubeconfig

    found: list[str] = []
    for path in str(find_kubeconfig(given.kubeconfig, os.environ) or "").split(os.pathsep):
        with contextlib.suppress(Exception):
            body = yaml.safe_load(Path(path).read_text())
            found += [str(each["name"]) for each in body[section]]
    return found


# ---------------------------------------------------------------- scripts


def script(shell: str) -> str:
    """Return the completion script for a shell."""
    file = Path(__file__).parent / "scripts" / f"completion.{shell}"
    text = file.read_text(encoding="utf-8").rstrip("\n")
    for name, value in (("COMPLETE", COMPLETE), ("FILES", FILES), ("NO_SPACE", NO_SPACE)):
        text = text.replace(f"@{name}@", value)
    return text
