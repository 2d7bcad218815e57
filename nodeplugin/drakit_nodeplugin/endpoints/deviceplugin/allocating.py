"""
From a claim to calls of device plugins: one Allocate for each of its requests, with all of the
request's devices.

A device plugin knows containers and no claims: each request is to it what a container was to the
kubelet. A container that uses a request gets all of its devices, so what the plugin gives goes to
the first of them. There is nothing to call when a claim ends.

It must not know how a call waits for its devices, the checkpoint, or the kubelet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from drakit.device import AllocatedClaim, AllocatedDevice, Edits
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.deviceplugin.connection import (
    PluginConnection,
    PluginFailedError,
)
from drakit_nodeplugin.endpoints.deviceplugin.edits import (
    BadAnswerError,
    ContainerAnswer,
    edits_of,
    host_paths,
    lost_annotations,
)
from drakit_nodeplugin.endpoints.deviceplugin.endpoint import DevicePluginEndpoint, PluginAwayError
from drakit_nodeplugin.endpoints.deviceplugin.names import resource_of
from drakit_nodeplugin.endpoints.deviceplugin.remarks import Diagnostics
from drakit_nodeplugin.endpoints.errors import DeviceFailedError
from drakit_nodeplugin.endpoints.host_paths import (
    MAX_NODES,
    HostDevices,
    TooManyNodesError,
)

__all__ = ("Allocating",)


class Allocating:
    """What a driver object would be: called for claims by :class:`.DriverCalls`."""

    def __init__(
        self,
        driver: str,
        *,
        find: Callable[[str], DevicePluginEndpoint | None],
        devices: HostDevices,
        remarks: Diagnostics,
    ) -> None:
        """`find` gives the endpoint that has a pool, if there is one."""
        self._driver = driver
        self._find = find
        self._devices = devices
        self._remarks = remarks

    def away(self, pool: str) -> PluginAwayError | None:
        """Say why the devices of a pool cannot be prepared now; None if they can."""
        endpoint = self._find(pool)
        if endpoint is not None and endpoint.away is None:
            return None
        reason = "it has not registered yet"
        if endpoint is not None:
            reason = endpoint.away or reason
        resource = endpoint.resource if endpoint is not None else resource_of(pool)
        return PluginAwayError(
            driver=self._driver, resource=resource or f"pool {pool}", reason=reason
        )

    async def prepare_claims(
        self, claims: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[Edits]]:
        """Allocate the devices of each request, the requests of a claim side by side."""
        return {item.claim.uid: await self._prepare(item.devices) for item in claims}

    async def _prepare(self, devices: Sequence[AllocatedDevice]) -> Sequence[Edits]:
        groups: dict[tuple[str, str], list[int]] = {}
        for index, device in enumerate(devices):
            groups.setdefault((device.pool, device.request), []).append(index)
        results = await asyncio.gather(
            *(self._allocate(devices, indexes) for indexes in groups.values()),
            return_exceptions=True,
        )
        edits = [Edits()] * len(devices)
        for indexes, result in zip(groups.values(), results, strict=True):
            if isinstance(result, BaseException):
                raise result
            edits[indexes[0]] = result
        return edits

    async def unprepare_claims(self, claims: Sequence[AllocatedClaim]) -> Mapping[str, None]:
        """There is nothing to call: a device plugin is not notified when a claim ends."""
        return {item.claim.uid: None for item in claims}

    # ------------------------------------------------------------ one request

    async def _allocate(self, devices: Sequence[AllocatedDevice], indexes: Sequence[int]) -> Edits:
        first = indexes[0]
        pool = devices[first].pool
        endpoint = self._find(pool)
        connection = None if endpoint is None else endpoint.connection
        if endpoint is None or connection is None:
            raise DeviceFailedError(str(self.away(pool)), index=first)
        resource = endpoint.resource
        ids = [self._id_of(devices, index, connection, resource=resource) for index in indexes]
        try:
            answer = await connection.allocate(ids)
            if connection.pre_start_required:
                # The kubelet calls it before each start of a container; of that, nobody tells us.
                await connection.pre_start(ids)
        except PluginFailedError as error:
            raise DeviceFailedError(str(error), index=first) from None
        if lost_annotations(answer):
            note = (
                f"the device plugin of {resource} answers Allocate with annotations that name no "
                f"CDI devices; a container cannot get them by a claim; they are left out, and all "
                f"else works"
            )
            self._remarks.say("AnnotationsUnsupported", note, once=True)
        rights = endpoint.rights
        try:
            edits, problem = await asyncio.to_thread(self._edits, answer, rights)
        except (BadAnswerError, TooManyNodesError) as error:
            text = (
                f"the device plugin of {resource} answered Allocate {error}; this is a fault of "
                f"the device plugin"
            )
            raise DeviceFailedError(text, index=first) from None
        if problem is not None:
            text = f"the device plugin of {resource} {problem}"
            raise DeviceFailedError(text, index=first)
        return edits

    def _id_of(
        self,
        devices: Sequence[AllocatedDevice],
        index: int,
        connection: PluginConnection,
        *,
        resource: str,
    ) -> str:
        device = devices[index]
        if device.admin_access:
            # The kubelet never allocates a device that is in use, and plugins may rely on it.
            text = (
                f"the device plugin of {resource} can only allocate a device, which may be in "
                f"use; a claim with adminAccess cannot have it"
            )
            raise DeviceFailedError(text, index=index)
        identity = connection.identity_in_plugin(device.name)
        if identity is None:
            text = (
                f"the device plugin of {resource} does not list it any more; delete the pod so "
                f"that another device is found for it"
            )
            raise DeviceFailedError(text, index=index)
        return identity

    def _edits(self, answer: ContainerAnswer, rights: Rights | None) -> tuple[Edits, str | None]:
        """Return the edits, and the problem if the allow list refuses one of them."""
        nodes: dict[str, list[tuple[str, str]]] = {}
        found = 0
        for path in host_paths(answer):
            nodes[path] = self._devices.nodes(path)
            found += len(nodes[path])
            if found > MAX_NODES:
                raise TooManyNodesError(f"{path}, with what is named before it,")
        edits = edits_of(answer, nodes, restricted=rights is not None)
        return edits, None if rights is None else rights.edits.problem(edits)
