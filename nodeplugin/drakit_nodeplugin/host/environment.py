"""
What all drivers of a process share.

It must not know any driver.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from drakit.kube import Session
from drakit_nodeplugin.config import NodePluginConfig
from drakit_nodeplugin.file_poller import FilePoller
from drakit_nodeplugin.host.node import PluginNode
from drakit_nodeplugin.kubelet.podresources import PodResources
from drakit_nodeplugin.metrics import Metrics

__all__ = ("Environment",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where and as what the process runs."""

    config: NodePluginConfig
    node: PluginNode
    boot_id: str
    instance_uid: str
    session: asyncio.Future[Session]
    """Done once the API server can be asked; nothing that the kubelet needs waits for it."""

    podresources: PodResources
    """The only client of the kubelet's podresources API, which limits all clients together."""

    metrics: Metrics
    file_poller: FilePoller = field(default_factory=FilePoller)
    """At what is on the kubelet's disk: sockets, locks and checkpoints."""

    cdi_poller: FilePoller = field(default_factory=FilePoller)
    """At the directory of CDI files, which is another disk or none."""
