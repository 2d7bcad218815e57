"""
``kubectl drakit``: its commands and exit codes.

0: nothing is wrong. 1: a pod is blocked, or a problem was found. 2: wrong usage, or an unusable
kubeconfig. 3: the API server does not answer, or denies all requests. 4: drakit cannot decide. 5:
the object does not exist.

It must not know what the commands compute: the modules of commands are imported when they run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from drakit_cli.answers import CommandError, UsageError
from drakit_cli.kubectl.arguments import COMPLETE, parser

_NEEDS_EXTRA = "error: kubectl drakit needs the extra kubectl: pip install 'drakit[kubectl]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == [COMPLETE]:
        from drakit_cli.kubectl import completion

        return completion.main(words[1:])
    options = parser().parse_args(arguments)
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


if __name__ == "__main__":
    sys.exit(main())
