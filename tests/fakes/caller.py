"""A way to a driver without a thread: it is called in the test's own loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from drakit_nodeplugin.endpoints.calls import AnyDriver
from drakit_nodeplugin.endpoints.endpoint import WorkKey
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError


class DirectCaller:
    """Calls a driver, and keeps what was called and with which devices."""

    def __init__(self, driver: AnyDriver) -> None:
        self.driver = driver
        self.calls: list[tuple[str, set[WorkKey]]] = []
        self.stopped: EndpointStoppedError | None = None
        self.failure: Exception | None = None
        """Raised instead of calling, as the bridge may."""
        self.busy_keys: set[WorkKey] = set()

    def away(self) -> EndpointStoppedError | None:
        return self.stopped

    def busy(self, keys: Collection[WorkKey]) -> bool:
        return not self.busy_keys.isdisjoint(keys)

    async def call(
        self,
        function: Callable[[AnyDriver], Any],
        *,
        what: str,
        keys: Collection[WorkKey],
        timeout_seconds: float,
    ) -> Any:
        self.calls.append((what, set(keys)))
        if self.failure is not None:
            raise self.failure
        value = function(self.driver)
        return await value if inspect.isawaitable(value) else value
