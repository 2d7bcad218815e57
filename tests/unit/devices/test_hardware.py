"""Devices that do not fit while claims are unprepared are tainted in the meantime."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drakit import Device, Inventory
from drakit.device import Capacity, CapacityRange, CounterSet
from drakit_nodeplugin.state.holds import (
    HeldDevice,
    PoolContent,
    blocked_by_unpreparing,
    units_of,
)
from tests.unit.devices.conftest import DRIVER, NODE, Node, shown

GIB = 2**30 * 10**9


def part(name: str, memory: str, *, card: str = "card") -> Device:
    return Device(name=name, consumes={card: {"memory": memory}})


CARD = (part("whole", "40Gi"), part("half-0", "20Gi"), part("half-1", "20Gi"))
OTHER = (part("small", "1Gi", card="other"), Device(name="plain"))
SETS = tuple(CounterSet(name=name, counters={"memory": "40Gi"}) for name in ("card", "other"))
CONTENT = PoolContent(devices={d.name: d for d in (*CARD, *OTHER)}, counter_sets=SETS)


def held(name: str, *, known: bool = True, **fields) -> HeldDevice:
    consumes = CONTENT.devices[name].consumes if name in CONTENT.devices else {}
    amounts = {card: units_of(counters) for card, counters in consumes.items()}
    return HeldDevice(pool=NODE, device=name, consumes=amounts if known else None, **fields)


def leaving(name: str, **fields) -> HeldDevice:
    return held(name, unpreparing=True, **fields)


HOLDERS = {
    "nothing-is-unpreparing": ([held("whole")], set()),
    "a-whole-device": ([leaving("whole")], {"whole", "half-0", "half-1"}),
    "a-partition": ([leaving("half-0")], {"half-0", "whole"}),
    "what-is-prepared-beside-it-stays-as-it-is": (
        [leaving("half-0"), held("half-1")],
        {"half-0", "whole"},
    ),
    "a-device-without-counters": ([leaving("plain")], {"plain"}),
    "a-device-that-is-not-listed": ([leaving("gone")], {"gone"}),
    "a-rebuilt-row-is-completed-from-the-inventory": (
        [leaving("whole", known=False)],
        {"whole", "half-0", "half-1"},
    ),
    "a-rebuilt-row-of-a-device-that-is-not-listed-blocks-all-that-consume": (
        [leaving("gone", known=False)],
        {"gone", "whole", "half-0", "half-1", "small"},
    ),
}


@pytest.mark.parametrize(("holders", "expected"), HOLDERS.values(), ids=HOLDERS)
def test_new_claims_cannot_have(holders, expected):
    assert blocked_by_unpreparing(CONTENT, holders) == expected


RANGE = CapacityRange(min="10G", step="10G")


@pytest.mark.parametrize(
    ("capacity", "full_at"),
    [
        pytest.param("100G", "1G", id="without-a-policy-a-share-takes-all"),
        pytest.param(
            Capacity(value="100G", default="20G", valid_range=RANGE),
            "91G",
            id="the-least-of-a-range",
        ),
        pytest.param(
            Capacity(value="100G", default="50G", valid_values=("50G", "90G")), "51G", id="values"
        ),
        pytest.param(Capacity(value="100G", default="20G"), "100G", id="any-amount"),
    ],
)
def test_a_device_is_tainted_if_not_even_its_smallest_share_fits(capacity, full_at):
    nic = Device(name="nic", capacity={"bandwidth": capacity}, allow_multiple_allocations=True)
    content = PoolContent(devices={"nic": nic})
    share = HeldDevice(
        pool=NODE,
        device="nic",
        consumes={},
        exclusive=False,
        unpreparing=True,
        shared=units_of({"bandwidth": full_at}),
    )
    assert blocked_by_unpreparing(content, [share]) == {"nic"}
    (name,) = share.shared or ()
    room = replace(share, shared={name: (share.shared or {})[name] - 10**18})
    assert blocked_by_unpreparing(content, [room]) == set()
    assert blocked_by_unpreparing(content, [replace(share, shared=None)]) == {"nic"}, (
        "it may consume all"
    )


@pytest.mark.looptime
async def test_a_device_that_does_not_fit_is_tainted_after_any_change_of_the_inventory(node: Node):
    inventory = Inventory(devices=CARD, counter_sets=SETS[:1])
    async with node.plugin() as manager:
        manager.set_unpreparing([leaving("whole")])
        manager.replaced(DRIVER, Inventory(devices=(CARD[0],), counter_sets=SETS[:1]))
        assert shown(manager.publication()) == {NODE: {"whole": ["unpreparing"]}}
        manager.replaced(DRIVER, inventory)
        tainted = {NODE: {key: ["unpreparing"] for key in ("whole", "half-0", "half-1")}}
        assert shown(manager.publication()) == tainted
        larger = CounterSet(name="card", counters={"memory": "60Gi"})
        manager.replaced(DRIVER, Inventory(devices=CARD, counter_sets=(larger,)))
        free = {NODE: {"whole": ["unpreparing"], "half-0": [], "half-1": []}}
        assert shown(manager.publication()) == free
        manager.replaced(DRIVER, inventory)
        assert shown(manager.publication()) == tainted
        seen = manager.revision.number
        manager.set_unpreparing([leaving("whole")])
        assert shown(manager.publication()) == tainted
        assert manager.revision.number == seen, "the same again is no change"
        manager.set_unpreparing([held("whole")])
        assert shown(manager.publication()) == {NODE: {key: [] for key in tainted[NODE]}}


@pytest.mark.looptime
async def test_hardware_is_read_from_the_main_inventory_while_the_endpoint_is_there(node: Node):
    fallback = (Device(name="whole"), Device(name="spare"))
    async with node.plugin() as manager:
        hardware = manager.hardware()
        assert hardware is not None
        assert hardware.device(NODE, "whole") is None
        manager.replaced(DRIVER, Inventory(devices=CARD, counter_sets=SETS[:1], fallback=fallback))
        hardware = manager.hardware()
        assert hardware is not None
        assert hardware.device(NODE, "whole") == CARD[0]
        assert hardware.device(NODE, "spare") == fallback[1]
        assert hardware.totals(NODE, "card") == {"memory": 40 * GIB}
        manager.stopped(DRIVER, "it ended")
        hardware = manager.hardware()
        assert hardware is not None
        assert hardware.device(NODE, "whole") is None
