"""
`python -m e2e.cluster.kind up|down|run`: a private Docker engine, started and ended.

`run` starts the engine, runs a command with CLUSTER=kind, and stops the engine even if the command
fails. If Docker already responds, CLUSTER=auto chooses kind, and these commands are not needed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from ..api import ClusterError
from ..choice import docker_answers
from ..local.binaries import cache_folder
from . import engine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.kind", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start the engine, unless one answers")
    commands.add_parser("down", help="end the engine and restore this machine")
    runs = commands.add_parser("run", help="run a command between the two")
    runs.add_argument("argv", nargs="+", metavar="-- COMMAND")
    arguments = parser.parse_args()
    try:
        match arguments.command:
            case "up":
                return up()
            case "down":
                return down()
            case _:
                return run(arguments.argv)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def up() -> int:
    if engine.find() is None and docker_answers():
        print("a Docker engine answers already, and CLUSTER=kind uses it")
        return 0
    started = time.monotonic()
    found = engine.start()
    print(f"the Docker engine answers after {time.monotonic() - started:.1f} s")
    print(f"export DOCKER_HOST={found.docker_host}")
    return 0


def down() -> int:
    started = time.monotonic()
    if not engine.exists():
        print("no Docker engine of ours is there")
        return 0
    left = engine.stop()
    # The engine's clusters have ended with it.
    shutil.rmtree(cache_folder() / "kind", ignore_errors=True)
    for sentence in left:
        print(f"error: after the end, {sentence}", file=sys.stderr)
    if not left:
        seconds = time.monotonic() - started
        print(f"no Docker engine of ours is left after {seconds:.1f} s; no difference to before")
    return 1 if left else 0


def run(argv: Sequence[str]) -> int:
    if docker_answers():
        print("a Docker engine answers already: CLUSTER=auto and CLUSTER=kind use it")
        return 0
    if (reason := engine.obstacle()) is not None:
        print(f"kind cannot run here: {reason}")
        return 0
    try:
        up()
        code = subprocess.run(argv, env=os.environ | {"CLUSTER": "kind"}, check=False).returncode
    finally:
        ended = down()
    return code or ended


if __name__ == "__main__":
    sys.exit(main())
