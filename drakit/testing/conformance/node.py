"""
A node: the kubelet directories, the node plugin process, the target's own process, and the
kubelet's podresources socket.

The module starts and stops the processes, and waits until the driver can be used. If that takes too
long, it reads the reason from the log. The node plugin reads the claims in use from the
podresources socket, and relies only on lists that contain its own pod.

Does not depend on rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import yaml

from drakit.testing.conformance.facts import ClaimUnderTest, ConformanceError, PrepareResult
from drakit.testing.conformance.programs import (
    Program,
    python_environment,
    python_path,
    run_command,
)
from drakit.testing.conformance.targets import Setup, Target
from drakit.testing.kubelet import FakeKubelet
from drakit_proto.kubelet.podresources.v1 import podresources_pb2 as pb
from drakit_proto.kubelet.podresources.v1 import podresources_pb2_grpc as pb_grpc

OWN_POD: Mapping[str, str] = {"POD_NAMESPACE": "drakit-system", "POD_NAME": "drakit-nodeplugin-kit"}
"""The node plugin's own pod, from its environment."""

START_SECONDS = 30.0
"""Maximum time until a driver is registered and its devices can be used."""

HOPELESS_SECONDS = 5.0
"""How long to keep waiting for a driver that is rejected, or whose devices are all rejected. The
next attempt may succeed."""

HOPELESS_ENDS = 3
"""Number of times that the target's program can exit before the kit gives up on it."""

SETUP_SECONDS = 60.0
"""The time limit for a target's setup."""

POLL_SECONDS = 0.05
"""The interval between two polls."""

COMPLETE_SECONDS = 5.0
"""How long to wait for all earlier devices after a restart, once one of them can be used. A device
may be permanently lost."""

UNHEALTHY_SECONDS = 20.0
"""How long to wait for a healthy device. A driver may not have a healthy device. Device plugins
that use the Kubernetes stub register again 10 s after a restart."""

# Short periods, so that a rule about health does not take a minute.
_HEALTH = {"recoveryPeriod": "500ms", "evictionDelay": "500ms", "timeout": "3s"}


MAX_CHARACTERS = 1000
"""Maximum length of a reported problem. Messages from the driver can be longer."""

_REJECTED = re.compile(r"device is rejected .*?device=(?P<device>\S+) error=(?P<reason>.*)$", re.M)
_REFUSED = re.compile(r"backend needs attention .*?reason=BackendRefused note=(?P<note>.*)$", re.M)
_STOPPED = re.compile(r"^\S+ ERROR +endpoint stopped .*?reason=(?P<reason>.*)$", re.M)
_UNREADY = re.compile(r"probe fails .*?probe=/readyz reason=(?P<reason>.*)$", re.M)


