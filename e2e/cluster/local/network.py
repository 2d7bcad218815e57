"""
The network of a local cluster: a bridge on this machine, and a pair of links for each node.

The machine's firewall and forwarding are not changed: the API server reaches pods through routes,
and nodes reach each other through the bridge. A node's own rules and links are in its network
namespace and end with it.
"""

import ipaddress
import json
import socket
from collections.abc import Sequence

from ..api import run
from .boxes import Box
from .names import Names

CUT = "drakit-cut"
"""The comment of the rules that cut off a node or an address."""


def ports_free(ports: range) -> bool:
    """Return whether no process on this machine listens on any of the ports."""
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As servers do: ignore connections that are still being closed.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                return False
    return True


def used_subnets() -> list[ipaddress.IPv4Network]:
    """Return the IPv4 subnets to which this machine has routes, except the default route."""
    routes = json.loads(_ip("-4", "-json", "route", "show", "table", "all") or "[]")
    destinations = (str(route.get("dst", "default")) for route in routes)
    return [ipaddress.IPv4Network(dst, strict=False) for dst in destinations if dst != "default"]


def make_bridge(names: Names) -> None:
    """Create the cluster's bridge, which also has the API server's address for pods."""
    _ip("link", "add", names.bridge, "type", "bridge")
    _ip("addr", "add", f"{names.gateway}/{names.node_subnet.prefixlen}", "dev", names.bridge)
    _ip("link", "set", names.bridge, "up")


def remove_bridge(names: Names) -> None:
    """Remove the bridge, its links and its routes."""
    for link in [*links(names), names.bridge]:
        run(["ip", "link", "del", link], check=False)


def links(names: Names) -> list[str]:
    """Return the links of the cluster's nodes on this machine."""
    found = json.loads(_ip("-json", "link", "show") or "[]")
    return [str(link["ifname"]) for link in found if link["ifname"].startswith(f"{names.bridge}n")]


def join(names: Names, node: int, box: Box, *, others: Sequence[tuple[int, Box]]) -> None:
    """Connect a node to the bridge, and create the routes between it, this machine and the other
    nodes."""
    link = names.link(node)
    run(["ip", "link", "del", link], check=False)
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(box.pid))
    _ip("link", "set", link, "master", names.bridge, "up")
    address = names.node_ip(node)
    commands = [
        "link set lo up",
        f"addr add {address}/{names.node_subnet.prefixlen} dev eth0",
        "link set eth0 up",
        f"route add default via {names.gateway}",
        *(f"route replace {names.node_pods(j)} via {names.node_ip(j)}" for j, _ in others),
    ]
    _ip_batch(commands, box)
    for _, other in others:
        _ip_batch([f"route replace {names.node_pods(node)} via {address}"], other)
    _ip("route", "replace", str(names.node_pods(node)), "via", str(address), "dev", names.bridge)


def cut(names: Names, box: Box, *, address: str | None = None) -> None:
    """
    Drop packets between the API server's machine and a node, or one address of the node: its own,
    which processes outside pods use, or a pod's.

    Uses the table `mangle`, because kube-proxy does not write to it. After routing, the service's
    address has already become the API server's, and the pod's is still its own. Before routing,
    both are unchanged.
    """
    for rule in _cut_rules(names, address):
        if run([*box.enter(), *_IPTABLES, "-C", *rule], check=False).returncode != 0:
            run([*box.enter(), *_IPTABLES, "-I", *rule])


def heal(names: Names, box: Box, *, address: str | None = None) -> None:
    """Undo a cut. Does nothing if there is none."""
    for rule in _cut_rules(names, address):
        run([*box.enter(), *_IPTABLES, "-D", *rule], check=False)


def heal_all(box: Box) -> None:
    """Undo every cut of a node. No other program has rules in these chains."""
    for chain in ("PREROUTING", "POSTROUTING"):
        run([*box.enter(), *_IPTABLES, "-F", chain])


_IPTABLES = ("iptables", "-w", "5", "-t", "mangle")


def _cut_rules(names: Names, address: str | None) -> list[list[str]]:
    to = ["POSTROUTING", "-d", str(names.gateway), *(["-s", address] if address else [])]
    back = ["PREROUTING", "-s", str(names.gateway), *(["-d", address] if address else [])]
    drop = ["-m", "comment", "--comment", CUT, "-j", "DROP"]
    return [[*to, *drop], [*back, *drop]]


def _ip(*arguments: str) -> str:
    return run(["ip", *arguments]).stdout


def _ip_batch(commands: Sequence[str], box: Box) -> None:
    run([*box.enter(), "ip", "-batch", "-"], input="\n".join(commands) + "\n")
