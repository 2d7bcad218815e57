"""
Every name, number and path of a local cluster, derived from the cluster's name.

Two clusters on one machine must not share ports, links, subnets, cgroups or folders. A hash of the
name selects them. If two hashes collide (there are few ports and subnets), the next free one is
used, and stored in the record of the cluster. This module does not access the machine; callers pass
the ports and subnets in use.
"""

import hashlib
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/var/lib/drakit-rig")
"""Directory of all clusters. The path is short because a socket's path has 107 bytes. It is on a
disk because containerd's snapshots do not work on a tmpfs or an overlay."""

SERVICE_SUBNET = ipaddress.IPv4Network("10.96.0.0/16")
"""The same in every cluster, because it exists only in the nodes' network namespaces."""

FIRST_PORT, PORT_PLACES, PORTS_PER_CLUSTER = 20000, 1500, 8
"""From 20000 to 31999, below the ports that the kernel assigns to clients."""

FIRST_SUBNET, SUBNET_PLACES = 128, 112
"""10.128.0.0/16 to 10.239.0.0/16."""

MAX_NODES = 99

LINK_NAME_LIMIT = 15


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Ports of the control plane, all in this machine's own network."""

    api_server: int
    etcd: int
    etcd_peer: int
    controller_manager: int
    scheduler: int


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of one cluster. Nodes are numbered from 1."""

    cluster: str
    port_place: int
    subnet_place: int

    @property
    def id(self) -> str:
        return cluster_id(self.cluster)

    @property
    def folder(self) -> Path:
        return ROOT / self.id

    @property
    def ports(self) -> Ports:
        first = FIRST_PORT + self.port_place * PORTS_PER_CLUSTER
        return Ports(
            api_server=first,
            etcd=first + 1,
            etcd_peer=first + 2,
            controller_manager=first + 3,
            scheduler=first + 4,
        )

    @property
    def subnet(self) -> ipaddress.IPv4Network:
        return subnet(self.subnet_place)

    @property
    def node_subnet(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network((self.subnet.network_address, 24))

    @property
    def pod_subnet(self) -> ipaddress.IPv4Network:
        """The upper half, for the pods of all nodes."""
        return list(self.subnet.subnets(prefixlen_diff=1))[1]

    @property
    def gateway(self) -> ipaddress.IPv4Address:
        """This machine's address on the nodes' network, at which nodes and pods reach the API
        server."""
        return self.node_subnet[254]

    @property
    def bridge(self) -> str:
        return f"dk{self.id}"

    def link(self, node: int) -> str:
        return f"dk{self.id}n{node}"

    def node(self, node: int) -> str:
        return f"node-{node}"

    def node_ip(self, node: int) -> ipaddress.IPv4Address:
        return self.node_subnet[node]

    def node_pods(self, node: int) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network((int(self.pod_subnet.network_address) + (node << 8), 24))

    def cgroup(self, node: int) -> str:
        return f"drakit-{self.id}-{self.node(node)}"

    @property
    def cgroup_prefix(self) -> str:
        return f"drakit-{self.id}-"


def cluster_id(cluster: str) -> str:
    """Return eight hexadecimal digits for a cluster's name."""
    return hashlib.sha256(cluster.encode()).hexdigest()[:8]


def default_cluster(repository: Path) -> str:
    """Return the name of a clone's cluster. Clones at different paths have different names."""
    return f"drakit-{cluster_id(str(repository.resolve()))[:6]}"


def subnet(place: int) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(f"10.{FIRST_SUBNET + place}.0.0/16")


def choose(
    cluster: str,
    *,
    ports_free: Callable[[range], bool],
    subnet_free: Callable[[ipaddress.IPv4Network], bool],
) -> Names:
    """Choose the ports and subnet of a cluster: those of its hash, or the next free ones."""
    digest = int(cluster_id(cluster), 16)

    def ports_at(place: int) -> bool:
        first = FIRST_PORT + place * PORTS_PER_CLUSTER
        return ports_free(range(first, first + PORTS_PER_CLUSTER))

    return Names(
        cluster=cluster,
        port_place=_probe(digest, PORT_PLACES, ports_at, what="ports from 20000 to 31999"),
        subnet_place=_probe(
            digest,
            SUBNET_PLACES,
            lambda p: subnet_free(subnet(p)),
            what="subnets below 10.128.0.0/9",
        ),
    )


def _probe(start: int, places: int, free: Callable[[int], bool], *, what: str) -> int:
    for step in range(places):
        place = (start + step) % places
        if free(place):
            return place
    raise LookupError(f"no free place is left among the {what}")
