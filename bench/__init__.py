"""
Measurements: `python -m bench`, `python -m bench.hops` and `python -m bench.hostile`.

They measure this checkout, even if another one is installed.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
FOLDERS = ("cli", "daemon", "driver", "explain", "formats", "nodeplugin", "operator", "proto")
"""The folders of drakit's packages, except for that of the SDK."""

SOURCES = [str(REPOSITORY / name) for name in ("", *FOLDERS)]

sys.path[:0] = SOURCES
