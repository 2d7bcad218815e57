"""Names, numbers and paths that derive from a cluster's name."""

import ipaddress

import pytest

from drakit.layout import driver_directory
from e2e.cluster.local.names import (
    LINK_NAME_LIMIT,
    MAX_NODES,
    SERVICE_SUBNET,
    Names,
    choose,
    default_cluster,
)

SOCKET_PATH_LIMIT = 107


def free(*_: object) -> bool:
    return True


def names_of(cluster: str) -> Names:
    return choose(cluster, ports_free=free, subnet_free=free)


def test_the_same_name_gives_the_same_places():
    assert names_of("a") == names_of("a")


def test_clones_at_two_places_have_two_clusters(tmp_path):
    one, other = default_cluster(tmp_path / "one"), default_cluster(tmp_path / "other")
    assert one != other
    assert names_of(one).folder != names_of(other).folder


def test_link_names_fit_the_kernel():
    names = names_of("x" * 200)
    assert len(names.link(MAX_NODES)) <= LINK_NAME_LIMIT
    assert len(names.bridge) <= LINK_NAME_LIMIT


def test_sockets_in_the_folder_have_room_for_their_names():
    kubelet = names_of("x" * 200).folder / "node-99" / "kubelet"
    socket = driver_directory(kubelet, "d" * 18) / "dra.sock"
    assert len(str(socket)) <= SOCKET_PATH_LIMIT


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


def test_ports_lie_below_those_of_clients_and_apart():
    last = Names(cluster="a", port_place=1499, subnet_place=0).ports
    before = Names(cluster="a", port_place=1498, subnet_place=0).ports
    assert last.scheduler < 32768
    assert before.scheduler < last.api_server


def test_taken_places_are_left_to_their_owners():
    first = names_of("a")

    def other_ports(ports: range) -> bool:
        return first.ports.api_server not in ports

    def other_subnet(subnet: ipaddress.IPv4Network) -> bool:
        return subnet != first.subnet

    second = choose("a", ports_free=other_ports, subnet_free=other_subnet)
    assert second.ports.api_server not in range(first.ports.api_server, first.ports.scheduler + 1)
    assert second.subnet != first.subnet


def test_a_full_machine_is_an_error():
    with pytest.raises(LookupError, match="no free place"):
        choose("a", ports_free=lambda _: False, subnet_free=free)
