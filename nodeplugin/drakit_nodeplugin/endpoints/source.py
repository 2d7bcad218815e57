"""
A driver that can be hosted, of whatever kind: what is known of it before anything runs.

Three kinds implement it: a Python class (:mod:`drakit_nodeplugin.endpoints.python.loading`), a
backend (:mod:`.backend`), and all device plugins together (:mod:`.deviceplugin`).

It must not know how any kind of endpoint works, claims, slices or the kubelet.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from drakit_nodeplugin.endpoints.endpoint import HostedEndpoint, Surroundings
from drakit_nodeplugin.endpoints.former import FormerEndpoint
from drakit_nodeplugin.endpoints.traits import DriverTraits

__all__ = ("DriverSource",)


class DriverSource(Protocol):
    """Where a hosted driver's devices come from."""

    @property
    def name(self) -> str:
        """The driver's name."""
        ...

    @property
    def where(self) -> str:
        """File and key of its configuration, or what else an error is to name."""
        ...

    @property
    def traits(self) -> DriverTraits:
        """Which calls it needs; known also while it is stopped."""
        ...

    @property
    def expected(self) -> Collection[str]:
        """The endpoints that are expected from the start; others may come."""
        ...

    @property
    def foreign(self) -> bool:
        """Whether its devices come from processes of others: then the node plugin is ready without
        them, as it cannot start them."""
        ...

    def endpoint(self, surroundings: Surroundings) -> HostedEndpoint | FormerEndpoint:
        """Make what is run and called; called once, within the daemon's loop."""
        ...
