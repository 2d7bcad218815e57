"""
``drakit-driver``: reads flags and the environment, and serves a driver's class.

It must not know how the class runs, or what is served.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
from pathlib import Path

LEFT_THREADS_SECONDS = 3.0
"""The grace period of threads that still run when everything else has ended."""


def main() -> None:
    """Serve a driver; if its setup is invalid, exit with 2 and one sentence per problem."""
    # grpc reads this at import: we never fork, and its fork handlers cost threads and time.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    arguments = _parser().parse_args()

    from drakit.settings import SettingsError, read_file
    from drakit_daemon import logs
    from drakit_driver.server import ServerNode, serve
    from drakit_driver.sockets import socket_path
    from drakit_nodeplugin.endpoints.python.loading import load_driver

    node_name = arguments.node_name or os.environ.get("NODE_NAME")
    if not node_name:
        sys.exit("the node's name is unknown: set NODE_NAME or --node-name")
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
        path = socket_path(file=arguments.socket, directory=arguments.directory)
        asyncio.run(serve(driver, node, path=path, mode=arguments.socket_mode))
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    except Exception:
        logging.getLogger(__name__).critical("driver's server failed", exc_info=True)
        _limit_exit(1)
        sys.exit(1)
    _limit_exit(0)


def _limit_exit(code: int) -> None:
    """Limit the time that the process takes to exit: Python waits without a limit for the threads
    of executors, and a driver may leave one that does not end."""
    timer = threading.Timer(LEFT_THREADS_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _mode(text: str) -> int:
    mode = int(text, 8)
    if not 0 <= mode <= 0o777:
        raise ValueError(text)
    return mode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drakit-driver",
        description="Serves a Python driver to the node plugin, from a process of its own.",
    )
    parser.add_argument(
        "--driver",
        required=True,
        metavar="NAME",
        help="driver's class (module:Class), or the name of an entry point of drakit.drivers",
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="directory of the driver's entry in backends.allowed, for a socket driver.sock",
    )
    place.add_argument("--socket", type=Path, metavar="FILE", help="the socket itself")
    parser.add_argument(
        "--socket-mode",
        type=_mode,
        default=0o600,
        metavar="MODE",
        help="permissions of the socket in octal; 666 if the user is not root (default: 600)",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration of the driver (YAML)"
    )
    parser.add_argument(
        "--node-name", metavar="NAME", help="name of the Node (default: $NODE_NAME)"
    )
    parser.add_argument(
        "--log-level",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        default="INFO",
        help="lowest level of messages (default: INFO)",
    )
    parser.add_argument(
        "--log-format",
        choices=("json", "text"),
        default="json",
        help="json for one JSON object per line (default), or text",
    )
    return parser


if __name__ == "__main__":
    main()