class FakeNode:
    """The node of a kit. The kubelet's root directory is the kit's folder."""

    def __init__(
        self, target: Target, root: Path, *, name: str, kubeconfig: Path, kubelet: FakeKubelet
    ) -> None:
        self.root: Path = root
        self.name: str = name
        self.cdi: Path = root / "cdi"
        self.driver: str | None = None
        """The name with which the driver registered. None before its first registration."""

        self.registration: Path | None = None
        """The socket at which the driver last registered."""

        self.dra: Path | None = None
        """The DRA socket from the last registration."""

        self._target = target
        self._kubelet = kubelet
        self._kubeconfig = kubeconfig
        self._boots = 0
        self._healthy = 0
        self._begun = 0  # the offset in the node plugin's log at which the current run begins
        self._environment = {**os.environ, "DRAKIT_ROOT": str(root)}
        self.plugin: Program = Program(
            "the node plugin",
            self._command(),
            log=root / "nodeplugin.log",
            environment={**self._environment, **python_environment(), **OWN_POD},
        )
        command = target.command(root)
        self._waits_for = command.waits_for if command is not None else None
        self.program: Program | None = None
        """The target's own program, if it has one."""
        if command is not None:
            self.program = Program(
                "the target's program",
                command.line,
                log=root / "target.log",
                environment={**self._environment, **command.environment},
                restarted=True,
            )
        for directory in (root / "plugins_registry", self.cdi):
            directory.mkdir()
        target.place(root)

    # ------------------------------------------------------------ the node's lifecycle

    async def start(self) -> None:
        """Boot the node if it is off, start all processes that are not running, and wait until the
        driver can be used. Raises ConformanceError."""
        if self._boots == 0:
            await self._boot()
        if not self.plugin.running:
            self._write_config()
            self._begun = len(self.plugin.text())
            await self.plugin.start()
        await self.start_program()

    async def start_program(self) -> None:
        """Start the target's own program if it is not running, and wait until the driver can be
        used."""
        program = self.program
        if program is not None and not program.running:
            if self._waits_for is not None:
                await self._until(f"the socket {self._waits_for} does not exist", self._can_begin)
            await program.start()
        await self._until_ready()

    async def kill_program(self) -> None:
        """Kill the target's own program, and wait until the node plugin's metrics reflect that.
        Metrics can lag by a few seconds; stale values would make it look as if the program had
        already restarted."""
        if self.program is not None:
            await self.program.kill()
            await self._until("the node plugin still reports a running driver", self._is_down)

    async def _is_down(self) -> bool:
        return not (await self._gauges()).get("drakit_driver_running", 1)

    async def stop_plugin(self) -> None:
        """Stop the node plugin with SIGTERM. Raises ConformanceError if it does not exit and must
        be killed."""
        if self.plugin.running and await self.plugin.terminate() is None:
            raise ConformanceError("the node plugin did not end after SIGTERM, and was killed")

    async def power_off(self) -> None:
        """Kill all processes, and remove everything that a reboot loses."""
        await self.plugin.kill()
        if self.program is not None:
            await self.program.kill()
        if self._waits_for is not None:
            # If the file remained, the program would appear to be running.
            self._waits_for.unlink(missing_ok=True)
        await self._kubelet.close()
        for directory in (self.cdi, self.root / "run"):
            shutil.rmtree(directory, ignore_errors=True)

    async def reboot(self) -> None:
        """Power the node off and on again, and start everything."""
        await self.power_off()
        await self._boot()
        await self.start()

    async def _boot(self) -> None:
        self._boots += 1
        (self.root / "boot_id").write_text(f"boot-{self._boots}\n")
        for directory in (self.cdi, self.root / "run"):
            directory.mkdir(exist_ok=True)
        await self._run(self._target.setup)

    async def unplug(self) -> None:
        """Remove a device, using the target's `unplug` function."""
        await self._run(self._target.unplug)

    async def _run(self, setup: Setup | None) -> None:
        if callable(setup):
            setup(self.root)
        elif setup is not None:
            environment = {**self._environment, "PYTHONPATH": python_path()}
            await run_command(setup, environment=environment, timeout_seconds=SETUP_SECONDS)

    # ------------------------------------------------------------ the node plugin

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "drakit_nodeplugin"),
            *("--config", str(self.root / "plugin.yaml")),
            *("--kubeconfig", str(self._kubeconfig), "--node-name", self.name),
            *("--kubelet-root", str(self.root), "--cdi-dir", str(self.cdi)),
        ]

    def _write_config(self) -> None:
        config = {
            # The kernel chooses free ports, because a port chosen here could be taken before it is
            # used.
            "listen": dict.fromkeys(("probes", "metrics"), "127.0.0.1:0"),
            "bootIDFile": str(self.root / "boot_id"),
            "logging": {"format": "text"},
            "devices": {"health": _HEALTH},
            "claimStatus": {"enabled": True},
            **self._target.config(self.root),
        }
        (self.root / "plugin.yaml").write_text(yaml.safe_dump(config))

    async def _can_begin(self) -> bool:
        return self._waits_for is None or self._waits_for.exists()

    # ------------------------------------------------------------ readiness

    async def _until_ready(self) -> None:
        await self._until("the driver is not registered", self._registers)
        loop = asyncio.get_running_loop()
        since = loop.time()

        async def usable() -> bool:
            gauges = await self._gauges()
            if not (gauges.get("drakit_driver_running") and gauges["drakit_driver_registered"]):
                return False
            healthy = _healthy(gauges)
            waited = loop.time() - since
            if healthy < self._healthy and waited < COMPLETE_SECONDS:
                return False
            if healthy == 0 and waited < UNHEALTHY_SECONDS:
                return False
            self._healthy = healthy
            return healthy + gauges.get("unhealthy", 0) > 0

        await self._until("the driver has no devices", usable)

    async def _registers(self) -> bool:
        """Register the driver at the first socket that responds. Other sockets may be stale."""
        for path in self._kubelet.sockets():
            try:
                info = await self._kubelet.get_info(path)
                if path != self.registration:
                    await self._kubelet.notify(path)
            except grpc.aio.AioRpcError:
                continue
            self.driver, self.registration, self.dra = info.name, path, Path(info.endpoint)
            return True
        return False

    async def _gauges(self) -> Mapping[str, float]:
        """Return the driver's metrics: device counts keyed by state, and other values keyed by
        metric name."""
        text = await self._get("metrics", "/metrics")
        found: dict[str, float] = {}
        driver = re.escape(self.driver or "")
        mine = rf'^(\w+)\{{driver="{driver}"(?:,pool="[^"]*")?(?:,state="(\w+)")?\}} (\S+)$'
        for name, state, value in re.findall(mine, text, re.MULTILINE):
            if not state or name == "drakit_devices":
                found[state or name] = found.get(state or name, 0) + float(value)
        return found

    async def _get(self, server: str, path: str) -> str:
        """Return the response of one of the node plugin's HTTP servers. Empty if the server does
        not respond."""
        ports = re.findall(rf"\b{server}_port=(\d+)", self.plugin.text()[self._begun :])
        if not ports:
            return ""
        url, limit = f"http://127.0.0.1:{ports[-1]}{path}", aiohttp.ClientTimeout(2)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.get(url) as response,
            ):
                return await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return ""

    async def _until(self, problem: str, look: Callable[[], Awaitable[bool]]) -> None:
        """Wait until a condition is met. Raises ConformanceError if it takes too long or cannot
        succeed."""
        loop = asyncio.get_running_loop()
        hopeless_since, ends = inf, self._ends()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while not await look():
                    if not self.plugin.running:
                        raise ConformanceError(self._exit_sentence())
                    if not self._serves():
                        # Device plugins may exit while the kubelet is not running.
                        ends = self._ends()
                    if why := await self._hopeless():
                        hopeless_since = min(hopeless_since, loop.time())
                    else:
                        hopeless_since = inf
                    ended = self._ends() - ends >= HOPELESS_ENDS
                    if ended or loop.time() - hopeless_since > HOPELESS_SECONDS:
                        why = self._complaint() if ended else why
                        raise ConformanceError(f"{why}; {problem}")
                    await asyncio.sleep(POLL_SECONDS)
                return
        sentence = f"{START_SECONDS:g} s after the start, {problem}"
        if why := self._complaint():
            sentence += f"; {why}"
        else:
            await self._get("probes", "/readyz")  # the failing probe writes the reason to the log
            if why := unready(self.plugin.text()[self._begun :]):
                sentence += f"; {why}"
        raise ConformanceError(sentence)

    def _ends(self) -> int:
        return 0 if self.program is None else self.program.ends

    def _serves(self) -> bool:
        return "node plugin is serving" in self.plugin.text()[self._begun :]

    async def _hopeless(self) -> str | None:
        """Return the reason why the driver will not become usable, if that is already known."""
        log = self.plugin.text()[self._begun :]
        if why := rejected(log):
            gauges = await self._gauges()
            if not _healthy(gauges) and not gauges.get("unhealthy"):
                return why
        return refused(log)

    def _complaint(self) -> str | None:
        """Return the latest problem with the driver."""
        program, log = self.program, self.plugin.text()[self._begun :]
        if program is not None and program.exit_code is not None:
            ended = f"the target's program ended with exit code {program.exit_code}"
            line = last_line(program.text())
            return f"{ended}: {line}" if line else ended
        return rejected(log) or refused(log) or stopped(log)

    def _exit_sentence(self) -> str:
        """Describe how the node plugin exited, with its last log line, which contains the
        reason."""
        line = last_line(self.plugin.text())
        reason = f": {line}" if line else ""
        return f"the node plugin ended with exit code {self.plugin.exit_code}{reason}"


