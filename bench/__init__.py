"""
Measurements: `python -m bench` and `python -m bench.hops`.

They measure the checkout that they lie in, even where another one is installed.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
SOURCES = [str(REPOSITORY / name) for name in ("", "nodeplugin", "operator", "proto")]

sys.path[:0] = SOURCES
