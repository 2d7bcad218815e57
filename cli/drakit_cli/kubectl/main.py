"""
``kubectl drakit``: its commands and exit codes.

0: nothing is wrong. 1: a pod is blocked, or a problem was found. 2: wrong usage, or an unusable
kubeconfig. 3: the API server does not answer, or denies all requests. 4: drakit cannot decide. 5:
the object does not exist.

It must not know what the commands compute: the modules of commands are imported when they run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from drakit_cli.answers import run
from drakit_cli.kubectl.arguments import COMPLETE, parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == [COMPLETE]:
        from drakit_cli.kubectl import completion

        return completion.main(words[1:])
    options = parser().parse_args(arguments)

    def command() -> int:
        from drakit_cli.kubectl import commands

        return commands.run(options)

    return run(command, extra="drakit[kubectl]", prefix="error: ")


if __name__ == "__main__":
    sys.exit(main())