# ------------------------------------------------------------ problems in the log


def _healthy(gauges: Mapping[str, float]) -> int:
    return int(sum(gauges.get(state, 0) for state in ("free", "allocated", "tainted")))


def rejected(log: str) -> str | None:
    """Return the name of the last rejected device, and the reason."""
    found = [*_REJECTED.finditer(log)]
    if not found:
        return None
    return f"device {found[-1]['device']} is rejected: {found[-1]['reason']}"[:MAX_CHARACTERS]


def refused(log: str) -> str | None:
    """Return the reason why a backend was last rejected."""
    notes = [match["note"] for match in _REFUSED.finditer(log)]
    return f"the backend is refused: {notes[-1]}"[:MAX_CHARACTERS] if notes else None


def stopped(log: str) -> str | None:
    """Return the reason why the driver last stopped."""
    reasons = [match["reason"] for match in _STOPPED.finditer(log)]
    return f"the driver stopped: {reasons[-1]}"[:MAX_CHARACTERS] if reasons else None


def unready(log: str) -> str | None:
    """Return the latest reason why the node plugin was not ready."""
    reasons = [match["reason"] for match in _UNREADY.finditer(log)]
    return f"the node plugin is not ready: {reasons[-1]}"[:MAX_CHARACTERS] if reasons else None


