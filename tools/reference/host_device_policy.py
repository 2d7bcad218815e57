"""
The generated parts of the page of HostDevicePolicies: the fields of the model with their
docstrings, and the dangerous device nodes of the code. The rest of the page is written by hand.
"""

from __future__ import annotations

import re

from drakit_drivers.hostdev.dangerous import DANGEROUS_NODES
from drakit_drivers.hostdev.policy import HostDevicePolicySpec
from tools.reference import configuration, markdown

PAGE = markdown.DOCS / "reference" / "host-device-policy.md"

_FIELDS = re.compile(r"(?<=are disabled by default\.\n\n).*?(?=\n\n## Matching$)", re.M | re.S)
_NODES = re.compile(r"^\| Device nodes \|.*?(?=\n\n)", re.M | re.S)


def page() -> str:
    """Return the committed page with its generated tables."""
    _, _, *fields = configuration.section("Fields", "", HostDevicePolicySpec)
    nodes = markdown.table(
        ("Device nodes", "Such a device"),
        [
            (", ".join(map(markdown.code, globs)), danger)
            for globs, danger in DANGEROUS_NODES.items()
        ],
    )
    text = PAGE.read_text(encoding="utf-8")
    for pattern, new in ((_FIELDS, "\n\n".join(fields)), (_NODES, nodes)):
        text, count = pattern.subn(lambda _, new=new: new, text)
        if count != 1:
            raise SystemExit(f"{PAGE.name}: a generated part is found {count} times")
    return text
