"""
A backend's driver as something that can be hosted.

It must not know how a backend is called, or what hosting is.
"""

from __future__ import annotations

from collections.abc import Collection

from drakit_nodeplugin.endpoints.backend.directory import BackendDirectory
from drakit_nodeplugin.endpoints.backend.endpoint import BackendEndpoint
from drakit_nodeplugin.endpoints.endpoint import Surroundings
from drakit_nodeplugin.endpoints.former import FormerEndpoint
from drakit_nodeplugin.endpoints.traits import DriverTraits, Granularity

__all__ = ("BackendSource",)

TRAITS = DriverTraits(
    side_effects=True,
    checks=True,
    health=True,
    prepare_granularity=Granularity.BATCH,
    unprepare_granularity=Granularity.BATCH,
)
"""Of all backends, as they must be known while one is away as well. What a backend does not need
costs it a call that it does not implement, once for each connection."""


class BackendSource:
    """The driver of a backend: a :class:`.DriverSource`."""

    foreign = True

    def __init__(self, driver: str, directory: BackendDirectory) -> None:
        """`directory` is where its backend is looked for."""
        self._driver = driver
        self._directory = directory

    @property
    def name(self) -> str:
        """The driver's name."""
        return self._driver

    @property
    def where(self) -> str:
        """What errors name."""
        return f"backend {self._driver}"

    @property
    def traits(self) -> DriverTraits:
        """Which calls it needs."""
        return TRAITS

    @property
    def expected(self) -> Collection[str]:
        """Its endpoint, which is named after it."""
        return (self._driver,)

    def endpoint(self, surroundings: Surroundings) -> FormerEndpoint:
        """Make what is run and called."""
        return BackendEndpoint(
            self._driver, traits=TRAITS, directory=self._directory, surroundings=surroundings
        )
