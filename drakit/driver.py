"""
The driver contract: what a vendor's class says of its devices, and does for a claim.

The docstrings here are the manual. How a driver is run (a thread and loop of its own, so that one
that blocks harms nobody else), how claims are stored and slices written, is the node plugin's
business; a driver need not know Kubernetes.

It must not know Kubernetes clients, gRPC, or either daemon.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

from drakit.device import AllocatedDevice, ClaimReference, Device, Edits
from drakit.settings import Settings

__all__ = ("Driver", "DriverConfig", "DriverError", "Node")


class DriverConfig(Settings):
    """
    Base of a driver's typed configuration; an unknown key is an error that names it.

    Field names are snake_case in Python and camelCase in files.
    """


class DriverError(Exception):
    """A device cannot be prepared, unprepared or listed. The text ends in a pod's Event.

    Write a sentence that names what is wrong and what to do. Text without times and counters lets
    Events be deduplicated.
    """


class Node(Protocol):
    """The node on which the driver runs."""

    @property
    def name(self) -> str:
        """``metadata.name`` of the Node."""
        ...

    @property
    def labels(self) -> Mapping[str, str] | None:
        """The Node's labels as last read; None until the API server has answered once."""
        ...


ConfigT = TypeVar("ConfigT", bound=DriverConfig)


class Driver(ABC, Generic[ConfigT]):
    """
    Devices of one kind on one node.

    One object is made per node plugin; all its methods are called in one thread that nothing else
    uses, so state needs no lock. `__init__` and `close` run outside of the thread's event loop and
    may block; the others run in it, and may block briefly.

    `prepare`, `unprepare` and `check` may be plain functions or async ones. Those for different
    devices run side by side; two for the same device (pool and name) never overlap, and the next
    begins only when the one before has really ended, with all that it does after a cancellation.
    """

    name: ClassVar[str]
    """The driver's name: a DNS subdomain of at most 63 characters (``camera.example.com``). It is
    in every slice, allocation and DeviceClass, so it never changes."""

    config_type: ClassVar[type[DriverConfig]] = DriverConfig
    """The type of the driver's configuration. What fails its validation stops the plugin at start,
    with file, key and reason."""

    side_effects: ClassVar[bool] = True
    """Whether `prepare` does anything but say what the container gets. Set it to False only if it
    does not: then a crash leaves nothing to undo, preparing costs one write to disk less, and
    `unprepare` is never called."""

    def __init__(self, config: ConfigT, node: Node) -> None:
        self.config = config
        self.node = node

    @abstractmethod
    def devices(self) -> AsyncIterator[Collection[Device]]:
        """
        Say which devices there are: all of them at once, and all again at every change.

        An async generator that runs until it is closed. What is yielded replaces what was yielded
        before; an equal collection costs nothing. If it ends or raises, the driver counts as
        stopped: its devices are not prepared any more until it is started again, with a delay
        that grows from 1 s to 1 min.
        """

    @abstractmethod
    def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> Awaitable[Edits] | Edits:
        """
        Make a device ready for a claim, and say what its containers get.

        Called once per allocated device, those of a pod's claims concurrently. The pod waits; a
        call that takes longer than 5 min, or whose pod is deleted meanwhile, is cancelled, and
        `unprepare` is called once it has ended. It is called again for the same claim and device
        after a failure, a crash or a reboot, and must then give the same result and make sure that
        all side effects are there. If it raises, the claim is not prepared, `unprepare` is called
        for all of its devices, and the text of a :class:`DriverError` is shown to the user.
        """

    def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> Awaitable[None] | None:
        """
        Undo `prepare`. The claim object may be gone, the device as well.

        Called once all containers are gone, also for a device whose prepare failed halfway or
        never ran. It may be called again; nothing to do is success. If it raises, the device stays
        reserved and the call is repeated. The default does nothing.
        """
        return _nothing()

    def check(self, claim: ClaimReference, device: AllocatedDevice) -> Awaitable[bool] | bool:
        """
        Say whether a device that was prepared in this boot is still in order.

        Called when the kubelet asks again for a claim that is prepared (it was restarted, or
        another pod uses the claim). On False, or if it raises, `prepare` is called again, without
        an `unprepare` before: containers may be using the device. A driver that does not define it
        is not asked.
        """
        return _in_order()

    def close(self) -> None:
        """Release what `__init__` took. Prepared devices stay: the plugin only restarts."""


# The defaults are awaitable, as most drivers' methods are: who tests one awaits them.


async def _nothing() -> None:
    return


async def _in_order() -> bool:
    return True
