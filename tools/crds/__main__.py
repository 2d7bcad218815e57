"""
Writes the generated files of crds/, or checks that the committed ones are up to date.

It must not know what is in them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from tools.crds import hostdevicepolicies

FOLDER = Path(__file__).resolve().parents[2] / "crds"
DEFINITIONS = {"hostdevicepolicies.yaml": hostdevicepolicies.definition}
HEAD = "# Generated from the model that reads it: run 'make crds'.\n"


class _Dumper(yaml.SafeDumper):
    """Writes no anchors: each part of a file can be read alone."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the generated files of crds/.")
    parser.add_argument("--check", action="store_true", help="fail if a file is not up to date")
    check = parser.parse_args().check
    code = 0
    for name, definition in DEFINITIONS.items():
        path = FOLDER / name
        text = HEAD + yaml.dump(definition(), Dumper=_Dumper, sort_keys=False, width=100)
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"crds/{name} is not up to date: run 'make crds'", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
