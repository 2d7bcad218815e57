"""
Limits the work of explaining a pod or template. The work is measured in steps.

Tenants write pods and templates, and some of them cannot be explained in any reasonable time. All
parts of an explanation share one budget. Steps count the operations that take time, such as
comparing slices, trying devices and checking constraints. Therefore, no result depends on the speed
of the machine. Cached results of earlier explanations take no steps.
"""

from __future__ import annotations

MAX_STEPS = 100_000
"""Maximum number of steps of an explanation, in addition to those for the size of the cluster. They
take about 100 ms. The remedies have a separate budget of the same size."""


class BudgetSpentError(Exception):
    """The explanation has used all its steps."""

    def __str__(self) -> str:
        return "the search took too long"


class Budget:
    """The remaining steps of an explanation."""

    __slots__ = ("left",)

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self.left: int = steps

    def spend(self, steps: int = 1) -> None:
        """Take steps from the budget before doing the work. Raises :class:`BudgetSpentError`."""
        self.left -= steps
        if self.left < 0:
            raise BudgetSpentError
