"""
``kubectl drakit``: its commands and exit codes.

Does not depend on what the commands compute: their modules are imported when a command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from drakit_cli.answers import run
from drakit_cli.kubectl.arguments import COMPLETE, parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == [COMPLETE]:
        from drakit_cli.kubectl import completion

        return completion.main(words[1:])
    options = parser().read(words)

    def command() -> int:
        from drakit_cli.kubectl import commands

        return commands.run(options)

    return run(command, extra="drakit[kubectl]")


if __name__ == "__main__":
    sys.exit(main())
