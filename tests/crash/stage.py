"""
One run: a node, an API server, a plugin that may be killed, and a kubelet that calls it.

It must not depend on the scenario, or on the expected state.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import grpc

from drakit_nodeplugin.kubelet.sockets import socket_paths
from tests.crash import node as nodes
from tests.crash.forkserver import ForkServer, Process
from tests.crash.node import Claims, Node
from tests.fakes.claims import claim_body
from tests.fakes.kube import FakeApiServer
from tests.fakes.kubelet import FakeKubelet, reference
from tests.fakes.podresources import OWN_POD_ENVIRONMENT, FakePodResources

Operation = Literal["prepare", "unprepare"]

PODS = ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002")
"""UIDs of the plugin's own pod: of a restarted container, and of a new pod in its place."""

MEMORY = Path("/dev/shm")

START_SECONDS = 15.0
SETTLED_SECONDS = 0.5
"""The time without a write after which a start has settled."""

CALL_SECONDS = 20.0
RETRY_SECONDS = 0.05
"""Pause between two calls. The kubelet waits longer, but no test depends on it."""


class PluginDiedError(Exception):
    """The process has ended before it answered."""


class Stage:
    """The environment of a scenario. It calls one plugin at a time; a spare plugin may run at the
    same time."""

    def __init__(self, node: Node, api: FakeApiServer, server: ForkServer, folder: Path) -> None:
        self.node, self._api, self._server, self._folder = node, api, server, folder
        self.log, self._labels = folder / "log", folder / "labels"
        self._armed = folder / "armed"
        self._process: Process | None = None
        self._spare: tuple[Process, str] | None = None
        self._log_start = 0
        """The size of the log before the latest start."""
        self._pod = PODS[0]
        self._kubelet: FakeKubelet | None = None
        self._podresources: FakePodResources | None = None
        self._dra: Path | None = None
        self._kubeconfig = api.write_kubeconfig(folder)
        api.store(f"/api/v1/nodes/{nodes.NAME}", {"metadata": {"uid": "node-uid"}})

    # ------------------------------------------------------------ the process

    async def start(
        self, *, pod: str, kill_at: str | None = None, armed: bool = False, keeps: bool = False
    ) -> None:
        """Fork a plugin; `connect` waits until it serves. One that `keeps` its driver does not
        notice that another instance asks for it."""
        self._armed.write_bytes(b"\0")
        self.arm(armed)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._process = await self._fork(pod, armed=self._armed, kill_at=kill_at, keeps=keeps)
        self._pod, self._kubelet = pod, FakeKubelet(self.node.root)

    async def start_spare(self, *, pod: str) -> None:
        """Fork a second plugin, whose steps do not count, and wait until it serves. It asks for the
        driver, and is called after the first one is killed."""
        armed = self._folder / "never"
        armed.write_bytes(b"\0")
        process = await self._fork(pod, armed=armed, kill_at=None)
        self._spare = (process, pod)
        async with asyncio.timeout(START_SECONDS):
            while not await asyncio.to_thread(_accepts, self._socket(pod)):
                await asyncio.sleep(0.005)
        # It asks for the driver once it is registered.
        async with FakeKubelet(self.node.root) as kubelet:
            await kubelet.get_info(self._socket(pod))
            await kubelet.notify(self._socket(pod))

    def _socket(self, pod: str) -> Path:
        root, name = self.node.root, self.node.driver.name
        return socket_paths(name, kubelet_root=root, instance_uid=pod).registration

    async def active(self) -> None:
        """Wait until the plugin that was started last has its driver, and has opened its
        checkpoint; raise :class:`PluginDiedError`."""
        await self._logged("this instance is active")

    async def handed_over(self) -> None:
        """Wait until the first plugin has handed over; raise :class:`PluginDiedError`."""
        await self._logged("driver handed over")

    async def _logged(self, text: str) -> None:
        async with asyncio.timeout(START_SECONDS):
            while text.encode() not in self.log.read_bytes()[self._log_start :]:
                self.died()
                await asyncio.sleep(0.005)

    async def _fork(
        self, pod: str, *, armed: Path, kill_at: str | None, keeps: bool = False
    ) -> Process:
        arguments = ["--config", str(self.node.config), "--node-name", nodes.NAME]
        arguments += ["--kubeconfig", str(self._kubeconfig)]
        options = {"root": self.node.root, "labels": self._labels, "armed": armed}
        return await self._server.start(
            *arguments,
            environment={"POD_UID": pod, **OWN_POD_ENVIRONMENT},
            options=options | {"kill_at": kill_at, "keeps": "yes" if keeps else None},
            log=self.log,
        )

    def arm(self, on: bool = True) -> None:
        """Start or stop counting steps."""
        with self._armed.open("r+b") as file:
            file.write(b"\1" if on else b"\0")

    async def settle(self) -> None:
        """Wait until the start has finished writing to the checkpoint. Otherwise, one of its
        transactions would be the first step."""
        log = self.node.checkpoint.with_name(f"{self.node.checkpoint.name}-wal")
        seen: tuple[int, int] | None = None
        async with asyncio.timeout(START_SECONDS):
            while True:
                found = log.stat() if log.exists() else None
                now = None if found is None else (found.st_mtime_ns, found.st_size)
                if now is not None and now == seen:
                    return
                seen = now
                await asyncio.sleep(SETTLED_SECONDS)

    def step_labels(self) -> list[str]:
        """Return the labels of the counted steps."""
        return self._labels.read_text().splitlines() if self._labels.exists() else []

    async def connect(self) -> None:
        """Register the driver as the kubelet does; raise :class:`PluginDiedError`."""
        kubelet = self._kubelet
        assert kubelet is not None
        async with asyncio.timeout(START_SECONDS):
            path = self._socket(self._pod)
            while not await asyncio.to_thread(_accepts, path):
                self.died()
                await asyncio.sleep(0.005)
            try:
                self._dra = Path((await kubelet.get_info(path)).endpoint)
                await kubelet.notify(path)
            except grpc.aio.AioRpcError as error:
                await self._explain(error)

    def died(self) -> None:
        """Raise :class:`PluginDiedError` if the process has ended."""
        assert self._process is not None
        if self._process.status.done():
            said = re.findall(r"^.*\w.*$", self.log.read_text(), re.MULTILINE)
            status = self._process.status.result()
            raise PluginDiedError(f"the plugin ended with status {status}: {said[-1:]}")

    async def _explain(self, error: Exception) -> None:
        """Handle a failed call. If the process ended, its report may arrive a moment later."""
        assert self._process is not None
        await self._process.ended(timeout_seconds=2)
        self.died()
        raise error

    async def killed(self, *, timeout_seconds: float) -> bool:
        """Return whether the process kills itself within that time."""
        assert self._process is not None
        return await self._process.ended(timeout_seconds=timeout_seconds) == -9

    async def kill(self) -> None:
        """Kill the plugin, and close the kubelet's connections; continue with the spare one."""
        if self._process is not None:
            self._process.kill()
            await self._process.ended(timeout_seconds=10)
        if self._kubelet is not None:
            await self._kubelet.__aexit__()
        self._process = self._kubelet = self._dra = None
        if self._spare is not None:
            (self._process, self._pod), self._spare = self._spare, None
            self._kubelet = FakeKubelet(self.node.root)

    async def close(self) -> None:
        """Stop all processes."""
        await self.kill()
        await self.kill()  # the spare plugin
        if self._podresources is not None:
            await self._podresources.__aexit__()

    # ------------------------------------------------------------ the kubelet

    async def list_claims(self, claims: Claims) -> None:
        """Serve the kubelet's podresources, with containers that use these claims."""
        self._podresources = FakePodResources(self.node.root / "pod-resources" / "kubelet.sock")
        for uid, devices in claims.items():
            driver, name = self.node.driver.name, reference(uid).name
            self._podresources.add(name, *devices, uid=uid, driver=driver, pool=nodes.NAME)
        await self._podresources.__aenter__()

    def allocate(self, claims: Claims) -> None:
        """Add these claims to the API server, allocated on this node."""
        for uid, devices in claims.items():
            results = [{"device": name, "driver": self.node.driver.name} for name in devices]
            body = claim_body(uid, *results, node=nodes.NAME)
            path = "/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims"
            self._api.store(f"{path}/{body['metadata']['name']}", body)

    async def call(self, operation: Operation, uids: Iterable[str]) -> Mapping[str, str]:
        """Make one call, and return the errors of its claims by UID; '' for a claim without an
        error."""
        if self._dra is None:
            await self.connect()
        assert self._kubelet is not None
        assert self._dra is not None
        claims = [reference(uid) for uid in uids]
        try:
            if operation == "unprepare":
                return await self._kubelet.unprepare(
                    self._dra, *claims, timeout_seconds=CALL_SECONDS
                )
            answers = await self._kubelet.prepare(self._dra, *claims, timeout_seconds=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            await self._explain(error)
            raise
        self.answers = {uid: _devices(answer) for uid, answer in answers.items()}
        return {uid: answer.error for uid, answer in answers.items()}

    async def call_until_done(
        self, operation: Operation, uids: Iterable[str], *, timeout_seconds: float = 10
    ) -> None:
        """Call again until no claim has an error; raise TimeoutError with the last ones."""
        uids = list(uids)
        until = asyncio.get_running_loop().time() + timeout_seconds
        while errors := {u: e for u, e in (await self.call(operation, uids)).items() if e}:
            if asyncio.get_running_loop().time() > until:
                raise TimeoutError(f"the kubelet's {operation} does not succeed: {errors}")
            await asyncio.sleep(RETRY_SECONDS)


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def _devices(answer: Any) -> list[tuple[str, list[str]]]:
    return [(device.device_name, list(device.cdi_device_ids)) for device in answer.devices]


@contextlib.asynccontextmanager
async def new_stage(server: ForkServer, node: Node) -> AsyncIterator[Stage]:
    """Return a stage on a copy of a node, which is removed at the end."""
    folder = new_folder()
    try:
        copy = node.copy_to(folder / "n")
        async with FakeApiServer() as api:
            stage = Stage(copy, api, server, folder)
            try:
                yield stage
            finally:
                await stage.close()
    finally:
        shutil.rmtree(folder)


def new_folder() -> Path:
    # Paths of unix sockets have at most 107 bytes. In memory, because what a process has written
    # outlives its kill wherever it is.
    return Path(tempfile.mkdtemp(prefix="drakit-", dir=MEMORY if MEMORY.is_dir() else "/tmp"))
