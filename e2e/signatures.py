"""
Disks with the real bytes of signatures, and the properties that udev's blkid derives from them.

The bytes are the minimum that libblkid 2.38 recognizes. `blkid` is this machine's own.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ("BLANK", "BLUESTORE", "EXT2", "PARTITIONED", "SWAP", "ZFS", "Content", "blkid")

_ZFS_MIN_BYTES = 64 << 20
_UBERBLOCK_MAGIC = 0x00BAB10C


@dataclass(frozen=True, kw_only=True)
class Content:
    """Bytes at offsets of an otherwise empty disk, and blkid's answer."""

    name: str
    parts: Mapping[int, bytes]
    size: int = 1 << 20
    properties: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Write the disk as a sparse file."""
        with path.open("wb") as file:
            file.truncate(self.size)
            for offset, data in self.parts.items():
                file.seek(offset)
                file.write(data)


def blkid(path: Path) -> Sequence[str]:
    """Return the properties that blkid finds by probing, as lines of udev's database."""
    done = subprocess.run(
        ["blkid", "-p", "-o", "udev", str(path)],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    if done.returncode not in (0, 2):  # 2: nothing was found
        raise OSError(f"blkid failed for {path}: {done.stderr}")
    return [f"E:{line}" for line in done.stdout.split("\n") if line]


BLANK = Content(name="blank", parts={}, properties={})

ZFS = Content(
    name="zfs",
    # Four uberblocks of the first label; blkid ignores the rest of a label.
    parts={(128 + i) << 10: struct.pack("<QQQ", _UBERBLOCK_MAGIC, 5000, 1 + i) for i in range(4)},
    size=_ZFS_MIN_BYTES,
    properties={"ID_FS_TYPE": "zfs_member", "ID_FS_USAGE": "filesystem", "ID_FS_VERSION": "5000"},
)

BLUESTORE = Content(
    name="bluestore",
    parts={0: b"bluestore block device\n7bfde4c0-9b5c-4c1e-9d0f-0f1a2b3c4d5e\n"},
    properties={"ID_FS_TYPE": "ceph_bluestore", "ID_FS_USAGE": "other"},
)

EXT2 = Content(
    name="ext2",
    parts={
        1024: struct.pack("<7I", 128, 1024, 51, 900, 117, 1, 0),
        1024 + 56: struct.pack("<HH", 0xEF53, 1),
        1024 + 76: struct.pack("<I", 1),
    },
    properties={"ID_FS_TYPE": "ext2", "ID_FS_USAGE": "filesystem"},
)

SWAP = Content(
    name="swap",
    parts={1024: struct.pack("<II", 1, 255), 4086: b"SWAPSPACE2"},
    properties={"ID_FS_TYPE": "swap", "ID_FS_USAGE": "other"},
)

PARTITIONED = Content(
    name="partitioned",
    parts={
        440: b"\x01\x02\x03\x04",
        446: struct.pack("<B3sB3sII", 0, b"\0\2\0", 0x83, b"\0\0\0", 64, 512),
        510: b"\x55\xaa",
    },
    properties={"ID_PART_TABLE_TYPE": "dos", "ID_PART_TABLE_UUID": "04030201"},
)
