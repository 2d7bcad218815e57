"""
The rules of the contract as tests in a vendor's own test suite, one test per rule.

Does not depend on the rules, or on pytest plugins: the tests are plain functions that run asyncio
themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from drakit.testing.conformance.rules import Rule, rules
from drakit.testing.conformance.runner import Outcome, RuleResult, check_rule
from drakit.testing.conformance.targets import Setup, Target, parse_target


def conformance_tests(
    target: str | Target,
    *,
    config: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    setup: Setup | None = None,
    unplug: Setup | None = None,
    without: Collection[str] = (),
) -> Callable[[Rule], None]:
    """
    Return a pytest function that tests a driver against the driver contract, with a test for each
    rule::

        test_conformance = conformance_tests(
            "my_pkg:MyDriver",
            config={"directory": "{root}/cameras"},
            setup=plug_in,
            unplug=lambda root: (root / "cameras" / "front").rmdir(),
        )

    :param target: the driver, in the form that ``drakit conformance`` accepts.
    :param config: the configuration of a Python driver, or the entry of a backend
        (``backends.allowed``) or device plugin (``devicePlugins.plugins``). ``{root}`` stands for
        the node's directory.
    :param parameters: opaque parameters for the claims.
    :param setup: a function that takes the node's directory, or a shell command that reads it from
        ``$DRAKIT_ROOT``. It runs before the first start on each node, and after each reboot.
    :param unplug: a function or command like `setup` that removes at least one device while the
        driver is running. At least one other device must remain. Without it, the rule about devices
        that vanish is skipped.
    :param without: the IDs of rules to omit. Give the reason in a comment.
    :raises ValueError: a rule is unknown, or the target is malformed.
    """
    found = rules()
    if unknown := set(without) - {rule.id for rule in found}:
        raise ValueError(f"without: there is no rule {', '.join(sorted(unknown))}")
    if isinstance(target, str):
        tested = parse_target(
            target, config=config, parameters=parameters, setup=setup, unplug=unplug
        )
    elif config is None and parameters is None and setup is None and unplug is None:
        tested = target
    else:
        raise ValueError("a target that is not a string already has its configuration")

    unusable: RuleResult | None = None

    @pytest.mark.parametrize(
        "rule", [pytest.param(rule, id=rule.id) for rule in found if rule.id not in without]
    )
    def test_conformance(rule: Rule) -> None:
        nonlocal unusable
        # Only the first test waits for a driver that does not start.
        if unusable is None:
            result = asyncio.run(check_rule(tested, rule))
            unusable = result if result.unusable else None
        else:
            result = replace(unusable, rule=rule)
        _report(result)

    return test_conformance


def _report(result: RuleResult) -> None:
    match result.outcome:
        case Outcome.PASSED:
            return
        case Outcome.SKIPPED:
            pytest.skip(result.text)
        case Outcome.FAILED | Outcome.BROKEN:
            rule = result.rule
            lines = [f"{rule.id}: {result.text}", f"the rule: {rule.title}", f"why: {rule.why}"]
            pytest.fail("\n\n".join([*lines, result.log]), pytrace=False)
