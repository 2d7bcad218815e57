"""
The devices of slices that a request selects.

Slices of equal hardware have the same outcomes of each selector, so the devices that pass all of
them are found once for each combination of outcomes.

It must not know pods, nodes, or what is allocated.
"""

from __future__ import annotations

from drakit_explain.allocation import Selected
from drakit_explain.model import Request, SliceFacts
from drakit_explain.selectors import Evaluated
from drakit_explain.world import World


class Selection:
    """The devices that one request selects; valid until a DeviceClass changes."""

    def __init__(self, world: World, request: Request, *, without: str = "") -> None:
        """
        :param without: an expression that counts as true.
        """
        self._world = world
        self._request = request
        self._without = without
        self._expressions = [text for _, text in world.expressions(request) if text != without]
        self._known: dict[tuple[int, ...], tuple[list[Evaluated], Selected]] = {}
        """By the number of devices and the identity of the outcomes, which are kept for that."""

    def of(self, of: SliceFacts) -> Selected:
        """
        Return the devices of a slice that pass all selectors.

        Raises :class:`NotEvaluatedError` where a selector has no outcome.
        """
        index = self._world.selectors
        try:
            outcomes = [index.evaluated(each, of) for each in self._expressions]
        except KeyError:  # a selector does not compile, or its error names what is missing
            return self._world.selected(self._request, of, without=self._without)
        key = (len(of.devices), *map(id, outcomes))
        known = self._known.get(key)
        if known is None:
            found = self._world.selected(self._request, of, without=self._without)
            known = self._known[key] = (outcomes, found)
        return known[1]
