"""docs/reference/limits.md has the numbers of the code."""

from __future__ import annotations

import re

from drakit.explain import pending, projection, search
from drakit_drivers.hostdev.selection import _MAX_DEVICES
from drakit_nodeplugin.config import MAX_BACKENDS, MAX_RESOURCES
from drakit_nodeplugin.endpoints.backend.directory import MAX_SOCKETS
from drakit_nodeplugin.endpoints.contract import MAX_DEVICES
from drakit_nodeplugin.host.policies import MAX_POLICIES
from tests.unit.docs.listings import ROOT


def test_the_page_has_the_limits_of_the_code():
    text = (ROOT / "docs/reference/limits.md").read_text()
    shown = [
        int(number.replace(",", "")) for number in re.findall(r"^\| .*? \| ([\d,]+) \|", text, re.M)
    ]
    assert shown == [
        MAX_BACKENDS,
        MAX_RESOURCES,
        MAX_SOCKETS,
        _MAX_DEVICES,
        MAX_POLICIES,
        MAX_DEVICES,
    ]


def test_the_operators_page_has_the_limits_of_explanations():
    text = (ROOT / "docs/reference/operator.md").read_text()
    _, _, undecided = text.partition("### Undecided cases")
    shown = re.findall(r"[\d,]*\d", undecided.partition("\n- A pool")[0])
    assert [int(number.replace(",", "")) for number in shown] == [
        search.MAX_STEPS,
        pending.MAX_NODES,
        search.MAX_DEVICES,
        projection.MAX_EXPRESSION,
    ]
