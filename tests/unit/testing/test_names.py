"""The names of `drakit.testing`, the cost of its import, and the discovery of rules."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import drakit.testing
from drakit.testing.conformance.rules import collect, rule


def test_every_public_name_is_there():
    assert list(drakit.testing.__all__) == sorted(drakit.testing.__all__)
    for name in drakit.testing.__all__:
        assert getattr(drakit.testing, name).__doc__


def test_importing_it_and_its_plugin_loads_nothing_heavy():
    heavy = "{'grpc', 'pydantic', 'aiohttp', 'kubernetes_asyncio', 'yaml', 'drakit_proto'}"
    code = f"import sys, drakit.testing.plugin; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def module_with(name, *ids) -> ModuleType:
    made = ModuleType(name)
    for number, each in enumerate(ids):

        async def check(kit) -> None:
            """A rule that passes."""

        check.__module__ = name
        setattr(
            made, f"rule_{number}", rule(each, "something is", why="Something needs it.")(check)
        )
    return made


def test_rules_stand_in_the_order_of_their_modules_and_each_once():
    first, second = module_with("a", "z-rule", "b-rule"), module_with("b", "a-rule")
    second.imported = first.rule_0
    assert [found.id for found in collect([first, second])] == ["z-rule", "b-rule", "a-rule"]


def test_two_rules_of_one_id_are_refused():
    with pytest.raises(ValueError, match="two rules twice"):
        collect([module_with("a", "twice"), module_with("b", "twice")])
