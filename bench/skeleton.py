"""
The minimum that a node plugin in Python must do for a claim: `python -m bench.skeleton`.

Time budgets are multiples of its time in the same run, because milliseconds depend on the machine.
A prepare is a call over a Unix socket, a GET of each claim, a transaction before and after the
driver's work, a hop to the driver's loop, and a CDI file for each claim. An unprepare is the same
without the GET, and with the files removed.

Does not depend on drakit, except for the generated messages.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import signal
import sqlite3
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import orjson
import yaml

from drakit_proto.kubelet.dra.v1 import dra_pb2, dra_pb2_grpc
from drakit_proto.kubelet.pluginregistration.v1 import registration_pb2, registration_pb2_grpc

NAME = "skeleton.bench.drakit.dev"

_WRITE = "INSERT OR REPLACE INTO claims VALUES (?, ?, ?)"
_DELETE = "DELETE FROM claims WHERE uid = ?"


class Skeleton(dra_pb2_grpc.DRAPluginServicer, registration_pb2_grpc.RegistrationServicer):
    """Serves one socket."""

    def __init__(
        self, http: aiohttp.ClientSession, database: sqlite3.Connection, *, root: Path, cdi: Path
    ) -> None:
        self.socket: Path = root / "plugins_registry" / f"{NAME}.sock"
        self._http = http
        self._cdi = cdi
        self._database = database
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._driver_loop = asyncio.new_event_loop()
        threading.Thread(target=self._driver_loop.run_forever, daemon=True).start()

    async def GetInfo(self, request: Any, context: Any):
        return registration_pb2.PluginInfo(
            type="DRAPlugin",
            name=NAME,
            endpoint=str(self.socket),
            supported_versions=["v1.DRAPlugin"],
        )

    async def NotifyRegistrationStatus(self, request: Any, context: Any):
        return registration_pb2.RegistrationStatusResponse()

    async def NodePrepareResources(self, request: Any, context: Any):
        bodies = await asyncio.gather(*map(self._get, request.claims))
        allocations = [(body["metadata"]["uid"], _text(body["status"])) for body in bodies]
        await self._commit(_WRITE, [(uid, "preparing", text) for uid, text in allocations])
        await self._hop()
        response = dra_pb2.NodePrepareResourcesResponse()
        for body in bodies:
            (result,) = body["status"]["allocation"]["devices"]["results"]
            uid, device = body["metadata"]["uid"], result["device"]
            self._write_file(uid, device)
            response.claims[uid].devices.add(
                request_names=[result["request"]],
                pool_name=result["pool"],
                device_name=device,
                cdi_device_ids=[f"{NAME}/claim={uid}"],
            )
        await self._commit(_WRITE, [(uid, "prepared", text) for uid, text in allocations])
        return response

    async def NodeUnprepareResources(self, request: Any, context: Any):
        uids = [claim.uid for claim in request.claims]
        await self._commit(_WRITE, [(uid, "unpreparing", "") for uid in uids])
        await self._hop()
        for uid in uids:
            (self._cdi / f"{uid}.json").unlink()
        await self._commit(_DELETE, [(uid,) for uid in uids])
        response = dra_pb2.NodeUnprepareResourcesResponse()
        for uid in uids:
            response.claims[uid].SetInParent()
        return response

    async def _get(self, claim: Any) -> Any:
        path = f"/apis/resource.k8s.io/v1/namespaces/{claim.namespace}/resourceclaims/{claim.name}"
        async with self._http.get(path) as response:
            response.raise_for_status()
            return orjson.loads(await response.read())

    async def _commit(self, statement: str, rows: Iterable[tuple[str, ...]]) -> None:
        def write() -> None:
            with self._database:
                self._database.executemany(statement, rows)

        await asyncio.get_running_loop().run_in_executor(self._writer, write)

    async def _hop(self) -> None:
        work = asyncio.sleep(0)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._driver_loop))

    def _write_file(self, uid: str, device: str) -> None:
        edits = {"env": [f"DEVICE={device}"], "deviceNodes": [{"path": f"/dev/{device}"}]}
        spec = {"cdiVersion": "0.6.0", "kind": NAME, "devices": [{"name": uid, **edits}]}
        temporary = self._cdi / f".{uid}"
        temporary.write_bytes(orjson.dumps(spec))
        temporary.rename(self._cdi / f"{uid}.json")


def _text(body: Any) -> str:
    return orjson.dumps(body).decode()


def _connect(kubeconfig: Path) -> aiohttp.ClientSession:
    """Return a session with the client certificate of a kubeconfig that needs no other file."""
    config = yaml.safe_load(kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    authority, certificate, key = (
        base64.b64decode(data)
        for data in (
            cluster["certificate-authority-data"],
            user["client-certificate-data"],
            user["client-key-data"],
        )
    )
    context = ssl.create_default_context(cadata=authority.decode())
    with tempfile.NamedTemporaryFile() as pair:
        pair.write(certificate + key)
        pair.flush()
        context.load_cert_chain(pair.name)
    connector = aiohttp.TCPConnector(ssl=context, limit=16)
    return aiohttp.ClientSession(cluster["server"], connector=connector)


async def _serve(kubeconfig: Path, root: Path, cdi: Path) -> None:
    database = sqlite3.connect(root / "skeleton.db", check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE claims (uid TEXT PRIMARY KEY, state TEXT, allocation TEXT)")
    with closing(database):
        async with _connect(kubeconfig) as http:
            skeleton = Skeleton(http, database, root=root, cdi=cdi)
            server = grpc.aio.server()
            dra_pb2_grpc.add_DRAPluginServicer_to_server(skeleton, server)
            registration_pb2_grpc.add_RegistrationServicer_to_server(skeleton, server)
            server.add_insecure_port(f"unix:{skeleton.socket}")
            await server.start()
            gc.collect()
            gc.freeze()
            stopping = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
            await stopping.wait()
            await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_serve(*map(Path, sys.argv[1:])))
