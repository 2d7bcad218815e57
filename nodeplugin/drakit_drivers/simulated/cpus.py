"""
CPUs: by NUMA node, of which claims take as many as they ask for, or one by one.

Where the API server knows no consumable capacity they are given one by one.

It must not know claims, health or taints.
"""

from __future__ import annotations

from drakit import Device, Topology
from drakit_drivers.simulated.config import CpuProfile
from drakit_drivers.simulated.sharing import in_steps

__all__ = ("cpus", "single_cpus")


def cpus(profile: CpuProfile, *, numa_nodes: int) -> list[Device]:
    """List the CPUs as the profile groups them."""
    if profile.grouping == "devices":
        return single_cpus(profile, numa_nodes=numa_nodes)
    amounts = [len(range(numa, profile.count, numa_nodes)) for numa in range(numa_nodes)]
    return [
        Device(
            name=f"{profile.prefix}-numa-{numa}",
            pool=profile.pool,
            attributes={"type": "cpu", "index": numa},
            capacity={"cpus": in_steps(amount)},
            topology=Topology(numa_node=numa),
            allow_multiple_allocations=True,
        )
        for numa, amount in enumerate(amounts)
        if amount
    ]


def single_cpus(profile: CpuProfile, *, numa_nodes: int) -> list[Device]:
    """List each CPU as a device."""
    return [
        Device(
            name=f"{profile.prefix}-{index}",
            pool=profile.pool,
            attributes={"type": "cpu", "index": index},
            capacity={"cpus": "1"},
            topology=Topology(numa_node=index % numa_nodes),
        )
        for index in range(profile.count)
    ]
