"""
The composition root of the node plugin: starts and stops all parts in order.

1. Load the drivers and check their configurations; an invalid configuration aborts the start.
   :mod:`drakit_nodeplugin.host.drivers` hosts them, and the backends that appear later.
2. For each driver: create the sockets (within a second of the start), take the lock, open the
   checkpoint, restore CDI files, and start the driver.
3. Start the API session: slices, labels, claims. Steps 1 and 2 do not wait for it.
4. On SIGTERM: let calls in flight finish, then close the sockets and stop everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drakit.layout import home_directory
from drakit_daemon import tasks
from drakit_daemon.kube import ConfigError as KubeConfigError
from drakit_daemon.kube import Session, connect
from drakit_daemon.metrics import text_of
from drakit_daemon.probes import StatusServers
from drakit_nodeplugin.config import ConfigError, NodePluginConfig
from drakit_nodeplugin.host.driver import HostedDriver, freeze_objects
from drakit_nodeplugin.host.drivers import HostedDrivers
from drakit_nodeplugin.host.maintenance import MaintenanceWatch
from drakit_nodeplugin.host.node import Environment, NodeEvents, PluginNode, read_boot_id
from drakit_nodeplugin.host.restarts import ProcessNote
from drakit_nodeplugin.metrics import Metrics
from drakit_nodeplugin.state.podresources import PodName, PodResources

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The process parameters that are not in the configuration file."""

    config_file: Path
    node_name: str
    instance_uid: str
    """Distinguishes the sockets of the two instances during a rolling update. In a cluster, this is
    the pod UID."""

    pod: PodName | None = None
    """The pod of this process, as the kubelet lists it. None outside of a cluster."""

    kubeconfig: Path | None = None


async def serve(config: NodePluginConfig, launch: Launch) -> None:
    """Run until SIGTERM or SIGINT. Raises :class:`ConfigError` if the setup is invalid."""
    stopping = tasks.stop_signals()
    home = home_directory(config.kubelet_root)
    node = PluginNode(launch.node_name, file=home / "node.json")
    await node.restore()
    try:
        boot_id = read_boot_id(config.boot_id_file)
    except OSError as error:
        why = f"{config.boot_id_file} cannot be read: {error.strerror}"
        raise ConfigError(f"{launch.config_file}: bootIDFile: {why}") from error
    except ValueError as error:
        raise ConfigError(f"{launch.config_file}: bootIDFile: {error}") from error
    session: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
    environment = Environment(
        config=config,
        node=node,
        boot_id=boot_id,
        instance_uid=launch.instance_uid,
        session=session,
        podresources=PodResources(config.podresources, own_pod=launch.pod),
        metrics=Metrics(),
        maintenance=MaintenanceWatch(session, enabled=config.device_maintenance),
    )
    note = ProcessNote(home / "process.json", instance_uid=launch.instance_uid, boot_id=boot_id)
    events = NodeEvents(node.name, session)
    if (reason := await asyncio.to_thread(note.begin)) is not None:
        events.emit(
            reason="NodePluginRestarted",
            action="Restart",
            note=f"the node plugin on this node was restarted: {reason}",
        )
    try:
        await _serve(environment, launch, events=events, stopping=stopping)
    except BaseException as error:
        await asyncio.to_thread(note.end, error)
        raise
    await asyncio.to_thread(note.end, None)


async def _serve(
    environment: Environment, launch: Launch, *, events: NodeEvents, stopping: asyncio.Event
) -> None:
    config, node, session = environment.config, environment.node, environment.session
    drivers = HostedDrivers(environment, config_file=launch.config_file)
    servers = StatusServers(
        listen=config.listen,
        probed=_Probed(drivers),
        metrics=partial(text_of, environment.metrics.registry),
    )
    try:
        await drivers.start()
        try:
            await servers.start()
        except OSError as error:
            raise ConfigError(f"{launch.config_file}: {error}") from error
        freeze_objects()
        logger.info(
            "node plugin is serving",
            extra={"node": node.name, "drivers": [driver.name for driver in drivers.served]},
        )
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "API session": lambda: _connect(session, launch.kubeconfig),
            "node labels": lambda: node.run(session),
            "file poller": environment.file_poller.run,
            "CDI file poller": environment.cdi_poller.run,
            "Events of the process": events.run,
            "devices in maintenance": environment.maintenance.run,
            **drivers.parts(),
        }
        await tasks.run_until(stopping, parts)
    finally:
        logger.info("node plugin is stopping", extra={"node": node.name})
        await drivers.stop()
        await servers.stop()
        if session.done() and not session.cancelled() and session.exception() is None:
            await session.result().close()


class _Probed:
    """All hosted drivers, for probes and metrics."""

    def __init__(self, drivers: HostedDrivers) -> None:
        self._drivers = drivers

    async def liveness_problems(self) -> Sequence[str]:
        drivers = self._drivers.served
        # Check the drivers concurrently, because each check may take up to the probe's time limit.
        problems = await asyncio.gather(*(driver.liveness_problem() for driver in drivers))
        return _named(zip(drivers, problems, strict=True))

    async def readiness_problems(self) -> Sequence[str]:
        return _named((driver, driver.readiness_problem()) for driver in self._drivers.served)

    async def measure(self) -> None:
        for driver in self._drivers.served:
            try:
                await driver.measure()
            except Exception:  # a bug in one driver must not hide the metrics of the others
                logger.exception("driver cannot be measured", extra={"driver": driver.name})


def _named(problems: Iterable[tuple[HostedDriver, str | None]]) -> Sequence[str]:
    return [f"{driver.name}: {problem}" for driver, problem in problems if problem is not None]


async def _connect(session: asyncio.Future[Session], kubeconfig: Path | None) -> None:
    try:
        session.set_result(await connect(kubeconfig, user_agent="drakit-nodeplugin"))
    except KubeConfigError as error:
        raise ConfigError(str(error)) from error
    await asyncio.Event().wait()
