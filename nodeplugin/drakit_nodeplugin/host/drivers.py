"""
The drivers that a process hosts: those in its configuration, and those of backends.

The drivers in the configuration start before anything else. If one cannot start, the process ends.
A backend's driver starts when its backend appears. If it cannot start, the plugin reports the
problem and retries. The driver remains hosted, with or without its backend, until it has no devices
or claims. After a restart, it must be hosted immediately, in order to unprepare its claims and
taint its devices. A small record next to its checkpoint serves this purpose.

:mod:`.driver` assembles one hosted driver; :mod:`drakit_nodeplugin.endpoints` finds backends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drakit.driver import Node
from drakit.layout import private_directory, private_file, write_private
from drakit_daemon import tasks
from drakit_driver.runtime.failures import text_of
from drakit_driver.runtime.loading import LoadedDriver, load_driver
from drakit_formats.resource.limits import is_driver_name
from drakit_nodeplugin.config import MAX_BACKENDS, ConfigError, DriverEntry, NodePluginConfig
from drakit_nodeplugin.endpoints.sources import Diagnostic, DriverSource
from drakit_nodeplugin.host.driver import HostedDriver
from drakit_nodeplugin.host.node import Environment, NodeEvents
from drakit_nodeplugin.host.report import remove_former_reports, remove_report
from drakit_nodeplugin.kubelet.sockets import SocketError

if TYPE_CHECKING:
    from drakit_nodeplugin.endpoints.backend.directory import BackendDirectory

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""Delay before another attempt to host a backend's driver."""

IDLE_SECONDS = 60.0
"""How often to check for backend drivers without devices or claims. The check runs more often if
the grace period of stopped drivers is shorter."""

RECORD = "backend.json"
RECORD_VERSION = 1


