"""Names, numbers and paths that derive from a cluster's name."""

import ipaddress

import pytest

from e2e.cluster.local.names import (
    MAX_NODES,
    SERVICE_SUBNET,
    Names,
    choose,
)


def free(*_: object) -> bool:
    return True


def names_of(cluster: str) -> Names:
    return choose(cluster, ports_free=free, subnet_free=free)


@pytest.mark.parametrize("place", [0, 51, 111])
def test_subnets_of_a_cluster_lie_apart_from_each_other(place):
    names = Names(cluster="a", port_place=0, subnet_place=place)
    numbers = range(1, MAX_NODES + 1)
    pods = [names.node_pods(number) for number in numbers]
    assert len(set(pods)) == MAX_NODES
    assert all(subnet.subnet_of(names.pod_subnet) for subnet in pods)
    assert names.pod_subnet.subnet_of(names.subnet)
    assert not names.node_subnet.overlaps(names.pod_subnet)
    assert not names.subnet.overlaps(SERVICE_SUBNET)
    addresses = {names.node_ip(number) for number in numbers}
    assert len(addresses) == MAX_NODES
    assert names.gateway not in addresses


def test_taken_places_are_left_to_their_owners():
    first = names_of("a")

    def other_ports(ports: range) -> bool:
        return first.ports.api_server not in ports

    def other_subnet(subnet: ipaddress.IPv4Network) -> bool:
        return subnet != first.subnet

    second = choose("a", ports_free=other_ports, subnet_free=other_subnet)
    assert second.ports.api_server not in range(first.ports.api_server, first.ports.scheduler + 1)
    assert second.subnet != first.subnet
