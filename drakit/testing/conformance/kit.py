"""
The kit: one node with one driver, and a kubelet that does to it what kubelets do.

The real node plugin runs as a process between a kubelet and an API server of ours; a rule prepares
and unprepares claims, kills, reboots and takes things away, and looks at what the driver made of
it. It must not know rules, or how a driver is hosted: that is :mod:`.targets`'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from drakit.testing.conformance.errors import RuleFailedError, RuleSkippedError
from drakit.testing.conformance.facts import (
    ClaimUnderTest,
    DeviceHealth,
    PreparedDevice,
    PrepareResult,
    PublishedDevice,
)
from drakit.testing.conformance.targets import Target

__all__ = (
    "ClaimUnderTest",
    "DeviceHealth",
    "Kit",
    "PrepareResult",
    "PreparedDevice",
    "PublishedDevice",
)


class Kit:
    """One node with one driver; each rule has a fresh one."""

    target: Target
    """What is tested, and how it is hosted."""

    root: Path
    """The kubelet's root directory, a short path; ``{root}`` in configurations."""

    node: str
    """The name of the Node."""

    cdi: Path
    """The directory of CDI specs; empty after a reboot."""

    @property
    def driver(self) -> str:
        """The driver's name, as it registered; known from `start` on."""
        raise NotImplementedError

    # ------------------------------------------------------------ the node's life

    async def start(self) -> None:
        """Start the target's own process, if it has one, and the node plugin; return when the
        driver is registered and has published a device.

        The runner has done this before a rule is checked. Raises ConformanceError."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End the node plugin as an update does (SIGTERM) and wait for it. The target's own process
        stays."""
        raise NotImplementedError

    async def kill(self) -> None:
        """End the node plugin as the kernel does (SIGKILL). The target's own process stays."""
        raise NotImplementedError

    async def restart(self) -> None:
        """`kill`, then `start`."""
        raise NotImplementedError

    async def reboot(self) -> None:
        """Kill all processes; another boot id, no CDI files, an empty ``{root}/run``, the target's
        set-up anew; `start`."""
        raise NotImplementedError

    async def kill_target(self) -> None:
        """Kill the target's own process. Skips the rule if it has none."""
        raise NotImplementedError

    async def start_target(self) -> None:
        """Start the target's own process (again), and wait until its devices are published without
        taints of a stopped endpoint. Skips the rule if it has none."""
        raise NotImplementedError

    # ------------------------------------------------------------ what is published

    async def devices(self, *, at_least: int = 1) -> list[PublishedDevice]:
        """Give the devices that are published, by pool and name.

        Skips the rule if there are fewer than `at_least`: the driver has not enough to show it."""
        raise NotImplementedError

    def slices(self) -> list[dict[str, Any]]:
        """Give the driver's ResourceSlices, as JSON."""
        raise NotImplementedError

    def slice_writes(self) -> int:
        """Count the writes of ResourceSlices since the kit began, dry runs aside."""
        raise NotImplementedError

    def events(self) -> list[str]:
        """Give the notes of all Events."""
        raise NotImplementedError

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
        given for its claims. `share_id` and `consumed` (capacity) make the devices shares.
        `results` replaces the allocation's results as a whole, for those that are wrong; what a
        result has not is filled in (driver, pool, request)."""
        raise NotImplementedError

    def reallocate(
        self,
        claim: ClaimUnderTest,
        *devices: PublishedDevice,
        configs: Sequence[Mapping[str, Any]] | None = None,
    ) -> ClaimUnderTest:
        """Allocate a claim other devices, as after a deallocation: its UID stays the same."""
        raise NotImplementedError

    def delete_claim(self, claim: ClaimUnderTest) -> None:
        """Delete the claim's object, as after a pod was deleted by force."""
        raise NotImplementedError

    async def prepare(
        self, *claims: ClaimUnderTest, timeout_seconds: float = 45
    ) -> dict[str, PrepareResult]:
        """Ask to prepare claims in one call; give the answers by claim UID. Fails the rule if there
        is none in time."""
        raise NotImplementedError

    async def unprepare(
        self, *claims: ClaimUnderTest, timeout_seconds: float = 45
    ) -> dict[str, str]:
        """Ask to unprepare claims in one call; give the errors by claim UID, empty where there is
        none. Fails the rule if there is no answer in time."""
        raise NotImplementedError

    async def cancel_prepare(self, *claims: ClaimUnderTest, after_seconds: float) -> None:
        """Ask to prepare claims, and hang up after a time; returns then, answered or not."""
        raise NotImplementedError

    # ------------------------------------------------------------ what containers get

    def spec(self, claim: ClaimUnderTest) -> dict[str, Any] | None:
        """Give the CDI spec of a claim as JSON; None if it has none."""
        raise NotImplementedError

    def edits(self, claim: ClaimUnderTest, device: PublishedDevice | None = None) -> dict[str, Any]:
        """Give the CDI container edits of one device of a claim, the spec's own included; without a
        device those of all together. Lists are put one after another. Empty if there is no spec.

        A device is found by the claim's results: the first of them is the first of the spec."""
        raise NotImplementedError

    # ------------------------------------------------------------ looking on

    async def get_info_seconds(self) -> float:
        """Ask for GetInfo over a new connection, as at registration; give how long it took."""
        raise NotImplementedError

    async def health(self, *, within_seconds: float = 5) -> dict[tuple[str, str], DeviceHealth]:
        """Follow health as the kubelet does, until something is told; give it by pool and device.
        Empty if the driver has no health, or has told nothing within the time."""
        raise NotImplementedError

    def log(self) -> str:
        """Give what the node plugin has logged in this kit, over all its starts."""
        raise NotImplementedError

    # ------------------------------------------------------------ how a rule ends

    def skip(self, reason: str) -> NoReturn:
        """End the rule: this target cannot show it."""
        raise RuleSkippedError(reason)

    def fail(self, sentence: str) -> NoReturn:
        """End the rule: the driver does not keep it."""
        raise RuleFailedError(sentence)
