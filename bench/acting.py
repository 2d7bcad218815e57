"""
Objects that the operator reconciles in addition to those in :mod:`.scene`: policies, drivers, and
maintenances with the maximum number of devices.

Each driver publishes one slice on each of its nodes, and each maintenance takes the devices of one
of these slices out of service. Does not depend on processes, clocks or budgets.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from bench.apiserver import Body
from bench.scene import node_name
from drakit_formats import crds

WRITERS = "drakit-operator"
"""The start of the operator's user agent."""


@dataclass(frozen=True, kw_only=True)
class Acting:
    """The numbers of objects."""

    policies: int = 1_000
    """The number of policies. Each selects one serial adapter on the nodes of one rack, and has a
    DeviceClass."""

    drivers: int = 50
    nodes_per_driver: int = 2
    devices: int = 64
    """The number of devices per slice, and therefore per maintenance."""

    @property
    def maintenances(self) -> int:
        return self.drivers * self.nodes_per_driver

    @property
    def rules(self) -> int:
        """The number of DeviceTaintRules: one for each device in maintenance."""
        return self.maintenances * self.devices

    def facts(self) -> str:
        return (
            f"policies={self.policies} drivers={self.drivers} maintenances={self.maintenances} "
            f"rules={self.rules}"
        )

    def policy_bodies(self) -> Iterator[Body]:
        for number in range(self.policies):
            match = {"subsystem": "tty", "attributes": {"serial": f"SN-{number:06}"}}
            selector = {"matchLabels": {"lab.example/rack": f"rack-{number % 157}"}}
            yield _object(
                "HostDevicePolicy", f"serial-{number:04}", match=[match], nodeSelector=selector
            )

    def driver_bodies(self) -> Iterator[Body]:
        for number in range(self.drivers):
            hosts = [node_name(each) for each in self._nodes(number)]
            host = {"key": "kubernetes.io/hostname", "operator": "In", "values": hosts}
            yield _object(
                *("DeviceDriver", _driver(number)),
                version="1.0.0",
                nodeSelector={"matchExpressions": [host]},
                taintAfterSeconds=300,
            )

    def slice_bodies(self) -> Iterator[Body]:
        for number in range(self.drivers):
            for node in self._nodes(number):
                yield self.slice_body(number, node)

    def slice_body(self, driver: int, node: int, *, generation: int = 1) -> Body:
        """Return a driver's slice on a node. In even generations, a device is missing."""
        name, devices = node_name(node), self.devices - (generation % 2 == 0)
        return {
            "metadata": {"name": f"acting-{driver:02}-{node:04}"},
            "spec": {
                "driver": _driver(driver),
                "nodeName": name,
                "pool": {"name": name, "generation": generation, "resourceSliceCount": 1},
                "devices": [{"name": f"dev-{each:02}"} for each in range(devices)],
            },
        }

    def maintenance_bodies(self) -> Iterator[Body]:
        for number in range(self.drivers):
            for node in self._nodes(number):
                yield _object(
                    *("DeviceMaintenance", f"fix-{number:02}-{node:04}"),
                    devices={"driver": _driver(number), "node": node_name(node)},
                    mode="Cordon",
                    reason="a benchmark",
                )

    def _nodes(self, driver: int) -> range:
        first = driver * self.nodes_per_driver
        return range(first, first + self.nodes_per_driver)


def _driver(number: int) -> str:
    return f"acting-{number:02}.bench.drakit.dev"


def _object(kind: str, name: str, **spec: Any) -> Body:
    return {
        "apiVersion": crds.API_VERSION,
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }


# ---------------------------------------------------------------- the audit log


def writes_of_operator(
    records: Iterable[Mapping[str, Any]], *, since: str = ""
) -> Iterator[Mapping[str, Any]]:
    """Return the operator's writes since a time, except those of its Lease and reviews."""
    for record in records:
        of = record.get("objectRef", {})
        if (
            record.get("userAgent", "").startswith(WRITERS)
            and record["verb"] in ("create", "update", "patch", "delete", "deletecollection")
            and of.get("resource") not in ("leases", "selfsubjectaccessreviews")
            and record["stage"] == "ResponseComplete"
            and record["requestReceivedTimestamp"] >= since
        ):
            yield record


def most_updates(writes: Iterable[Mapping[str, Any]], *, seconds: float) -> int:
    """Return the maximum number of status updates for one object in any period of this many
    seconds."""
    times: dict[tuple[str, str], list[float]] = {}
    for record in writes:
        of = record["objectRef"]
        if of.get("subresource") == "status":
            at = datetime.fromisoformat(record["requestReceivedTimestamp"]).timestamp()
            times.setdefault((of["resource"], of["name"]), []).append(at)
    return max(
        (
            index + 1 - bisect_left(each, at - seconds)
            for each in map(sorted, times.values())
            for index, at in enumerate(each)
        ),
        default=0,
    )
