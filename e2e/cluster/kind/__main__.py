"""`python -m e2e.cluster.kind up|down`: a private Docker engine, started and ended."""

import argparse
import shutil
import sys
import time

from ..api import ClusterError
from ..local.binaries import cache_folder
from . import engine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.kind", description=__doc__)
    parser.add_argument("command", choices=("up", "down"))
    arguments = parser.parse_args()
    try:
        return up() if arguments.command == "up" else down()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def up() -> int:
    started = time.monotonic()
    found = engine.start()
    print(f"the Docker engine answers after {time.monotonic() - started:.1f} s")
    print(f"export DOCKER_HOST={found.docker_host}")
    return 0


def down() -> int:
    started = time.monotonic()
    left = engine.stop()
    # Its clusters went with it.
    shutil.rmtree(cache_folder() / "kind", ignore_errors=True)
    for sentence in left:
        print(f"error: after the end, {sentence}", file=sys.stderr)
    if not left:
        seconds = time.monotonic() - started
        print(f"no Docker engine of ours is left after {seconds:.1f} s; no difference to before")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
