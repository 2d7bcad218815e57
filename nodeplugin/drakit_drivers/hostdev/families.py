"""
Attributes that only devices of one kind have, such as serial ports, cameras, sound cards and GPUs.

The kernel's attributes take precedence over udev's properties, so that a node without a udev daemon
loses as few attributes as possible. A kind has at most three attributes, because the API allows 32
for a device.

It must not know policies, names of published devices, or attributes of all devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from drakit import AttributeValue
from drakit_drivers.hostdev.files import entries, read_attribute

__all__ = ("family_attributes",)

_Facts = Iterator[tuple[str, AttributeValue | None]]

_SOUND_NODES = {
    r"controlC\d+": "control",
    r"pcmC\d+D\d+p": "playback",
    r"pcmC\d+D\d+c": "capture",
    r"midiC\d+D\d+": "midi",
    r"hwC\d+D\d+": "hwdep",
    r"timer|seq": "global",
}

_INPUT_KINDS = ("keyboard", "mouse", "touchscreen", "touchpad", "tablet", "joystick", "switch")
"""Kinds of udev's ``ID_INPUT_*``, the most telling first: every keyboard also counts as keys."""


def family_attributes(
    subsystem: str, family: Sequence[Path], properties: Mapping[str, str]
) -> dict[str, AttributeValue]:
    """
    Return the attributes of the device's kind.

    :param family: the device's directory in sysfs, and those above it, nearest first.
    :param properties: the device's entry in udev's database.
    """
    read = _READERS.get(subsystem)
    facts = read(family, properties) if read else ()
    return {name: value for name, value in facts if value is not None}


def _tty(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    # An adapter with four connectors has four ports; the kernel numbers them.
    ports = (read_attribute(part, "port_number") for part in family[:3])
    yield "ttyPort", _whole(next(filter(None, ports), None))
    # 0 is a port that the kernel offers, but for which no UART answers.
    yield "uartType", _whole(read_attribute(family[0], "type"))


def _video(family: Sequence[Path], properties: Mapping[str, str]) -> _Facts:
    yield "videoName", read_attribute(family[0], "name")
    capabilities = properties.get("ID_V4L_CAPABILITIES")
    if capabilities is not None:
        kinds = capabilities.split(":")
        yield "videoCapture", "capture" in kinds
        yield "videoOutput", "video_output" in kinds


def _sound(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    name = family[0].name
    yield "soundNode", next((k for p, k in _SOUND_NODES.items() if re.fullmatch(p, name)), None)
    card = next((part for part in family if re.fullmatch(r"card\d+", part.name)), None)
    if card:
        yield "soundCardID", read_attribute(card, "id")
        streams = (re.match(r"pcmC\d+D(\d+)", entry.name) for entry in entries(card))
        yield "soundPcmCount", len({match[1] for match in streams if match})


def _input(family: Sequence[Path], properties: Mapping[str, str]) -> _Facts:
    parent = next((part for part in family if re.fullmatch(r"input\d+", part.name)), None)
    yield "inputName", read_attribute(parent, "name") if parent else None
    kinds = (kind for kind in _INPUT_KINDS if properties.get(f"ID_INPUT_{kind.upper()}") == "1")
    yield "inputKind", next(kinds, None)


def _hidraw(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    for part in family[1:]:
        match = re.search(r"^HID_NAME=(.+)$", read_attribute(part, "uevent") or "", re.MULTILINE)
        if match:
            yield "hidName", match[1].strip()
            return


def _drm(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    device = family[0]
    kinds = {"card": "primary", "renderD": "render"}
    kind = kinds.get(device.name.rstrip("0123456789"))
    yield "drmNode", kind
    if kind == "primary":
        outputs = [read_attribute(entry, "status") for entry in entries(device)]
        yield "drmConnected", outputs.count("connected")


def _net(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    # An RDMA device or a modem: its own node, beside the network interface of the same hardware.
    for part in family[1:]:
        interfaces = entries(part / "net")
        if interfaces:
            yield "netInterface", interfaces[0].name
            yield "netAddress", read_attribute(interfaces[0], "address")
            return


def _tpm(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    directory = family[0]
    # The node of the resource manager (tpmrm0) has no specific attributes.
    chip = directory.parent.parent / "tpm" / directory.name.replace("rm", "")
    for place in (directory, chip):
        version = _whole(read_attribute(place, "tpm_version_major"))
        if version is not None:
            yield "tpmVersion", version
            return


_READERS: Mapping[str, Callable[[Sequence[Path], Mapping[str, str]], _Facts]] = {
    "tty": _tty,
    "video4linux": _video,
    "sound": _sound,
    "input": _input,
    "hidraw": _hidraw,
    "drm": _drm,
    "infiniband_mad": _net,
    "infiniband_verbs": _net,
    "usbmisc": _net,
    "wwan": _net,
    "tpm": _tpm,
    "tpmrm": _tpm,
}


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
