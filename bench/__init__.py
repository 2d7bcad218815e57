"""
Measurements: `python -m bench`, `python -m bench.hops` and `python -m bench.hostile`.

They measure the checkout that they lie in, even where another one is installed.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
FOLDERS = ("cli", "daemon", "driver", "explain", "formats", "nodeplugin", "operator", "proto")
"""The folders of our packages, besides that of the SDK."""

SOURCES = [str(REPOSITORY / name) for name in ("", *FOLDERS)]

sys.path[:0] = SOURCES
