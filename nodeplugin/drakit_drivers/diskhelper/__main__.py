"""Run the disk helper: ``python -m drakit_drivers.diskhelper SOCKET``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from pathlib import Path

from drakit_drivers.diskhelper.disk import Disks
from drakit_drivers.diskhelper.server import Server, Wipes


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="drakit-diskhelper", description="Open and wipe disks for drakit's driver hostdev."
    )
    parser.add_argument("socket", type=Path, help="path of the unix socket to serve")
    parser.add_argument(
        "--dev-root", type=Path, default=Path("/dev"), help="mount point of the host's /dev"
    )
    parser.add_argument("--sys-root", type=Path, default=Path("/sys"), help="mount point of sysfs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    disks = Disks(dev_root=arguments.dev_root, sys_root=arguments.sys_root)
    server = Server(arguments.socket, Wipes(disks), allowed_uid=os.geteuid())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: server.close())
    logging.info("serving %s", arguments.socket)
    server.run()


if __name__ == "__main__":
    main()
