"""
Descriptors of USB devices, written by hand from the USB 2.0 specification, chapter 9.

A file ``descriptors`` of sysfs has the device descriptor, then each configuration with its
interfaces, their class-specific descriptors and endpoints.
"""

from __future__ import annotations

import struct

ENDPOINT_IN = bytes((7, 5, 0x81, 2, 0x00, 0x02, 0))
ENDPOINT_OUT = bytes((7, 5, 0x02, 2, 0x00, 0x02, 0))
INTERRUPT_IN = bytes((7, 5, 0x83, 3, 0x08, 0x00, 10))


def device(
    *configurations: bytes,
    ids: tuple[int, int] = (0x1D6B, 0x0104),
    kind: tuple[int, int, int] = (0, 0, 0),
    count: int | None = None,
) -> bytes:
    """A device descriptor with its configurations; `count` if it claims another number."""
    number = len(configurations) if count is None else count
    header = struct.pack("<BBHBBBBHHHBBBB", 18, 1, 0x0200, *kind, 64, *ids, 0x0100, 1, 2, 3, number)
    return header + b"".join(configurations)


def configuration(*parts: bytes, value: int = 1) -> bytes:
    body = b"".join(parts)
    numbers = {part[2] for part in parts if part[1:2] == b"\x04"}
    return struct.pack("<BBHBBBBB", 9, 2, 9 + len(body), len(numbers), value, 0, 0x80, 50) + body


def interface(
    number: int,
    kind: int,
    subclass: int = 0,
    protocol: int = 0,
    *endpoints: bytes,
    setting: int = 0,
) -> bytes:
    header = struct.pack(
        "<BBBBBBBBB", 9, 4, number, setting, len(endpoints), kind, subclass, protocol, 0
    )
    return header + b"".join(endpoints)


def hid(number: int, subclass: int = 0, protocol: int = 0) -> bytes:
    """A HID interface, with the HID descriptor that names the length of its report descriptor."""
    descriptor = struct.pack("<BBHBBBH", 9, 0x21, 0x0111, 0, 1, 0x22, 65)
    return interface(number, 3, subclass, protocol, descriptor, INTERRUPT_IN)


FTDI = device(
    configuration(interface(0, 0xFF, 0xFF, 0xFF, ENDPOINT_IN, ENDPOINT_OUT)), ids=(0x0403, 0x6001)
)
FIDO_KEY = device(configuration(hid(0)), ids=(0x1050, 0x0402))
SMART_CARD_READER = device(
    configuration(
        interface(0, 0x0B, 0, 0, bytes((54, 0x21)) + bytes(52), ENDPOINT_IN, ENDPOINT_OUT)
    ),
    ids=(0x076B, 0x3031),
)
UVC_CAMERA = device(
    configuration(
        bytes((8, 0x0B, 0, 2, 0x0E, 3, 0, 4)),  # interface association: video
        interface(0, 0x0E, 1, 0, bytes((13, 0x24, 1)) + bytes(10), INTERRUPT_IN),
        interface(1, 0x0E, 2, 0, bytes((14, 0x24, 1)) + bytes(11)),
        *(interface(1, 0x0E, 2, 0, ENDPOINT_IN, setting=n) for n in range(1, 8)),
    ),
    ids=(0x04F2, 0xB6B6),
    kind=(0xEF, 2, 1),
)
SOUND_CARD = device(
    configuration(
        interface(0, 1, 1, 0, bytes((10, 0x24, 1)) + bytes(7)),
        interface(1, 1, 2, 0),
        interface(1, 1, 2, 0, ENDPOINT_OUT, setting=1),
        hid(2),
    ),
    ids=(0x0D8C, 0x0014),
)
PRINTER = device(configuration(interface(0, 7, 1, 2, ENDPOINT_IN, ENDPOINT_OUT)))
HARMLESS = {
    "ftdi": FTDI,
    "fido-key": FIDO_KEY,
    "smart-card-reader": SMART_CARD_READER,
    "uvc-camera": UVC_CAMERA,
    "sound-card": SOUND_CARD,
    "printer": PRINTER,
}

STICK = device(configuration(interface(0, 8, 6, 0x50, ENDPOINT_IN, ENDPOINT_OUT)))
KEYBOARD = device(configuration(hid(0, 1, 1), hid(1)), ids=(0x046D, 0xC31C))
MOUSE = device(configuration(hid(0, 1, 2)), ids=(0x046D, 0xC077))
YUBIKEY = device(
    configuration(hid(0, 1, 1), hid(1), interface(2, 0x0B, 0, 0)), ids=(0x1050, 0x0407)
)
CDC_IN_SECOND_CONFIGURATION = device(
    configuration(interface(0, 0xFF, 0xFF, 0, ENDPOINT_IN, ENDPOINT_OUT)),
    configuration(
        interface(0, 2, 6, 0, bytes((5, 0x24, 0, 0x10, 0x01)), INTERRUPT_IN),
        interface(1, 0xFF),
        value=2,
    ),
    ids=(0x0BDA, 0x8153),
)
STORAGE_AS_ALTERNATE_SETTING = device(
    configuration(
        interface(0, 0xFF, 0, 0, ENDPOINT_IN),
        interface(1, 0xFF, 0, 0),
        interface(1, 8, 6, 0x62, ENDPOINT_IN, ENDPOINT_OUT, setting=1),
    )
)
MODEM = device(configuration(interface(0, 0xFF), interface(1, 0x0A, 0, 0, ENDPOINT_IN)))
BLUETOOTH = device(
    configuration(interface(0, 0xE0, 1, 1, INTERRUPT_IN)), ids=(0x8087, 0x0029), kind=(0xE0, 1, 1)
)
TETHERED_PHONE = device(configuration(interface(0, 0xEF, 4, 1, INTERRUPT_IN)))
HUB = device(configuration(interface(0, 9, 0, 0, INTERRUPT_IN)), kind=(9, 0, 1))
DANGEROUS = {
    "stick": (STICK, "class 08"),
    "keyboard": (KEYBOARD, "is a keyboard"),
    "mouse": (MOUSE, "is a mouse"),
    "yubikey": (YUBIKEY, "is a keyboard"),
    "cdc-in-second-configuration": (CDC_IN_SECOND_CONFIGURATION, "class 02"),
    "storage-as-alternate-setting": (STORAGE_AS_ALTERNATE_SETTING, "class 08"),
    "modem": (MODEM, "class 0a"),
    "bluetooth": (BLUETOOTH, "class e0"),
    "tethered-phone": (TETHERED_PHONE, "RNDIS"),
    "hub": (HUB, "is a USB hub"),
}