class HostedDrivers:
    """All hosted drivers."""

    def __init__(self, environment: Environment, *, config_file: Path) -> None:
        """Create the drivers. Raises :class:`ConfigError` if a driver in the configuration cannot
        be created."""
        config = environment.config
        self._environment = environment
        self._data = config.drivers_directory
        self._registrations = config.backends_directory
        self._events = NodeEvents(environment.node.name, environment.session)
        self._sources = _configured(config, environment, file=config_file)
        try:
            self._drivers = [HostedDriver(source, environment) for source in self._sources]
        except SocketError as error:
            raise ConfigError(f"{config_file}: kubeletRoot: {error}") from error
        self._names = frozenset(source.name for source in self._sources)
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._hosting: set[str] = set()
        """The backend drivers that are served, or are about to be."""
        self._known: dict[str, asyncio.Task[HostedDriver | None]] = {}
        """The drivers that an earlier process hosted, and that are still starting in this one."""
        self._wanted: asyncio.Queue[str] = asyncio.Queue()
        self._directory: BackendDirectory | None = None
        if config.backends.enabled:
            # Import lazily, so that a node without backends does not load this module.
            from drakit_nodeplugin.endpoints.backend.directory import BackendDirectory
            from drakit_nodeplugin.endpoints.host_paths import HostDeviceNodes

            self._directory = BackendDirectory(
                config.backends_directory,
                node=environment.node.for_drivers,
                taken=self._taken,
                report=self._report,
                allowed=config.backends.allowed,
                devices=HostDeviceNodes.found(),
            )

    @property
    def served(self) -> Sequence[HostedDriver]:
        """The drivers that are currently served."""
        return tuple(self._drivers)

    async def start(self) -> None:
        """Start all known drivers. Raises :class:`ConfigError` if a driver in the configuration
        cannot start."""
        known: Sequence[str] = ()
        if self._directory is not None:
            known = await asyncio.to_thread(known_drivers, self._data, self._registrations)
        # Do this before any driver is served, because a claim of one driver must not get a number
        # that a claim of another driver holds.
        self._environment.numbers.expect({*self._names, *known})
        # Start the drivers concurrently, so that a slow driver does not delay the others.
        async with asyncio.TaskGroup() as group:
            for driver in self._drivers:
                group.create_task(driver.start())
            for name in known:
                if (refusal := self._taken(name)) is not None:
                    if name not in self._names:
                        self._environment.numbers.give_up(name)
                    self._report(Diagnostic(reason="BackendRefused", note=refusal, source=name))
                    continue
                assert self._directory is not None
                self._hosting.add(name)
                # Don't await the task, because the start must not wait for another process.
                self._known[name] = asyncio.create_task(
                    self._host(name, self._directory), name=name
                )

    def parts(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Return the parts that run until the daemon stops, keyed by name."""
        environment = self._environment
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "reports of former drivers": lambda: remove_former_reports(
                self._data,
                hosted=lambda: self._names | self._hosting,
                node=environment.node.name,
                session=environment.session,
            )
        }
        for driver in self._drivers:
            if driver.name in self._names:
                parts |= driver.parts()
        if (directory := self._directory) is not None:
            parts |= {
                "backends": lambda: directory.run(self._appeared),
                "hosting of backends": lambda: self._run(directory),
                "Events of backends": self._events.run,
            }
        return parts

    async def stop(self) -> None:
        """Stop all drivers. Does not raise."""
        for task in self._known.values():
            task.cancel()
        if self._known:
            await asyncio.wait(self._known.values())
        await asyncio.gather(*(driver.stop() for driver in self._drivers))

    # ------------------------------------------------------------ backends

    def _taken(self, name: str) -> str | None:
        return refusal_of(name, own=self._names, hosted=self._hosting)

    def _appeared(self, name: str) -> None:
        if name not in self._hosting:
            self._wanted.put_nowait(name)

    async def _run(self, directory: BackendDirectory) -> None:
        """Host the backends that appear, until canceled. If one part ends, all parts end, as for
        any driver."""
        async with asyncio.TaskGroup() as group:
            for name in self._known:
                group.create_task(self._serve(name, directory, group))
            group.create_task(self._forget_idle(directory))
            while True:
                name = await self._wanted.get()
                if name in self._hosting:
                    continue
                if self._taken(name) is not None:
                    directory.forget(name)  # the directory will reject the name, with the reason
                    continue
                # add the name now, because it may appear again before it is served
                self._hosting.add(name)
                group.create_task(self._serve(name, directory, group))

    async def _serve(
        self, name: str, directory: BackendDirectory, group: asyncio.TaskGroup
    ) -> None:
        """Host a backend's driver as soon as possible, and run its parts."""
        if (known := self._known.get(name)) is not None:
            driver = await asyncio.shield(known)
            del self._known[name]
        else:
            driver = await self._host(name, directory)
        while driver is None:
            if (socket := directory.socket(name)) is not None:
                directory.lost(socket)  # by now, the backend may report a different name
            await asyncio.sleep(RETRY_SECONDS)
            driver = await self._host(name, directory)
        life = tasks.run(driver.parts())
        self._lives[name] = group.create_task(life, name=name)

    async def _host(self, name: str, directory: BackendDirectory) -> HostedDriver | None:
        """Start a backend's driver. If that is impossible now, report the reason and return
        None."""
        from drakit_nodeplugin.endpoints.backend.connection import BackendSource

        driver: HostedDriver | None = None
        try:
            driver = HostedDriver(BackendSource(name, directory), self._environment)
            await asyncio.to_thread(remember_driver, self._data, name, self._registrations)
            await driver.start()
        except Exception as error:
            # Handle any error: a name that a backend chose must not stop other drivers.
            if not isinstance(error, ConfigError | SocketError | OSError):
                logger.exception("backend's driver cannot be started", extra={"driver": name})
            # Its rows remain unread, but claims of other drivers must not wait for them.
            self._environment.numbers.give_up(name)
            note = f"backend {name} cannot be served: {text_of(error)}"
            self._report(Diagnostic(reason="BackendRefused", note=note, source=name))
            if driver is not None:
                await driver.stop()
            return None
        except BaseException:
            if driver is not None:
                await driver.stop()
            raise
        self._drivers.append(driver)
        logger.info("backend's driver is served", extra={"driver": name})
        return driver

    async def _forget_idle(self, directory: BackendDirectory) -> None:
        """Stop hosting drivers that no longer have a backend, devices or claims."""
        grace = self._environment.config.devices.endpoint_stop_grace_period
        while True:
            await asyncio.sleep(max(min(IDLE_SECONDS, grace), 1.0))
            for driver in self.served:
                name = driver.name
                if name in self._lives and directory.socket(name) is None and await driver.idle():
                    await self._forget(driver, directory)

    async def _forget(self, driver: HostedDriver, directory: BackendDirectory) -> None:
        name = driver.name
        life = self._lives.pop(name)
        life.cancel()
        await asyncio.wait({life})
        await driver.stop_serving()
        # Check again now that no caller can reach the driver, because a claim may have arrived.
        idle = await driver.idle()
        await driver.stop()
        self._drivers.remove(driver)
        self._environment.metrics.forget(name)
        self._hosting.discard(name)
        if not idle:
            self._wanted.put_nowait(name)
            return
        try:
            await asyncio.to_thread(forget_driver, self._data, name, self._registrations)
        except OSError as error:
            logger.error(
                "backend's record cannot be removed", extra={"driver": name, "error": str(error)}
            )
        logger.info("backend's driver is no longer served", extra={"driver": name})
        directory.forget(name)
        if self._environment.session.done():
            node, session = self._environment.node.name, self._environment.session.result()
            await remove_report(session, node=node, driver=name)

    def _report(self, diagnostic: Diagnostic) -> None:
        logger.warning(
            "backend needs attention", extra={"reason": diagnostic.reason, "note": diagnostic.note}
        )
        self._environment.metrics.diagnostics.labels("", diagnostic.reason).inc()
        self._events.emit_diagnostic(diagnostic)


def refusal_of(name: str, *, own: Collection[str], hosted: Collection[str]) -> str | None:
    """Return the reason why a backend cannot use a name, or None. `own` are the drivers in the
    configuration, and `hosted` those of backends."""
    if name in own:
        return f"the node plugin hosts driver {name} itself"
    if name not in hosted and len(hosted) >= MAX_BACKENDS:
        return f"the node plugin already hosts {MAX_BACKENDS} backends, the maximum"
    return None


def _configured(
    config: NodePluginConfig, environment: Environment, *, file: Path
) -> Sequence[DriverSource]:
    """Return the drivers in the configuration."""
    sources: list[DriverSource] = [
        *load_drivers(config.drivers, file=file, node=environment.node.for_drivers)
    ]
    if config.device_plugins.enabled:
        sources.append(_device_plugins(config, environment, file=file))
        name = config.device_plugins.driver_name
        if any(source.name == name for source in sources[:-1]):
            raise ConfigError(
                f"{file}: devicePlugins.driverName: driver {name} is configured twice"
            )
    return sources


def load_drivers(entries: Sequence[DriverEntry], *, file: Path, node: Node) -> list[LoadedDriver]:
    """Load the configured drivers. Raises :class:`ConfigError` with file, key and reason."""
    drivers: list[LoadedDriver] = []
    for index, entry in enumerate(entries):
        key = f"drivers[{index}]"
        where = f"{file}: {key}.driver"
        driver = load_driver(
            entry.driver, entry.config, node=node, where=where, file=str(file), key=f"{key}.config"
        )
        if entry.name not in (None, driver.name):
            raise ConfigError(
                f"{file}: {key}.name: the name of {entry.driver} is {driver.name}, not "
                f"{entry.name}; correct or omit it"
            )
        if any(other.name == driver.name for other in drivers):
            raise ConfigError(f"{where}: driver {driver.name} is configured twice")
        drivers.append(driver)
    return drivers


def _device_plugins(
    config: NodePluginConfig, environment: Environment, *, file: Path
) -> DriverSource:
    # Import lazily, so that a node without device plugins does not load this module.
    from drakit_nodeplugin.endpoints.deviceplugin.plugins import DevicePluginsSource

    return DevicePluginsSource(
        config.device_plugins.driver_name,
        config.device_plugins_directory,
        where=f"{file}: devicePlugins",
        metadata_files=config.device_plugins.metadata_files,
        plugins=config.device_plugins.plugins,
        kubelet_resources=environment.podresources.device_manager,
    )


# ------------------------------------------------------------ records of backends (blocking)


def known_drivers(drivers: Path, registrations: Path) -> list[str]:
    """
    Return the backend drivers that this node has hosted. `drivers` is the parent of their data
    directories.

    Each directory is named after its driver. Two releases of the chart share the parent directory,
    but each hosts only the backends in its own registration directory. Records that refer to
    another registration directory are skipped.
    """
    paths = sorted(drivers.glob(f"*/{RECORD}"))
    return [
        path.parent.name
        for path in paths
        if is_driver_name(path.parent.name) and not _belongs_elsewhere(path, registrations)
    ]


def remember_driver(drivers: Path, name: str, registrations: Path) -> None:
    """Record that a driver must be hosted after a restart. Raises OSError."""
    path = drivers / name / RECORD
    private_directory(path.parent)
    private_file(path)
    if _directory_in(path, default=str(registrations)) == str(registrations):
        return
    record = {"driver": name, "directory": str(registrations), "version": RECORD_VERSION}
    write_private(path, json.dumps(record).encode())


def forget_driver(drivers: Path, name: str, registrations: Path) -> None:
    """Delete the record of a driver, so that it is not hosted after a restart. Raises OSError."""
    path = drivers / name / RECORD
    if not _belongs_elsewhere(path, registrations):
        path.unlink(missing_ok=True)


def _belongs_elsewhere(path: Path, registrations: Path) -> bool:
    """Return whether another release hosts the driver. A record that is unreadable or names no
    registration directory is treated as belonging to this release, because the driver's claims must
    be unprepared."""
    here = str(registrations)
    return _directory_in(path, default=here) not in (None, here)


def _directory_in(path: Path, *, default: str) -> str | None:
    """Return the registration directory in a record, or None if the record is missing or
    unreadable."""
    try:
        return json.loads(path.read_bytes()).get("directory", default)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        logger.error(
            "record of a backend cannot be read",
            extra={"file": str(path), "error": str(error)},
        )
        return None
