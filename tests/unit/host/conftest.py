"""The surroundings of a driver that a test hosts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from drakit_nodeplugin.config import NodePluginConfig
from drakit_nodeplugin.host.maintenance import MaintenanceWatch
from drakit_nodeplugin.host.node import Environment, PluginNode
from drakit_nodeplugin.metrics import Metrics
from drakit_nodeplugin.state.podresources import PodResources


def environment(directory: Path, *, node: str, **fields: Any) -> Environment:
    """The environment of an instance without an API server, with its files below a directory."""
    config = NodePluginConfig.model_validate(
        {
            "drivers": [{"driver": "cameras"}],
            "kubeletRoot": str(directory / "kubelet"),
            "cdiDirectory": str(directory / "cdi"),
        }
    )
    values: dict[str, Any] = {
        "config": config,
        "node": PluginNode(node),
        "boot_id": "boot-1",
        "instance_uid": "uid",
        "session": asyncio.get_running_loop().create_future(),
        "podresources": PodResources(config.podresources, own_pod=None),
        "metrics": Metrics(),
        "maintenance": MaintenanceWatch(asyncio.get_running_loop().create_future(), enabled=False),
    }
    return Environment(**values | fields)
