"""
The kit: one node with one driver, a fake kubelet and a fake API server.

The real node plugin runs as a process between a fake kubelet and a fake API server. A rule prepares
and unprepares claims, kills processes, reboots the node or removes devices and files, and checks
how the driver responds. :mod:`.targets` hosts the driver, :mod:`.node` starts and stops the node,
and :mod:`.claims` manages the objects in the API server.

Does not depend on rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import grpc.aio

from drakit.testing.apiserver import FakeApiServer
from drakit.testing.conformance.claims import Cluster, result_for
from drakit.testing.conformance.facts import (
    ClaimUnderTest,
    ConformanceError,
    DeviceHealth,
    PrepareResult,
    PublishedDevice,
    RuleFailedError,
    RuleSkippedError,
    merged,
)
from drakit.testing.conformance.node import FakeNode, PodList
from drakit.testing.conformance.targets import Target
from drakit.testing.kubelet import FakeKubelet
from drakit_formats.resource.metadata import CONTAINER_DIRECTORY

NODE = "node-1"

BLOCKED = "driver blocks its event loop"
"""The message that the driver runtime logs when the driver has blocked its event loop for 2, 10, 60
and 300 s, and then every 300 s."""

ValueT = TypeVar("ValueT")


@contextlib.asynccontextmanager
async def open_kit(target: Target) -> AsyncGenerator[Kit]:
    """Create a kit whose node is powered off, as an asynchronous context manager. On exit, it kills
    all processes and removes all files."""
    # Unix socket paths can have at most 107 bytes, and paths in the usual temporary directories are
    # too long.
    root = Path(tempfile.mkdtemp(prefix="dk-", dir="/tmp"))
    try:
        async with (
            FakeApiServer() as api,
            FakeKubelet(root) as kubelet,
            PodList(root / "pod-resources" / "kubelet.sock") as pods,
        ):
            kit = Kit(target, root, api=api, kubelet=kubelet, pods=pods)
            try:
                yield kit
            finally:
                if target.lives_on:
                    await kit.unprepare_all()
                await kit.power_off()
    finally:
        shutil.rmtree(root, ignore_errors=True)


class Kit:
    """
    A node with one driver, a fake kubelet and a fake API server. Each rule of the driver contract
    gets a new kit.

    Methods raise ``RuleFailedError`` if the driver violates the rule, and ``RuleSkippedError`` if
    the rule does not apply to the driver. The runner reports both errors.
    """

    def __init__(
        self, target: Target, root: Path, *, api: FakeApiServer, kubelet: FakeKubelet, pods: PodList
    ) -> None:
        self.target = target
        """The driver under test."""

        self.root = root
        """The kubelet's root directory. Configurations refer to it as ``{root}``."""

        self.node = NODE
        """The name of the Node."""

        self.api = api
        """The API server, a :class:`FakeApiServer`."""

        self.kubelet = kubelet
        """The kubelet, a :class:`FakeKubelet`."""

        self.pods: PodList = pods
        """The pods that the podresources API of the fake kubelet lists. Initially, this is only the
        node plugin's own pod. A rule can add pods that use prepared claims."""

        self._asked: dict[str, ClaimUnderTest] = {}
        self._cluster = Cluster(api, node=NODE)
        self._node = FakeNode(
            target, root, name=NODE, kubeconfig=api.write_kubeconfig(root), kubelet=kubelet
        )

    @property
    def cdi(self) -> Path:
        """The directory for CDI specs. A reboot empties it."""
        return self._node.cdi

    @property
    def driver(self) -> str:
        """The driver name. Raises ConformanceError if the driver has not registered yet."""
        if self._node.driver is None:
            raise ConformanceError("no driver has registered yet")
        return self._node.driver

    # ------------------------------------------------------------ the node's lifecycle

    async def start(self) -> None:
        """Start the node plugin and, for a backend or device plugin, the target's own process. Wait
        until the driver is registered and has published a device. The runner calls this method
        before each rule."""
        await self._node.start()
        await self._until_published()

    async def stop(self) -> None:
        """Stop the node plugin with SIGTERM, as during an update."""
        await self._node.stop_plugin()
        await self.kubelet.close()

    async def kill(self) -> None:
        """Kill the node plugin with SIGKILL."""
        await self._node.plugin.kill()
        await self.kubelet.close()

    async def restart(self) -> None:
        """Kill the node plugin and start it again."""
        await self.kill()
        await self.start()

    async def reboot(self) -> None:
        """Reboot the node: kill all processes, change the boot ID, empty the CDI directory and
        ``{root}/run``, run the target's setup, and start again."""
        await self._node.reboot()
        await self._until_published()

    async def unplug(self) -> None:
        """Remove a device from the running node, or skip the rule if the target cannot do that."""
        if self.target.unplug is None:
            self.skip("the target cannot remove a device; give a command for it, with --unplug")
        await self._node.unplug()

    async def power_off(self) -> None:
        """Kill all processes."""
        await self._node.power_off()

    async def unprepare_all(self) -> None:
        """Unprepare all claims that a rule has tried to prepare, if possible."""
        with contextlib.suppress(ConformanceError, RuleSkippedError):
            if self._asked:
                await self.start()
                await self.unprepare(*self._asked.values())

    async def kill_target(self) -> None:
        """Kill the target's own process, and wait until the node plugin has noticed. Skip the rule
        if the target does not have one."""
        if self._node.program is None:
            self.skip("the target has no process of its own to kill")
        if self.target.lives_on:
            self.skip(
                "the kit did not start the target's process, so it cannot kill it; use the target "
                "backend:COMMAND"
            )
        await self._node.kill_program()

    async def start_target(self) -> None:
        """Start the target's own process again, and wait until its devices are published."""
        if self._node.program is None:
            self.skip("the target has no process of its own to start")
        await self._node.start_program()
        await self._until_published()

    async def _until_published(self) -> None:
        await self._cluster.until_published(self.driver, is_program=self._node.program is not None)

    # ------------------------------------------------------------ published devices

    async def devices(self, *, at_least: int = 1) -> list[PublishedDevice]:
        """Return the published devices, ordered by pool and name. Skips the rule if there are fewer
        than `at_least`."""
        found = await self._cluster.until_listed(self.driver, at_least=at_least)
        if len(found) < at_least:
            self.skip(f"the rule needs {at_least} devices, but the driver publishes {len(found)}")
        return found

    def slices(self) -> list[dict[str, Any]]:
        """Return the driver's ResourceSlices, as JSON."""
        return self._cluster.slices(self.driver)

    def slice_writes(self) -> int:
        """Return the number of ResourceSlice writes in this kit, not counting dry runs."""
        return self._cluster.slice_writes()

    def events(self) -> list[str]:
        """Return the notes of all Events."""
        return self._cluster.events()

    # ------------------------------------------------------------ claims

    def claim(
        self,
        *devices: PublishedDevice,
        request: str = "main",
        configs: Sequence[Mapping[str, Any]] | None = None,
        admin_access: bool = False,
        share_id: str | None = None,
        consumed: Mapping[str, str] | None = None,
        results: Sequence[Mapping[str, Any]] | None = None,
        others: Sequence[Mapping[str, Any]] = (),
        metadata: Mapping[str, Any] | None = None,
        reserved_for: Sequence[Mapping[str, Any]] | None = None,
    ) -> ClaimUnderTest:
        """
        Store and return a new claim that these devices are allocated to.

        `configs` are opaque parameters as JSON objects, by default those of the target. If claims
        can share the device, the claim gets a share with a new ID and the default amounts, unless
        `share_id` and `consumed` are set. With `admin_access`, it does not get a share. `results`
        replaces the allocation results, to test invalid ones, and `others` adds results of other
        drivers. `metadata` sets labels, annotations and owners. `reserved_for` sets the consumers,
        by default one pod.
        """
        made = [
            result_for(
                device,
                driver=self.driver,
                request=request,
                admin_access=admin_access,
                share_id=share_id,
                consumed=consumed,
            )
            for device in devices
        ]
        if results is not None:
            filled = {"driver": self.driver, "pool": self.node, "request": request}
            made = [{**filled, **result} for result in results]
        return self._cluster.store_claim(
            self.driver,
            [*made, *others],
            devices=devices,
            configs=self._configs(configs),
            metadata=metadata or {},
            reserved_for=reserved_for,
        )

    def reallocate(
        self,
        claim: ClaimUnderTest,
        *devices: PublishedDevice,
        configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> ClaimUnderTest:
        """Allocate different devices to a claim, as if the claim had been deallocated in between.
        The UID does not change."""
        made = [result_for(device, driver=self.driver) for device in devices]
        return self._cluster.store_claim(
            self.driver, made, devices=devices, configs=self._configs(configs), of=claim
        )

    def delete_claim(self, claim: ClaimUnderTest) -> None:
        """Delete the claim object, like `kubectl delete --force`."""
        self._cluster.delete_claim(claim)

    def _configs(self, configs: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
        if configs is not None:
            return configs
        return () if self.target.parameters is None else (self.target.parameters,)

    async def prepare(
        self, *claims: ClaimUnderTest, timeout_seconds: float = 45
    ) -> dict[str, PrepareResult]:
        """Prepare claims in one call. Return the results, keyed by claim UID."""
        self._asked |= {claim.uid: claim for claim in claims}
        answers = await self._answered(
            "NodePrepareResources",
            self.kubelet.prepare(
                self._dra(), *(c.reference for c in claims), timeout_seconds=timeout_seconds
            ),
        )
        self._expect_all(claims, answers)
        return {uid: PrepareResult.of(answer) for uid, answer in answers.items()}

    async def unprepare(
        self, *claims: ClaimUnderTest, timeout_seconds: float = 45
    ) -> dict[str, str]:
        """Unprepare claims in one call. Return the errors, keyed by claim UID; an empty string
        means success."""
        answers = await self._answered(
            "NodeUnprepareResources",
            self.kubelet.unprepare(
                self._dra(), *(c.reference for c in claims), timeout_seconds=timeout_seconds
            ),
        )
        self._expect_all(claims, answers)
        return dict(answers)

    async def cancel_prepare(self, *claims: ClaimUnderTest, after_seconds: float) -> None:
        """Start to prepare claims in one call, and cancel the call after this time."""
        self._asked |= {claim.uid: claim for claim in claims}
        # Canceling the call resets its stream, as when a kubelet gives up.
        call = asyncio.create_task(
            self.kubelet.prepare(self._dra(), *(c.reference for c in claims), timeout_seconds=45)
        )
        await asyncio.wait([call], timeout=after_seconds)
        call.cancel()
        await asyncio.wait([call])
        if not call.cancelled():
            call.exception()  # retrieve the exception, so that asyncio does not log it

    def _dra(self) -> Path:
        if self._node.dra is None:
            raise ConformanceError("no driver has registered yet")
        return self._node.dra

    async def _answered(self, method: str, call: Awaitable[ValueT]) -> ValueT:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            code = error.code().name.lower().replace("_", " ")
            self.fail(f"{method} got no response: {code} ({error.details()})")

    def _expect_all(self, claims: Sequence[ClaimUnderTest], answers: Mapping[str, object]) -> None:
        asked = {claim.uid for claim in claims}
        if missing := asked - set(answers):
            self.fail(f"the response lacks {len(missing)} of {len(asked)} claims")
        if foreign := set(answers) - asked:
            self.fail(f"the response contains {len(foreign)} claims that were not in the call")

    # ------------------------------------------------------------ container edits and files

    def spec(self, claim: ClaimUnderTest) -> dict[str, Any] | None:
        """Return the CDI spec of a claim as JSON, or None if it does not exist."""
        for path in sorted(self.cdi.glob(f"*{claim.uid}*.json")):
            with contextlib.suppress(FileNotFoundError):
                return cast("dict[str, Any]", json.loads(path.read_text()))
        return None

    def edits(self, claim: ClaimUnderTest, device: PublishedDevice | None = None) -> dict[str, Any]:
        """Return the merged CDI container edits of one device of a claim, or of all its devices,
        without the mounts of metadata files."""
        spec = self.spec(claim)
        if spec is None:
            return {}
        entries: list[dict[str, Any]] = spec["devices"]
        if device is not None:
            index = claim.devices.index(device)
            entries = [e for e in entries if e["name"] == f"{claim.uid}-{index}"]
        edits = merged([holder.get("containerEdits") or {} for holder in (spec, *entries)])
        if "mounts" in edits:
            edits["mounts"] = [m for m in edits["mounts"] if not _is_metadata(m)]
            if not edits["mounts"]:
                del edits["mounts"]
        return edits

    def metadata(self, claim: ClaimUnderTest) -> list[dict[str, Any]]:
        """Return the contents of a claim's metadata files, one for each request, in the newest
        version. Empty if the driver does not use metadata files."""
        spec: Mapping[str, Any] = self.spec(claim) or {"devices": ()}
        found: list[dict[str, Any]] = []
        for entry in spec["devices"]:
            for mount in entry["containerEdits"].get("mounts") or ():
                if _is_metadata(mount):
                    newest, *_ = Path(mount["hostPath"]).read_text().splitlines()
                    found.append(json.loads(newest))
        return found

    # ------------------------------------------------------------ observing

    async def get_info_seconds(self) -> float:
        """Call GetInfo over a new connection. Return the duration of the call in seconds."""
        since = time.perf_counter()
        await self._answered("GetInfo", self.kubelet.get_info(self._registration()))
        return time.perf_counter() - since

    async def health(self, *, within_seconds: float = 5) -> dict[tuple[str, str], DeviceHealth]:
        """Return the content of the driver's first health message, keyed by pool and device. The
        mapping is empty if no message arrives in time."""
        path = self._registration()
        info = await self._answered("GetInfo", self.kubelet.get_info(path))
        if not any("DRAResourceHealth" in version for version in info.supported_versions):
            return {}
        async with await self.kubelet.follow_health(path) as stream:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_seconds):
                    await stream.until(lambda: bool(stream.messages) or stream.ended)
            return {
                key: DeviceHealth(status=status, message=text)
                for message in stream.messages
                for key, (status, text) in message.items()
            }

    def _registration(self) -> Path:
        if self._node.registration is None:
            raise ConformanceError("no driver has registered yet")
        return self._node.registration

    def log(self) -> str:
        """Return the node plugin's log, including that of earlier runs in this kit."""
        return self._node.plugin.text()

    def target_log(self) -> str:
        """Return the output of the target's own process."""
        return "" if self._node.program is None else self._node.program.text()

    def blocked(self, *, least: int = 2) -> str | None:
        """Return the last call that blocked the driver's event loop, if the logs contain at least
        `least` lines about blocks, otherwise None. A single line may be due to a busy machine or an
        import."""
        calls: list[str] = []
        for line in f"{self.log()}\n{self.target_log()}".splitlines():
            if BLOCKED in line:
                found = re.search(r'"where": "([^"]*)|where=(.*)$', line)
                calls.append((found[1] or found[2]) if found else "a call that its log names")
        return calls[-1] if len(calls) >= least else None

    # ------------------------------------------------------------ the end of a rule

    def skip(self, reason: str) -> NoReturn:
        """Skip the rule."""
        raise RuleSkippedError(reason)

    def fail(self, sentence: str) -> NoReturn:
        """Fail the rule. The sentence appears in the report."""
        raise RuleFailedError(sentence)


def _is_metadata(mount: Mapping[str, Any]) -> bool:
    return str(mount.get("containerPath")).startswith(f"{CONTAINER_DIRECTORY}/")
