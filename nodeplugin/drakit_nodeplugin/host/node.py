"""
The node that the plugin runs on: its name, its boot, and its labels as last read.

What labels and boot are used for is others' business.

It must not know drivers, claims or slices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from drakit.kube import ApiError, Session, resource_path
from drakit.resource.raw import child

__all__ = ("PluginNode", "read_boot_id")

logger = logging.getLogger(__name__)

LABELS_SECONDS = 60.0
"""Between two reads of the Node: labels change when people change them."""

RETRY_SECONDS = 5.0


class PluginNode:
    """A :class:`drakit.driver.Node` that is read anew again and again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._labels: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        """``metadata.name``."""
        return self._name

    @property
    def labels(self) -> Mapping[str, str] | None:
        """The labels as last read; None until the API server has answered once."""
        return self._labels

    async def run(self, session: asyncio.Future[Session]) -> None:
        """Read the labels until cancelled."""
        api = await asyncio.shield(session)
        while True:
            delay = LABELS_SECONDS
            try:
                body = await api.get(resource_path("v1", "nodes", name=self._name))
                self._labels = cast("dict[str, str]", dict(child(body, "metadata", "labels")))
            except ApiError as error:
                delay = RETRY_SECONDS
                logger.warning(
                    "labels of the node cannot be read",
                    extra={"node": self._name, "error": str(error)},
                )
            await asyncio.sleep(delay)


def read_boot_id(path: Path) -> str:
    """Read what tells this boot from others; raise OSError or ValueError if there is nothing."""
    boot_id = path.read_text().strip()
    if not boot_id:
        raise ValueError(f"{path} is empty")
    return boot_id
