"""
``drakit version``: the versions for a bug report.

It must not know the daemons.
"""

from __future__ import annotations

import argparse
import platform
import sqlite3
from importlib.metadata import version

__all__ = ("show",)


def show(_: argparse.Namespace) -> int:
    """Print the versions."""
    print(
        f"drakit {version('drakit')} (Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version})"
    )
    return 0
