"""
A backend as a program, for faults that only a separate process can have:
``python -m tests.fakes.broken.backend SOCKET [NOTES]``.

It records the prepared claims in the directory NOTES, and fails to unprepare any other claim.
Without the directory, it forgets the prepared claims when it ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.fakes.backend import FakeBackend, device


class Memory:
    """The prepared claims; in files if there is a directory for them."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: set[str] = set()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._known = {path.name for path in folder.iterdir()}

    async def prepare(self, request: Any) -> Any:
        answer = pb.PrepareClaimsResponse()
        for claim in request.claims:
            self._known.add(claim.uid)
            if self._folder is not None:
                (self._folder / claim.uid).touch()
            edits = [pb.Edits(env={"GPU": device.name}) for device in claim.devices]
            attributes = {"lanes": pb.Attribute(int=4)}
            devices = [pb.PreparedDevice(attributes=attributes) for _ in claim.devices]
            answer.claims.add(uid=claim.uid, edits=edits, devices=devices)
        return answer

    async def unprepare(self, request: Any) -> Any:
        answer = pb.UnprepareClaimsResponse()
        for claim in request.claims:
            known = claim.uid in self._known
            answer.claims.add(uid=claim.uid, error="" if known else "nobody knows of the claim")
            self._known.discard(claim.uid)
            if self._folder is not None:
                (self._folder / claim.uid).unlink(missing_ok=True)
        return answer


async def main(socket: str, notes: str | None = None) -> None:
    memory = Memory(Path(notes) if notes else None)
    backend = FakeBackend(Path(socket))
    backend.listed = pb.WatchDevicesResponse(devices=[device("gpu-0"), device("gpu-1")])
    backend.prepare, backend.unprepare = memory.prepare, memory.unprepare

    async def info(_: Any) -> Any:
        return pb.GetInfoResponse(driver_name=backend.driver, metadata_files=True)

    backend.info = info
    async with backend:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
