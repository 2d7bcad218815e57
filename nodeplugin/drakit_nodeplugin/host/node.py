"""
The node on which the plugin runs, and the environment that all drivers in the process share.

This module contains the node name, the labels as last read, the boot ID, and the Events that are
not about claims: rejected devices, damage, dropped fields. :mod:`drakit_nodeplugin.claims.events`
writes the Events of claims.

Does not depend on drivers, claims or slices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson

from drakit.driver import Node
from drakit.layout import write_private
from drakit_daemon.kube import ApiError, Session, resource_path
from drakit_daemon.kube.events import EventRecorder
from drakit_daemon.logs import ProblemLog
from drakit_formats.resource.objects import child, text
from drakit_nodeplugin.changes import FilePoller
from drakit_nodeplugin.config import NodePluginConfig
from drakit_nodeplugin.endpoints.sources import Diagnostic
from drakit_nodeplugin.host.maintenance import MaintenanceWatch
from drakit_nodeplugin.metrics import Metrics
from drakit_nodeplugin.reasons import NodeReason
from drakit_nodeplugin.state.device_numbers import HeldNumbers
from drakit_nodeplugin.state.podresources import PodResources

logger = logging.getLogger(__name__)

LABELS_SECONDS = 60.0
"""Time between two reads of the Node, whose labels rarely change."""

RETRY_SECONDS = 5.0

COPY_VERSION = 1
"""Format version of the stored labels."""

MAX_PENDING_EVENTS = 256
"""Maximum number of Events waiting for the API server. Further Events are only logged."""


class PluginNode:
    """
    A :class:`drakit.driver.Node` whose labels are read periodically.

    A copy is stored on the node, and is used only for drivers (`for_drivers`): a policy with a node
    selector must apply even if the plugin starts without the API server. Decisions about claims
    need current labels.
    """

    def __init__(self, name: str, *, file: Path | None = None) -> None:
        """Create the node. `file` is the path of the stored copy."""
        self.name = name
        """The Node's ``metadata.name``."""
        self._file = file
        self.labels: Mapping[str, str] | None = None
        """The labels as last read. None until the API server has responded once."""
        self._known: Mapping[str, str] | None = None
        self.uid: str | None = None
        """The Node's UID as last read. None until the API server has responded once."""
        self.for_drivers: Node = _DriversNode(self)
        """The node in the form that drivers receive."""

    @property
    def known_labels(self) -> Mapping[str, str] | None:
        """The labels as last read by this process or an earlier one."""
        return self._known if self.labels is None else self.labels

    async def restore(self) -> None:
        """Initialize from the stored copy."""
        if self._file is not None:
            self._known = await asyncio.to_thread(_read_labels, self._file, self.name)

    async def _store_labels(self, labels: Mapping[str, str]) -> None:
        if self._file is None or labels == self._known:
            return
        record = {"version": COPY_VERSION, "name": self.name, "labels": labels}
        try:
            await asyncio.to_thread(write_private, self._file, orjson.dumps(record))
        except OSError as error:
            facts = {"file": str(self._file), "error": str(error)}
            logger.warning("labels of the node cannot be stored", extra=facts)
        else:
            self._known = labels

    async def run(self, session: asyncio.Future[Session]) -> None:
        """Read the labels until canceled."""
        api = await asyncio.shield(session)
        log = ProblemLog(
            logger,
            "labels of the node cannot be read",
            recovered="labels of the node can be read again",
            facts={"node": self.name},
        )
        while True:
            delay = LABELS_SECONDS
            try:
                body = await api.get(resource_path("v1", "nodes", name=self.name))
                labels = cast("dict[str, str]", dict(child(body, "metadata", "labels")))
                self.labels = labels
                self.uid = text(body, "metadata", "uid") or None
                log.report(None)
                await self._store_labels(labels)
            except ApiError as error:
                delay = RETRY_SECONDS
                log.report(str(error))
            await asyncio.sleep(delay)


class _DriversNode:
    def __init__(self, node: PluginNode) -> None:
        self._node = node

    @property
    def name(self) -> str:
        return self._node.name

    @property
    def labels(self) -> Mapping[str, str] | None:
        return self._node.known_labels


def _read_labels(file: Path, node: str) -> Mapping[str, str] | None:
    """Return the labels in the stored copy, or None if it is missing, damaged, or from another
    node."""
    try:
        record: Any = orjson.loads(file.read_bytes())
        if record["version"] == COPY_VERSION and record["name"] == node:
            return {str(key): str(value) for key, value in record["labels"].items()}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        facts = {"file": str(file), "error": str(error)}
        logger.warning("stored labels of the node cannot be read", extra=facts)
    return None


def read_boot_id(path: Path) -> str:
    """Read the ID of the current boot. Raises OSError, or ValueError if the file is empty."""
    boot_id = path.read_text().strip()
    if not boot_id:
        raise ValueError(f"{path} is empty")
    return boot_id


class NodeEvents:
    """Events about the Node. Callers do not wait for the API server."""

    def __init__(self, node: str, session: asyncio.Future[Session]) -> None:
        self._node = node
        self._session = session
        self._pending: asyncio.Queue[tuple[NodeReason, str, str, str]] = asyncio.Queue(
            MAX_PENDING_EVENTS
        )

    def emit(self, *, reason: NodeReason, action: str, note: str, source: str = "") -> None:
        """Enqueue a warning Event. Repeated notes become one Event with a count. Each `source` has
        a separate limit."""
        try:
            self._pending.put_nowait((reason, action, note, source))
        except asyncio.QueueFull:
            logger.warning("Event dropped", extra={"reason": reason, "note": note})

    def emit_diagnostic(self, given: Diagnostic) -> None:
        """Enqueue a warning Event about an endpoint's problem."""
        self.emit(reason=given.reason, action="Connect", note=given.note, source=given.source)

    async def recorder(self) -> EventRecorder:
        """Return a recorder for this plugin once the API server can be reached."""
        return EventRecorder(
            await asyncio.shield(self._session),
            controller="drakit.dev/nodeplugin",
            instance=self._node,
            # The admission policy allows a plugin to write only Events about its own node.
            shared=False,
        )

    async def run(self) -> None:
        """Write Events until canceled."""
        recorder = await self.recorder()
        while True:
            reason, action, note, source = await self._pending.get()
            try:
                await recorder.record(
                    {"apiVersion": "v1", "kind": "Node", "name": self._node},
                    reason=reason,
                    action=action,
                    note=note,
                    source=source,
                )
            except Exception:  # a lost Event must not stop the daemon
                logger.exception("Event could not be written", extra={"reason": reason})


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The objects that all drivers in the process share."""

    config: NodePluginConfig
    node: PluginNode
    boot_id: str
    instance_uid: str
    session: asyncio.Future[Session]
    """Done once the API server can be reached. Drivers start without it. A claim that must be read
    waits for it, until the kubelet's call times out."""

    podresources: PodResources
    """The only client of the kubelet's podresources API, so that one rate limit applies to the
    whole process."""

    metrics: Metrics
    maintenance: MaintenanceWatch
    """The devices in maintenance."""

    numbers: HeldNumbers = field(default_factory=HeldNumbers)
    """The device numbers that claims of all drivers hold."""

    file_poller: FilePoller = field(default_factory=FilePoller)
    """Polls the file system with the kubelet's directories: sockets, locks and checkpoints."""

    cdi_poller: FilePoller = field(default_factory=FilePoller)
    """Polls the CDI directory, which is on another disk or in memory."""
