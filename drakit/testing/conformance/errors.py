"""
Outcomes other than a pass: a rule fails, does not apply, or the kit itself cannot continue.

It must not know rules.
"""

from __future__ import annotations

__all__ = ("ConformanceError", "RuleFailedError", "RuleSkippedError", "TargetError")


class ConformanceError(Exception):
    """
    The kit cannot go on; the text is a sentence with the reason.

    While a rule is checked this fails the rule: a driver that does not recover from a reboot
    violates the rule about reboots. Before that, the driver could not be tested.
    """


class RuleFailedError(ConformanceError):
    """The driver violates the rule; the text describes what was observed instead."""


class RuleSkippedError(Exception):
    """The rule does not apply to this driver, or its devices here; the text is the reason."""


class TargetError(ConformanceError):
    """The target's name or configuration is malformed."""
