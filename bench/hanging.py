"""
A CEL helper that hangs: `python -m bench.hanging PROGRAM ARGUMENTS`.

It forwards each line to the real helper and back, but does not respond to lines with a certain
string.
"""

from __future__ import annotations

import subprocess
import sys
import time

from bench.attacks import HANGS


def main() -> None:
    with subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as helper:
        assert helper.stdin is not None
        assert helper.stdout is not None
        for line in sys.stdin.buffer:
            if HANGS.encode() in line:
                time.sleep(3600)
            helper.stdin.write(line)
            helper.stdin.flush()
            sys.stdout.buffer.write(helper.stdout.readline())
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
