"""
Writes the generated parts of the CustomResourceDefinitions, or checks that the committed ones are
up to date.

Helm never upgrades a definition. Therefore, each has a checksum of its spec, by which the chart
decides whether its hook has to upgrade the one in the cluster.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys

import yaml

from tools.crds.hostdevicepolicies import FILE, definition

FOLDER = FILE.parent
HEAD = "# The schema of spec is generated from the model that reads it: run 'make crds'.\n"
CHECKSUM = "drakit.dev/checksum"


class _Dumper(yaml.SafeDumper):
    """Writes no anchors, so that each part of a file is readable by itself."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Writes the generated parts of charts/drakit/crds/."
    )
    parser.add_argument("--check", action="store_true", help="fail if a file is not up to date")
    check = parser.parse_args().check
    code = 0
    for path in sorted(FOLDER.glob("*.yaml")):
        committed = text = path.read_text(encoding="utf-8")
        if path == FILE:
            text = HEAD + yaml.dump(definition(), Dumper=_Dumper, sort_keys=False, width=100)
        text = with_checksum(text)
        if not check:
            path.write_text(text, encoding="utf-8")
        elif committed != text:
            print(
                f"charts/drakit/crds/{path.name} is not up to date: run 'make crds'",
                file=sys.stderr,
            )
            code = 1
    return code


def with_checksum(text: str) -> str:
    """Return a definition with the annotation that contains the checksum of its spec."""
    spec = json.dumps(yaml.safe_load(text)["spec"], sort_keys=True)
    checksum = hashlib.sha256(spec.encode()).hexdigest()[:16]
    text = re.sub(rf"^  annotations:\n    {CHECKSUM}: .*\n", "", text, flags=re.M)
    annotation = f'metadata:\n  annotations:\n    {CHECKSUM}: "{checksum}"\n'
    return text.replace("metadata:\n", annotation, 1)


if __name__ == "__main__":
    sys.exit(main())
