"""
How a rule ends other than well: it failed, it cannot be shown, or the kit itself could not go on.

It must not know rules.
"""

from __future__ import annotations

__all__ = ("ConformanceError", "RuleFailedError", "RuleSkippedError", "TargetError")


class ConformanceError(Exception):
    """The kit could not do what it was asked for; the text is a sentence that says why.

    While a rule is checked this fails the rule: a driver that does not come back after a reboot has
    not kept what is promised of reboots. Before, it says that the driver could not be tested."""


class RuleFailedError(ConformanceError):
    """The driver does not keep the rule; the text says what was seen instead."""


class RuleSkippedError(Exception):
    """This driver, or what it has here, cannot show the rule; the text says why."""


class TargetError(ConformanceError):
    """What is to be tested was named or configured in a way that cannot be."""
