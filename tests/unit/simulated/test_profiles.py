"""The simulated devices: for every configuration, the API server accepts them."""

from __future__ import annotations

from typing import Any

import pytest

from drakit import Capacity, Device, Inventory, Version
from drakit.quantity import parse_quantity
from drakit_drivers.simulated import SimulatedConfig
from drakit_drivers.simulated.control import Control
from drakit_drivers.simulated.inventory import all_devices, commanded
from drakit_formats.resource.inventory import check_inventory


def inventory(**config: Any) -> Inventory:
    return all_devices(SimulatedConfig.model_validate(config))


def named(devices) -> dict[str, Device]:
    return {device.name: device for device in devices}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"nic": {"listAttributes": True}}, id="list-attributes"),
        pytest.param({"nic": {"bandwidthGbps": 1}, "cpu": {"count": 3}}, id="one-step-is-all"),
        pytest.param({"cpu": {"grouping": "devices", "pool": ""}}, id="cpus-one-by-one"),
        pytest.param(
            {
                "numaNodes": 3,
                "gpu": {
                    "count": 101,
                    "prefix": "g" * 40,
                    "pool": "gpus",
                    "model": "M" * 64,
                    "memoryGi": 1,
                    "computeSlices": 8,
                    "partitions": [8, 7, 6, 5, 4, 3, 2, 1],
                },
                "nic": {"count": 101, "vlans": list(range(1, 17)), "listAttributes": True},
                "cpu": {"count": 1001, "grouping": "devices"},
            },
            id="many-with-long-names",
        ),
    ],
)
def test_the_api_server_takes_every_device(config):
    parsed = SimulatedConfig.model_validate(config)
    everything = commanded(all_devices(parsed), Control(), driver=parsed.driver_name)
    checked = check_inventory(everything, node="node-1")
    assert checked.rejected == {}
    assert len(checked.devices) == len(everything.devices)
    assert len(checked.counter_sets) == len(everything.counter_sets)
    assert checked.fallback is not None
    assert len(checked.fallback) == len(everything.fallback or ())


def test_a_gpu_and_its_partitions_are_never_given_out_together():
    found = inventory(gpu={"count": 2, "computeSlices": 4, "memoryGi": 40, "partitions": [1, 3]})
    sets = {each.name: each.counters for each in found.counter_sets}
    assert sets == {
        f"gpu-{index}": {"compute": "4", "memory": f"{40 * 1024}Mi"} for index in range(2)
    }
    devices = named(device for device in found.devices if device.consumes)
    assert list(devices) == [
        name
        for index in range(2)
        for name in (
            f"gpu-{index}",
            f"gpu-{index}-3g-0",
            *(f"gpu-{index}-1g-{number}" for number in range(4)),
        )
    ]
    assert devices["gpu-0"].consumes == {"gpu-0": sets["gpu-0"]}
    for size in (1, 3):
        partition = devices[f"gpu-1-{size}g-0"]
        assert partition.consumes == {
            "gpu-1": {"compute": str(size), "memory": f"{size * 10240}Mi"}
        }
        assert partition.attributes["parent"] == "gpu-1"
        assert partition.attributes["profile"] == f"{size}g"


@pytest.mark.parametrize("slices", range(1, 9))
def test_as_many_partitions_of_a_size_as_are_published_fit_into_a_gpu(slices):
    found = inventory(
        gpu={"computeSlices": slices, "memoryGi": 7, "partitions": list(range(1, slices + 1))}
    )
    (there, _) = (each.counters for each in found.counter_sets)
    for size in range(1, slices + 1):
        partitions = [
            device.consumes["gpu-0"]
            for device in found.devices
            if device.name.startswith(f"gpu-0-{size}g-")
        ]
        assert len(partitions) == slices // size
        for counter, amount in there.items():
            taken = sum(parse_quantity(each[counter]) for each in partitions)
            assert taken <= parse_quantity(amount)


def test_without_partitions_a_gpu_counts_nothing():
    found = inventory(gpu={"partitions": []})
    assert found.counter_sets == ()
    assert not [device for device in found.devices if device.consumes]
    assert {"gpu-0", "gpu-1"} <= named(found.devices).keys()


def test_the_attributes_of_a_gpu():
    (gpu, *_) = inventory(gpu={"driverVersion": "3.1.0", "memoryGi": 16}).devices
    assert gpu.attributes["type"] == "gpu"
    assert gpu.attributes["driverVersion"] == Version("3.1.0")
    assert gpu.capacity == {"memory": "16Gi"}


def test_gpus_and_interfaces_of_a_numa_node_share_a_pcie_root_and_no_address():
    found = inventory(numaNodes=2, gpu={"count": 70, "partitions": []}, nic={"count": 70})
    places = [device.topology for device in found.devices if device.topology.pci_bus_id]
    assert len(places) == 140
    assert len({place.pci_bus_id for place in places}) == 140
    assert {(place.numa_node, place.pcie_root) for place in places} == {
        (0, "pci0000:00"),
        (1, "pci0001:00"),
    }


def test_claims_share_an_interface_by_the_gigabit():
    nic = named(inventory(nic={"bandwidthGbps": 25}).devices)["nic-0"]
    assert nic.allow_multiple_allocations
    bandwidth = nic.capacity["bandwidth"]
    assert isinstance(bandwidth, Capacity)
    assert (bandwidth.value, bandwidth.default) == ("25G", "1G")
    assert bandwidth.valid_range is not None
    assert (bandwidth.valid_range.min, bandwidth.valid_range.step) == ("1G", "1G")


@pytest.mark.parametrize(
    ("switched", "vlans"),
    [pytest.param(False, None, id="off"), pytest.param(True, (5, 6), id="on")],
)
def test_lists_are_published_where_the_admin_allows_it(switched, vlans):
    nic = named(inventory(nic={"vlans": [5, 6], "listAttributes": switched}).devices)["nic-0"]
    assert nic.attributes.get("vlans") == vlans


def test_cpus_are_counted_by_numa_node_in_a_pool_of_their_own():
    found = inventory(numaNodes=4, cpu={"count": 6})
    groups = [device for device in found.devices if device.pool == "cpus"]
    amounts = [device.capacity["cpus"] for device in groups]
    assert [device.name for device in groups] == [f"cpu-numa-{numa}" for numa in range(4)]
    assert [amount.value for amount in amounts if isinstance(amount, Capacity)] == list("2211")
    assert [device.topology.numa_node for device in groups] == [0, 1, 2, 3]


def test_the_fallback_needs_no_optional_feature():
    found = inventory(nic={"listAttributes": True})
    fallback = named(found.fallback)
    assert list(fallback) == ["gpu-0", "gpu-1", "nic-0", *(f"cpu-{index}" for index in range(8))]
    for device in fallback.values():
        assert not device.consumes
        assert not device.allow_multiple_allocations
        assert all(isinstance(amount, str) for amount in device.capacity.values())
        assert not [value for value in device.attributes.values() if isinstance(value, tuple)]
