"""Sensors of examples/sensor: pseudo-terminals that write a reading repeatedly."""

from __future__ import annotations

import os
import pty
import threading
from pathlib import Path

__all__ = ("Terminal", "plug_sensors")


class Terminal:
    """A pseudo-terminal that writes a reading, again and again."""

    def __init__(self) -> None:
        self.end, self._other = pty.openpty()
        # As long as an end is open, the kernel gives the number to no other one.
        self.path = os.ttyname(self._other)
        self._silent = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        os.set_blocking(self.end, False)
        self._thread.start()

    def _write(self) -> None:
        while not self._silent.wait(0.05):
            try:
                os.write(self.end, b"21.5\n")
            except BlockingIOError:
                continue  # nobody reads, and the kernel's buffer is full

    def fall_silent(self) -> None:
        self._silent.set()
        self._thread.join()

    def close(self) -> None:
        self.fall_silent()
        os.close(self._other)
        os.close(self.end)


_plugged: list[Terminal] = []
"""Open until this process ends: the nodes of the conformance kit have no end of their own."""


def plug_sensors(root: Path) -> None:
    """Plug four sensors into a node of the conformance kit. They are still there after a reboot."""
    links = root / "by-id"
    links.mkdir(exist_ok=True)
    (root / "run" / "sensors").mkdir(parents=True, exist_ok=True)
    for name in ("Air_A1", "Air_A2", "Soil_S1", "Soil_S2"):
        link = links / f"usb-Acme_{name}-if00"
        if not link.is_symlink():
            _plugged.append(Terminal())
            link.symlink_to(_plugged[-1].path)
