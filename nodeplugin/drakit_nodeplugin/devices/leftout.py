"""
Tells people which devices cannot be published, each reason once.

It must not know why a device cannot be published.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

__all__ = ("LeftOutTeller",)

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 1000
"""Reasons of an endpoint that are not told again. One that makes up more has been heard."""

MAX_AT_ONCE = 100
"""Devices that are told of one change; as many as a check gives reasons for."""


class LeftOutTeller:
    """Tells of one driver's devices."""

    def __init__(
        self, driver: str, on_left_out: Callable[[Mapping[str, str]], None] | None
    ) -> None:
        self._driver = driver
        self._on_left_out = on_left_out
        self._told: dict[str, set[tuple[str, str]]] = {}

    def tell(self, endpoint: str, left_out: Mapping[str, str]) -> None:
        """Tell of an endpoint's devices that were not told of yet, by name with the reason."""
        if not left_out:
            return
        told = self._told.setdefault(endpoint, set())
        new = [item for item in left_out.items() if item not in told]
        new = new[: min(MAX_AT_ONCE, MAX_REMEMBERED - len(told))]
        if not new:
            return
        told.update(new)
        for name, reason in new:
            facts = {"driver": self._driver, "endpoint": endpoint, "device": name, "error": reason}
            logger.error("device is left out", extra=facts)
        if self._on_left_out is not None:
            self._on_left_out(dict(new))

    def forget(self, endpoint: str) -> None:
        """The endpoint is gone."""
        self._told.pop(endpoint, None)
