"""
Access to the API server for the measurements: creates allocated claims and the objects of the
operator's scene, and reads slices.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from bench.drivers import DRIVER
from bench.plugin import NODE
from drakit.device import ClaimReference
from drakit_daemon.kube import Session, connect, resource_path
from drakit_daemon.kube.session import Timeouts

Body = dict[str, Any]

NAMESPACE = "default"
WRITERS = 32
"""Maximum number of claims to create concurrently."""

REQUEST_SECONDS = 60.0
"""The timeout of a request. Some objects have the largest size that the API server accepts, and a
slow disk needs more than 10 s to delete thousands of Events."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_COUNTED = re.compile(
    r"^apiserver_request_total\{(?P<labels>[^}]*)\} (?P<count>\S+)$", re.MULTILINE
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_WRITES = {"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"}


@contextmanager
def connected(kubeconfig: Path) -> Generator[ApiServer]:
    """Connect in an event loop that runs only during a method of the API server."""
    timeouts = Timeouts(request_seconds=REQUEST_SECONDS)
    with asyncio.Runner() as runner:
        session = runner.run(connect(kubeconfig, user_agent="drakit-bench", timeouts=timeouts))
        try:
            yield ApiServer(session, runner)
        finally:
            runner.run(session.close())


class ApiServer:
    """Blocking calls to the API server."""

    def __init__(self, session: Session, runner: asyncio.Runner) -> None:
        self._session = session
        self._runner = runner

    def create_node(self) -> None:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        self._runner.run(self._session.create(resource_path("v1", "nodes"), node))

    def create_claims(
        self,
        devices: Sequence[tuple[str, str]],
        *,
        driver: str = DRIVER,
        prefix: str = "claim",
        shared: bool = False,
    ) -> list[ClaimReference]:
        """Create claims that are allocated on the node, one for each pool and device."""
        claims: dict[int, ClaimReference] = {}

        async def create(each: tuple[int, tuple[str, str]]) -> None:
            number, (pool, device) = each
            result = {"request": "main", "driver": driver, "pool": pool, "device": device}
            if shared:
                result["shareID"] = str(uuid.uuid4())
            claims[number] = await self._create_allocated(f"{prefix}-{number:05}", result)

        self._runner.run(each_of(enumerate(devices), create))
        return [claims[number] for number in range(len(devices))]

    def slices(self, driver: str) -> list[dict[str, Any]]:
        """Return the driver's ResourceSlices."""
        selector = {"fieldSelector": f"spec.driver={driver}"}
        return self._runner.run(self._session.list(_SLICES, params=selector)).items

    def slice_writes(self) -> int:
        """Return how many writes of ResourceSlices have succeeded, from all clients."""
        return self._runner.run(self.count_slice_writes())

    def delete_slices(self, driver: str) -> None:
        """Delete the driver's ResourceSlices."""
        for body in self.slices(driver):
            self._runner.run(self._session.delete(f"{_SLICES}/{body['metadata']['name']}"))

    def create_all(self, resource: str, bodies: Iterable[Body]) -> None:
        """Create objects of a kind that the operator watches."""
        version = "v1" if resource in ("pods", "nodes") else "resource.k8s.io/v1"

        async def create(body: Body) -> None:
            namespace = body["metadata"].get("namespace")
            path = resource_path(version, resource, namespace=namespace)
            await self._session.create(path, body)

        self._runner.run(each_of(bodies, create))

    def run(self, work: Callable[[Session], Coroutine[Any, Any, _Result]]) -> _Result:
        """Run a coroutine with the session, in its loop."""
        return self._runner.run(work(self._session))

    def has_events(self) -> bool:
        """Return whether there is an Event of the operator."""
        events = self._runner.run(self._session.list(_EVENTS)).items
        return any(each.get("reportingController") == "drakit.dev/operator" for each in events)

    async def count_slice_writes(self) -> int:
        """The same as `slice_writes`, in the session's loop."""
        writes = 0
        # Don't use a session method, because the response is not JSON.
        async with self._session.http.get(f"{self._session.server}/metrics") as response:
            response.raise_for_status()
            text = await response.text()
        for line in _COUNTED.finditer(text):
            labels = dict(_LABEL.findall(line["labels"]))
            succeeded = labels["code"].startswith("2") and labels["verb"] in _WRITES
            if labels["resource"] == "resourceslices" and succeeded:
                writes += int(float(line["count"]))
        return writes

    async def _create_allocated(self, name: str, result: Body) -> ClaimReference:
        request = {"name": "main", "exactly": {"deviceClassName": DRIVER}}
        body = await self._session.create(
            _path(),
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"namespace": NAMESPACE, "name": name},
                "spec": {"devices": {"requests": [request]}},
            },
        )
        here = {"key": "metadata.name", "operator": "In", "values": [NODE]}
        # Omit reservedFor, because the controller manager releases claims that are no longer
        # reserved for an existing pod.
        allocation = {
            "devices": {"results": [result]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [here]}]},
        }
        await self._session.replace(
            f"{_path(name)}/status", {**body, "status": {"allocation": allocation}}
        )
        return ClaimReference(namespace=NAMESPACE, name=name, uid=body["metadata"]["uid"])


async def each_of(
    wanted: Iterable[_Item],
    write: Callable[[_Item], Coroutine[Any, Any, None]],
    *,
    writers: int = WRITERS,
) -> None:
    """Create all objects, several at a time."""
    line = iter(wanted)

    async def work() -> None:
        for each in line:
            await write(each)

    async with asyncio.TaskGroup() as group:
        for _ in range(writers):
            group.create_task(work())


def _path(name: str | None = None) -> str:
    return resource_path("resource.k8s.io/v1", "resourceclaims", namespace=NAMESPACE, name=name)


_SLICES = resource_path("resource.k8s.io/v1", "resourceslices")
_EVENTS = resource_path("events.k8s.io/v1", "events", namespace=NAMESPACE)
