"""
``drakit-driver``: reads arguments and the environment, and serves a driver class to the node
plugin, or to the kubelet as a device plugin.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from drakit.text import escaped_streams
from drakit_daemon.command_line import DAEMON_EXIT_CODES, ProgramParser, add_logging, refuse

if TYPE_CHECKING:
    from drakit_driver.plugin_devices import DevicePluginOptions


@escaped_streams()
def main() -> None:
    """Serve a driver. Print one sentence for each problem in the arguments or settings."""
    # gRPC reads this variable when it is imported. The daemon never forks, and gRPC's fork handlers
    # cost threads and time.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    arguments = parser().read()

    from drakit.settings import SettingsError, read_file
    from drakit_daemon import event_loop, logs
    from drakit_daemon.tasks import limit_exit
    from drakit_driver.runtime.loading import load_driver
    from drakit_driver.server import DriverServer, Server, ServerNode, serve
    from drakit_driver.sockets import socket_path

    node_name = arguments.node_name or os.environ.get("NODE_NAME")
    if not node_name:
        refuse(["the name of this node is unknown: set --node-name or $NODE_NAME"])
    try:
        file: Path | None = arguments.config
        logs.configure(level=arguments.log_level, form=arguments.log_format)
        node = ServerNode(node_name)
        driver = load_driver(
            arguments.driver,
            {} if file is None else read_file(file),
            node=node,
            where="--driver",
            file="--config" if file is None else str(file),
        )
        if arguments.device_plugin:
            # Import lazily, so that a backend does not load this module.
            from drakit_driver.device_plugin import DevicePluginServer

            options = _device_plugin_options(arguments)

            def make() -> Server:
                return DevicePluginServer(driver, node=node_name, options=options)
        else:
            path = socket_path(file=arguments.socket, directory=arguments.directory)

            def make() -> Server:
                return DriverServer(driver, node, path=path, peers=arguments.peer_uid)

        event_loop.run(serve(make, probe_port=arguments.probe_port))
    except SettingsError as error:
        refuse([error])
    except Exception:
        logging.getLogger(__name__).critical("the server of the driver failed", exc_info=True)
        limit_exit(1)
        sys.exit(1)
    limit_exit(0)


def _device_plugin_options(arguments: argparse.Namespace) -> DevicePluginOptions:
    from drakit.settings import SettingsError
    from drakit_driver.plugin_devices import DevicePluginOptions, resource_of

    try:
        resources = tuple(resource_of(each) for each in arguments.resource)
    except ValueError as error:
        raise SettingsError(f"--resource: {error}") from error
    return DevicePluginOptions(
        resources=resources,
        shares=arguments.shares,
        unprepare_late=arguments.unprepare_late,
        directory=arguments.device_plugins_directory,
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _port(text: str) -> int:
    port = int(text)
    if not 0 < port < 65536:
        raise ValueError(text)
    return port


def _user(text: str) -> int:
    user = int(text)
    if not 0 <= user < 2**32 - 1:
        raise ValueError(text)
    return user


def parser() -> ProgramParser:
    """Return the command line parser."""
    made = ProgramParser(
        prog="drakit-driver",
        description="Serves a Python driver from its own process: to the node plugin as a backend "
        "(--directory or --socket), or to the kubelet as a device plugin (--device-plugin), for "
        "nodes without DRA.",
        epilog=DAEMON_EXIT_CODES,
        examples=(
            "drakit-driver --driver lamps:Lamps --directory /run/drakit --probe-port 8081",
            "drakit-driver --driver lamps:Lamps --device-plugin --resource lamps.example.com/lamp",
        ),
    )
    made.add_argument(
        "--driver",
        required=True,
        metavar="NAME",
        help="driver's class (module:Class), or the name of an entry point of drakit.drivers",
    )
    place = made.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="directory of the driver's entry in backends.allowed, in which to create driver.sock",
    )
    place.add_argument(
        "--device-plugin",
        action="store_true",
        help="serve the driver to the kubelet as a device plugin",
    )
    place.add_argument("--socket", type=Path, metavar="FILE", help="path of the socket")
    made.add_argument(
        "--peer-uid",
        type=_user,
        action="append",
        default=[],
        metavar="UID",
        help="user that can connect to the socket, besides root and the driver's own user; "
        "you can repeat the option",
    )
    made.add_argument(
        "--resource",
        action="append",
        default=[],
        metavar="NAME[:ATTRIBUTE=VALUE]",
        help="with --device-plugin: resource that pods request, such as lamps.example.com/lamp; "
        "with an attribute, only the devices that have the value; you can repeat the option, and "
        "a device belongs to the first resource that matches it",
    )
    made.add_argument(
        "--shares",
        type=_positive,
        metavar="N",
        help="with --device-plugin: maximum number of shares of a device",
    )
    made.add_argument(
        "--unprepare-late",
        action="store_true",
        help="with --device-plugin: unprepare a device only before its next pod gets it, because "
        "the kubelet does not report the end of a pod; without this option, a driver with side "
        "effects is refused",
    )
    made.add_argument(
        "--device-plugins-directory",
        type=Path,
        default=Path("/var/lib/kubelet/device-plugins"),
        metavar="DIR",
        help="with --device-plugin: the kubelet's directory (default: "
        "/var/lib/kubelet/device-plugins)",
    )
    made.add_argument(
        "--probe-port",
        type=_port,
        metavar="PORT",
        help="port of /readyz, /livez and /metrics on all addresses of the pod (default: none)",
    )
    made.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration of the driver (YAML)"
    )
    made.add_argument("--node-name", metavar="NAME", help="name of this node (default: $NODE_NAME)")
    add_logging(made, level="INFO", form="json")
    return made


if __name__ == "__main__":
    main()