def last_line(text: str) -> str | None:
    """Return the last non-empty line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:MAX_CHARACTERS] if lines else None


# ------------------------------------------------------------ podresources


class PodList:
    """Serves the kubelet's podresources socket: ``async with PodList(path) as pods``."""

    def __init__(self, socket: Path) -> None:
        self._socket: Path = socket
        self._pods: list[pb.PodResources] = []
        self._server = grpc.aio.server()
        self.shows_own_pod: bool = True
        """Whether the node plugin's own pod is listed. A kubelet that has just started does not
        list it, because it has not yet read its pods from the API server."""

    async def __aenter__(self) -> PodList:
        pb_grpc.add_PodResourcesListerServicer_to_server(_Service(self._listed), self._server)
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    def add(self, claim: ClaimUnderTest, answer: PrepareResult, *, driver: str) -> None:
        """Add a pod whose container uses a prepared claim."""
        resource = pb.DynamicResource(
            claim_name=claim.reference.name, claim_namespace=claim.reference.namespace
        )
        for device in answer.devices:
            resource.claim_resources.add(
                cdi_devices=[pb.CDIDevice(name=name) for name in device.cdi_ids],
                driver_name=driver,
                pool_name=device.pool,
                device_name=device.name,
                share_id=device.share_id,
            )
        container = pb.ContainerResources(name="main", dynamic_resources=[resource])
        self._pods.append(
            pb.PodResources(
                name=f"pod-{claim.uid}", namespace=claim.reference.namespace, containers=[container]
            )
        )

    def clear(self) -> None:
        """Remove all pods except the node plugin's own."""
        self._pods.clear()

    def _listed(self) -> list[pb.PodResources]:
        own = pb.PodResources(name=OWN_POD["POD_NAME"], namespace=OWN_POD["POD_NAMESPACE"])
        return [own, *self._pods] if self.shows_own_pod else [*self._pods]


class _Service(pb_grpc.PodResourcesListerServicer):
    def __init__(self, listed: Callable[[], list[pb.PodResources]]) -> None:
        self._listed = listed

    async def List(self, request: pb.ListPodResourcesRequest, context: Any) -> Any:
        """Return all pods."""
        return pb.ListPodResourcesResponse(pod_resources=self._listed())

    async def Get(self, request: pb.GetPodResourcesRequest, context: Any) -> Any:
        """Return a "not found" error, as the kubelet does for an unknown pod."""
        await context.abort(
            grpc.StatusCode.UNKNOWN,
            f"pod {request.pod_name} in namespace {request.pod_namespace} not found",
        )

    async def GetAllocatableResources(
        self, request: pb.AllocatableResourcesRequest, context: Any
    ) -> Any:
        """Return no devices, because the kubelet's own device manager does not have any."""
        return pb.AllocatableResourcesResponse()
