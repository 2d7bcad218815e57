"""
``python -m drakit.testing.conformance.relay FROM TO``: a socket that leads to another one.

For a backend that runs already: links in its directory are no sockets, and a socket
cannot be moved. It must not know what goes through it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

CHUNK_BYTES = 65_536


async def relay(source: Path, target: Path) -> None:
    """Listen at `source`, and pass on whatever comes to `target`, and back, until canceled."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_unix_connection(target)
        except OSError as error:
            sys.stderr.write(f"{target} cannot be reached: {error}\n")
            writer.close()
            return
        # Whichever side ends takes the other one with it.
        ways = [
            asyncio.create_task(_pass_on(reader, back)),
            asyncio.create_task(_pass_on(there, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (back, writer):
            end.close()

    source.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(connected, source)
    async with server:
        await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    except ConnectionError:
        return


if __name__ == "__main__":
    asyncio.run(relay(Path(sys.argv[1]), Path(sys.argv[2])))
