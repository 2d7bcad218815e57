"""
Recordings of devices in umockdev's text format, played into a :class:`FakeHost`.

A recording has a block of lines for each device: ``P:`` its path in sysfs, ``N:`` its node, ``S:``
a link of udev, ``E:`` a property, ``A:`` an attribute, ``H:`` one in hexadecimal digits, ``L:`` a
link. umockdev itself redirects the calls of a process to such a tree; the driver takes the paths of
its trees from its config, so a directory is enough.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.sysfs import FakeHost

FOLDER = Path(__file__).resolve().parents[1] / "data" / "hostdev"

_BUSES = ("acpi", "hid", "pci", "platform", "usb", "usb-serial")
_OF_THE_KERNEL = (
    "DEVNAME",
    "DEVTYPE",
    "DRIVER",
    "HID_ID",
    "HID_NAME",
    "HID_PHYS",
    "MAJOR",
    "MINOR",
)
"""Properties that the kernel reports in ``uevent``; udev adds all others."""


@dataclass
class Recorded:
    """One device of a recording."""

    path: str
    node: str | None = None
    links: list[str] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)

    @property
    def number(self) -> str:
        return f"{self.properties['MAJOR']}:{self.properties['MINOR']}"

    @property
    def kind(self) -> str:
        return "b" if self.properties["SUBSYSTEM"] == "block" else "c"


def read(name: str) -> Iterator[Recorded]:
    """Read a recording."""
    device: Recorded | None = None
    for line in (FOLDER / f"{name}.umockdev").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        kind, _, text = line.partition(": ")
        key, _, value = text.partition("=")
        if kind == "P":
            if device:
                yield device
            device = Recorded(path=text)
            continue
        assert device, f"{line!r} belongs to no device"
        match kind:
            case "N":
                device.node = text
            case "S":
                device.links.append(text)
            case "E":
                device.properties[key] = value
            case "A":
                device.attributes[key] = value
            case "H":
                device.files[key] = bytes.fromhex(value)
            case "L":
                device.targets[key] = value
            case _:
                raise AssertionError(f"{line!r} is not of umockdev's format")
    if device:
        yield device


def plug(host: FakeHost, *names: str, udev: bool = True, below: str = "") -> None:
    """Plug in the devices of recordings; without `udev`, the host has no udev daemon. `below`: only
    devices with this in their path, and those above them."""
    for name in names:
        for device in read(name):
            if below in f"{device.path}/" or device.path.count("/") < 5:
                _plug(host, device, udev=udev)


def unplug(host: FakeHost, *names: str, below: str = "") -> None:
    """Remove the devices that have a node, with everything that the host shows of them. A link of
    udev then leads to another device that claims it."""
    devices = [
        each for name in names for each in read(name) if each.node and below in f"{each.path}/"
    ]
    for device in devices:
        directory = host.sys / device.path.removeprefix("/")
        _listed(host, device).unlink()
        (host.udev / "data" / f"{device.kind}{device.number}").unlink(missing_ok=True)
        (host.dev / (device.node or "")).unlink()
        for link in (host.dev / link for link in device.links):
            if link.is_symlink() and not link.exists():
                link.unlink()
        shutil.rmtree(directory, ignore_errors=True)  # it may be below another one
    for name in names:
        for device in read(name):
            if device.node and (host.udev / "data" / f"{device.kind}{device.number}").exists():
                _make_links(host, device)


def _make_links(host: FakeHost, device: Recorded) -> None:
    for link in device.links:
        # Among several devices, the link of this fake stays with the first one.
        if not (host.dev / link).is_symlink():
            host.link(link, "../" * link.count("/") + (device.node or ""))


def _listed(host: FakeHost, device: Recorded) -> Path:
    subsystem = device.properties["SUBSYSTEM"]
    is_bus = subsystem in _BUSES
    folder = host.sys / ("bus" if is_bus else "class") / subsystem / ("devices" if is_bus else "")
    return folder / device.path.rpartition("/")[2]


def _plug(host: FakeHost, device: Recorded, *, udev: bool) -> None:
    directory = host.sys / device.path.removeprefix("/")
    directory.mkdir(parents=True, exist_ok=True)
    subsystem = device.properties["SUBSYSTEM"]
    reported = {k: v.removeprefix("/dev/") for k, v in device.properties.items()}
    lines = [f"{key}={reported[key]}\n" for key in _OF_THE_KERNEL if key in reported]
    (directory / "uevent").write_text("".join(lines))
    for name, value in device.attributes.items():
        host.write(directory, **{name.replace("/", "__"): value})
    for name, value in device.files.items():
        (directory / name).write_bytes(value)
    folder = host.sys / ("bus" if subsystem in _BUSES else "class") / subsystem
    _link(directory / "subsystem", folder)
    _link(_listed(host, device), directory)
    for name, target in device.targets.items():
        _link(directory / name, host.sys / target.lstrip("./"))
    if device.node:
        host.node(device.node, device.kind, device.number)
        if udev:
            _make_links(host, device)
            host.udev_entry(
                f"{device.kind}{device.number}",
                *(f"S:{link}" for link in device.links),
                *(f"E:{k}={v}" for k, v in device.properties.items() if k not in _OF_THE_KERNEL),
            )


def _link(link: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(target)
