"""
The kit: one node with one driver, and a kubelet that does to it what kubelets do.

The real node plugin runs as a process between a kubelet and an API server of ours; a rule prepares
and unprepares claims, kills, reboots and takes things away, and looks at what the driver made of
it. How a driver is hosted is :mod:`.targets`' business, how the node lives :mod:`.node`'s.

It must not know rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import grpc.aio

from drakit.testing.apiserver import FakeApiServer
from drakit.testing.conformance.claims import Cluster, result_for
from drakit.testing.conformance.errors import ConformanceError, RuleFailedError, RuleSkippedError
from drakit.testing.conformance.facts import (
    ClaimUnderTest,
    DeviceHealth,
    PreparedDevice,
    PrepareResult,
    PublishedDevice,
)
from drakit.testing.conformance.node import FakeNode
from drakit.testing.conformance.podlist import PodList
from drakit.testing.conformance.targets import Target
from drakit.testing.health import HealthSubscriber
from drakit.testing.kubelet import FakeKubelet

__all__ = (
    "ClaimUnderTest",
    "DeviceHealth",
    "Kit",
    "PrepareResult",
    "PreparedDevice",
    "PublishedDevice",
    "open_kit",
)

NODE = "node-1"

PUBLISH_SECONDS = 10.0
"""From a registration until a device is published: the node plugin waits for nothing then."""

SETTLE_SECONDS = 0.2
"""How long devices must have stayed as they are, where they are others than before."""

SETTLE_PROGRAM_SECONDS = 1.0
"""The same where a program brings them, which may do so one resource after another."""

LIST_SECONDS = 2.0
"""How long more devices are waited for: a driver may list them one after another."""

ValueT = TypeVar("ValueT")


@contextlib.asynccontextmanager
async def open_kit(target: Target) -> AsyncGenerator[Kit]:
    """Give a kit whose node is off; at the end nothing of it is left."""
    # Unix socket paths have at most 107 bytes: the usual directories for such things are too deep.
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
                    await kit.give_back()
                await kit.power_off()
    finally:
        shutil.rmtree(root, ignore_errors=True)


class Kit:
    """One node with one driver; each rule has a fresh one."""

    def __init__(
        self,
        target: Target,
        root: Path,
        *,
        api: FakeApiServer,
        kubelet: FakeKubelet,
        pods: PodList,
    ) -> None:
        self.target = target
        """What is tested, and how it is hosted."""

        self.root = root
        """The kubelet's root directory, a short path; ``{root}`` in configurations."""

        self.node = NODE
        """The name of the Node."""

        self.api = api
        """The API server, for what the methods do not offer: faults, other objects."""

        self.kubelet = kubelet
        """The kubelet, for what the methods do not offer."""

        self.pods: PodList = pods
        """Pods that the kubelet lists. A rule must add the pods of the claims that it prepares."""

        self._asked: dict[str, ClaimUnderTest] = {}
        self._known: frozenset[tuple[str, str]] = frozenset()
        self._cluster = Cluster(api, node=NODE)
        self._node = FakeNode(
            target, root, name=NODE, kubeconfig=api.write_kubeconfig(root), kubelet=kubelet
        )

    @property
    def cdi(self) -> Path:
        """The directory of CDI specs; empty after a reboot."""
        return self._node.cdi

    @property
    def driver(self) -> str:
        """The driver's name, as it registered; known from `start` on."""
        if self._node.driver is None:
            raise ConformanceError("no driver has registered yet")
        return self._node.driver

    # ------------------------------------------------------------ the node's life

    async def start(self) -> None:
        """Start the target's own process, if it has one, and the node plugin; return when the
        driver is registered and has published a device.

        The runner has done this before a rule is checked. Raises ConformanceError."""
        await self._node.start()
        await self._until_published()

    async def stop(self) -> None:
        """End the node plugin as an update does (SIGTERM) and wait for it. The target's own process
        stays."""
        await self._node.stop_plugin()
        await self.kubelet.close()

    async def kill(self) -> None:
        """End the node plugin as the kernel does (SIGKILL). The target's own process stays."""
        await self._node.plugin.kill()
        await self.kubelet.close()

    async def restart(self) -> None:
        """`kill`, then `start`."""
        await self.kill()
        await self.start()

    async def reboot(self) -> None:
        """Kill all processes; another boot id, no CDI files, an empty ``{root}/run``, the target's
        set-up anew; `start`."""
        await self._node.reboot()
        await self._until_published()

    async def power_off(self) -> None:
        """Kill all processes."""
        await self._node.power_off()

    async def give_back(self) -> None:
        """Unprepare all claims that were ever asked to be prepared, as far as that can be done."""
        with contextlib.suppress(ConformanceError, RuleSkippedError):
            if self._asked:
                await self.start()
                await self.unprepare(*self._asked.values())

    async def kill_target(self) -> None:
        """Kill the target's own process. Skips the rule if it has none, or one that the kit has not
        started."""
        if self._node.program is None:
            self.skip("the target has no process of its own that could be killed")
        if self.target.lives_on:
            self.skip(
                "the target's process is not the kit's to kill; give the command that starts it, "
                "as backend:COMMAND"
            )
        await self._node.program.kill()

    async def start_target(self) -> None:
        """Start the target's own process (again), and wait until its devices can be used. Skips the
        rule if it has none."""
        if self._node.program is None:
            self.skip("the target has no process of its own that could be started")
        await self._node.start_program()
        await self._until_published()

    async def _until_published(self) -> None:
        """Wait for devices in the API server that can be used, as far as the node plugin knows."""
        if not await _so(
            lambda: any(map(_usable, self._cluster.devices(self.driver))), PUBLISH_SECONDS
        ):
            raise ConformanceError(
                f"{PUBLISH_SECONDS:g} s after it was registered the driver has no device published "
                f"that pods could get"
            )
        await self._until_settled()

    async def _until_settled(self) -> None:
        """Wait until the devices are those that there were at the last start, or stay the same."""
        loop = asyncio.get_running_loop()
        program = self._node.program is not None
        settle = SETTLE_PROGRAM_SECONDS if program else SETTLE_SECONDS
        now, since, until = self._names(), loop.time(), loop.time() + PUBLISH_SECONDS
        while now != self._known and loop.time() < min(since + settle, until):
            await asyncio.sleep(0.02)
            if (names := self._names()) != now:
                now, since = names, loop.time()
        self._known = now

    def _names(self) -> frozenset[tuple[str, str]]:
        return frozenset((d.pool, d.name) for d in self._cluster.devices(self.driver))

    # ------------------------------------------------------------ what is published

    async def devices(self, *, at_least: int = 1) -> list[PublishedDevice]:
        """Give the devices that are published, by pool and name.

        Skips the rule if there are fewer than `at_least`: the driver has not enough to show it."""
        await _so(lambda: len(self._cluster.devices(self.driver)) >= at_least, LIST_SECONDS)
        found = self._cluster.devices(self.driver)
        if len(found) < at_least:
            self.skip(f"it takes {at_least} devices to show it, and there are {len(found)}")
        return found

    def slices(self) -> list[dict[str, Any]]:
        """Give the driver's ResourceSlices, as JSON."""
        return self._cluster.slices(self.driver)

    def slice_writes(self) -> int:
        """Count the writes of ResourceSlices since the kit began, dry runs aside."""
        return self._cluster.slice_writes()

    def events(self) -> list[str]:
        """Give the notes of all Events."""
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
    ) -> ClaimUnderTest:
        """Store a new claim that is allocated these devices.

        `configs` are opaque parameters, each a JSON object; None means those that the target was
        given for its claims. A device that several claims may have becomes a share, as the
        scheduler makes it: with an ID of its own, and the amounts of a request that names none;
        `share_id` and `consumed` say them instead. `results` replaces the allocation's results as
        a whole, for those that are wrong; what a result has not is filled in (driver, pool,
        request)."""
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
            self.driver, made, devices=devices, configs=self._configs(configs)
        )

    def reallocate(
        self,
        claim: ClaimUnderTest,
        *devices: PublishedDevice,
        configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> ClaimUnderTest:
        """Allocate a claim other devices, as after a deallocation: its UID stays the same."""
        made = [
            result_for(
                device,
                driver=self.driver,
                request="main",
                admin_access=False,
                share_id=None,
                consumed=None,
            )
            for device in devices
        ]
        return self._cluster.store_claim(
            self.driver, made, devices=devices, configs=self._configs(configs), of=claim
        )

    def delete_claim(self, claim: ClaimUnderTest) -> None:
        """Delete the claim's object, as after a pod was deleted by force."""
        self._cluster.delete_claim(claim)

    def _configs(self, configs: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
        if configs is not None:
            return configs
        return () if self.target.parameters is None else (self.target.parameters,)

    async def prepare(
        self, *claims: ClaimUnderTest, timeout_seconds: float = 45
    ) -> dict[str, PrepareResult]:
        """Ask to prepare claims in one call; give the answers by claim UID. Fails the rule if there
        is none in time."""
        self._asked |= {claim.uid: claim for claim in claims}
        answers = await self._answered(
            "NodePrepareResources",
            self.kubelet.prepare(
                self._dra(), *(c.reference for c in claims), timeout_seconds=timeout_seconds
            ),
        )
        self._expect_all(claims, answers)
        return {uid: _prepare_result(answer) for uid, answer in answers.items()}

    async def unprepare(
        self, *claims: ClaimUnderTest, timeout_seconds: float = 45
    ) -> dict[str, str]:
        """Ask to unprepare claims in one call; give the errors by claim UID, empty where there is
        none. Fails the rule if there is no answer in time."""
        answers = await self._answered(
            "NodeUnprepareResources",
            self.kubelet.unprepare(
                self._dra(), *(c.reference for c in claims), timeout_seconds=timeout_seconds
            ),
        )
        self._expect_all(claims, answers)
        return dict(answers)

    async def cancel_prepare(self, *claims: ClaimUnderTest, after_seconds: float) -> None:
        """Ask to prepare claims, and hang up after a time; returns then, answered or not."""
        self._asked |= {claim.uid: claim for claim in claims}
        # A call that is cancelled is a stream that is reset: what the server sees of a kubelet
        # that gives up.
        call = asyncio.create_task(
            self.kubelet.prepare(self._dra(), *(c.reference for c in claims), timeout_seconds=45)
        )
        await asyncio.wait([call], timeout=after_seconds)
        call.cancel()
        await asyncio.wait([call])
        if not call.cancelled():
            call.exception()  # looked at, so that nobody complains of it

    def _dra(self) -> Path:
        if self._node.dra is None:
            raise ConformanceError("no driver has registered yet")
        return self._node.dra

    async def _answered(self, method: str, call: Awaitable[ValueT]) -> ValueT:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            code = error.code().name.lower().replace("_", " ")
            self.fail(f"{method} was not answered: {code} ({error.details()})")

    def _expect_all(self, claims: Sequence[ClaimUnderTest], answers: Mapping[str, object]) -> None:
        asked = {claim.uid for claim in claims}
        if missing := asked - set(answers):
            self.fail(f"the answer says nothing of {len(missing)} of {len(asked)} claims")
        if foreign := set(answers) - asked:
            self.fail(f"the answer says something of {len(foreign)} claims that nobody asked for")

    # ------------------------------------------------------------ what containers get

    def spec(self, claim: ClaimUnderTest) -> dict[str, Any] | None:
        """Give the CDI spec of a claim as JSON; None if it has none."""
        for path in sorted(self.cdi.glob(f"*{claim.uid}*.json")):
            with contextlib.suppress(FileNotFoundError):
                return cast("dict[str, Any]", json.loads(path.read_text()))
        return None

    def edits(self, claim: ClaimUnderTest, device: PublishedDevice | None = None) -> dict[str, Any]:
        """Give the CDI container edits of one device of a claim, the spec's own included; without a
        device those of all together. Lists are put one after another. Empty if there is no spec.

        A device is found by the claim's results: the first of them is the first of the spec."""
        spec = self.spec(claim)
        if spec is None:
            return {}
        entries: list[dict[str, Any]] = spec["devices"]
        if device is not None:
            index = claim.devices.index(device)
            entries = [e for e in entries if e["name"] == f"{claim.uid}-{index}"]
        merged: dict[str, Any] = {}
        for holder in (spec, *entries):
            edits: Mapping[str, Any] = holder.get("containerEdits") or {}
            for key, value in edits.items():
                both = isinstance(value, list) and isinstance(merged.get(key), list)
                merged[key] = [*merged[key], *cast("list[Any]", value)] if both else value
        return merged

    # ------------------------------------------------------------ looking on

    async def get_info_seconds(self) -> float:
        """Ask for GetInfo over a new connection, as at registration; give how long it took."""
        since = time.perf_counter()
        await self._answered("GetInfo", self.kubelet.get_info(self._registration()))
        return time.perf_counter() - since

    async def health(self, *, within_seconds: float = 5) -> dict[tuple[str, str], DeviceHealth]:
        """Follow health as the kubelet does, until something is told; give it by pool and device.
        Empty if the driver has no health, or has told nothing within the time."""
        path = self._registration()
        info = await self._answered("GetInfo", self.kubelet.get_info(path))
        if not any("DRAResourceHealth" in version for version in info.supported_versions):
            return {}
        async with await self.kubelet.follow_health(path) as told:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_seconds):
                    await told.until(lambda: bool(told.messages) or told.ended)
            return _health(told)

    def _registration(self) -> Path:
        if self._node.registration is None:
            raise ConformanceError("no driver has registered yet")
        return self._node.registration

    def log(self) -> str:
        """Give what the node plugin has logged in this kit, over all its starts."""
        return self._node.plugin.text()

    def target_log(self) -> str:
        """Give what the target's own process has written; empty if it has none."""
        return "" if self._node.program is None else self._node.program.text()

    # ------------------------------------------------------------ how a rule ends

    def skip(self, reason: str) -> NoReturn:
        """End the rule: this target cannot show it."""
        raise RuleSkippedError(reason)

    def fail(self, sentence: str) -> NoReturn:
        """End the rule: the driver does not keep it."""
        raise RuleFailedError(sentence)


async def _so(condition: Callable[[], bool], within_seconds: float) -> bool:
    """Wait until something is so; say whether it is."""
    loop = asyncio.get_running_loop()
    until = loop.time() + within_seconds
    while not (so := condition()) and loop.time() < until:
        await asyncio.sleep(0.02)
    return so


def _usable(device: PublishedDevice) -> bool:
    return not any(taint.get("key") == "drakit.dev/stopped" for taint in device.taints)


def _prepare_result(answer: Any) -> PrepareResult:
    return PrepareResult(
        error=answer.error,
        devices=tuple(
            PreparedDevice(
                requests=tuple(device.request_names),
                pool=device.pool_name,
                name=device.device_name,
                cdi_ids=tuple(device.cdi_device_ids),
                share_id=device.share_id if device.HasField("share_id") else None,
            )
            for device in answer.devices
        ),
    )


def _health(told: HealthSubscriber) -> dict[tuple[str, str], DeviceHealth]:
    known: dict[tuple[str, str], DeviceHealth] = {}
    for message in told.messages:
        for key, (status, text) in message.items():
            known[key] = DeviceHealth(status=status, message=text)
    return known
