"""
How much work the explanation of one pod or template may take, in steps.

Pods and templates are written by tenants, and some of them cannot be explained in any reasonable
time. All parts of an explanation share one budget. They count what costs time: slices that are
compared, devices that are tried, constraints that are checked. So no answer depends on the speed of
the machine. What is kept of earlier explanations takes no steps.

It must not depend on what is counted.
"""

from __future__ import annotations

MAX_STEPS = 100_000
"""Steps of one explanation, apart from the size of the cluster: about 100 ms. The remedies have as
many again."""


class BudgetSpentError(Exception):
    """The explanation has taken all its steps."""

    def __str__(self) -> str:
        return "the search took too long"


class Budget:
    """The steps that are left."""

    __slots__ = ("left",)

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left: int = steps

    def spend(self, steps: int = 1) -> None:
        """Take steps before the work that they stand for; raise :class:`BudgetSpentError`."""
        self.left -= steps
        if self.left < 0:
            raise BudgetSpentError
