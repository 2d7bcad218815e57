"""One suite of the backend contract for all homes of a driver; :mod:`.cases` has its cases."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from drakit import (
    AllocatedClaim,
    AllocatedDevice,
    CounterSet,
    Device,
    Health,
    Inventory,
    PreparedDevice,
)
from drakit_driver.plugin_devices import DevicePluginOptions, plugin_devices, resource_of
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError
from drakit_formats.cdi import InvalidEditsError, container_edits
from drakit_formats.resource.inventory import shown_place
from tests.unit.endpoints.backend.conftest import Listener, new_endpoint
from tests.unit.endpoints.camera import NODE, running, until
from tests.unit.homes.cases import (
    CALLS,
    HEALTH,
    HELD,
    LISTS,
    MARK,
    ONE,
    PARAMETERS,
    TWO,
    WHITE,
    Called,
    Configured,
    Failed,
    Listed,
    given,
)
from tests.unit.homes.homes import (
    DRIVER,
    GO,
    PLUGIN,
    Does,
    Home,
    allocated,
    claim,
    instance,
    seen,
    sendable,
    successor,
)
from tests.unit.resource.test_checks import BAD, CAPACITIES, GOOD

# The first build of the Go driver does not count.
pytestmark = pytest.mark.timeout(30, func_only=True)

BEFORE = Inventory(devices=HELD)


@pytest.fixture
async def home(start):
    async with start(BEFORE) as home:
        yield home


@pytest.mark.parametrize("case", LISTS, ids=lambda case: case.id)
async def test_a_list(kind: str, start, case: Listed):
    if kind in case.not_in:
        pytest.skip(case.not_in[kind])
    async with start(BEFORE) as home:
        await home.list(case.inventory)
        after = await home.inventory(last=MARK.name)
    found = seen(BEFORE, after)
    wanted = case.rejected
    if kind in case.words:
        _, wanted = case.words[kind]
    assert len(found.rejected) == len(wanted), found.rejected
    for place, sentence in wanted.items():
        (text,) = found.rejected.values() if not place else [found.rejected[place]]
        assert text.removeprefix("as a fallback, ").startswith(sentence)
    published = case.published
    if published is None:
        published = {
            f"{each.pool}/{each.name}".lstrip("/"): each for each in case.inventory.devices
        }
    assert [*found.published.items()] == [*published.items()]
    assert found.evicted == set(case.evicted)
    if case.id == "every-field":
        assert after.counter_sets == tuple(case.inventory.counter_sets)
        assert after.fallback == case.inventory.fallback
        assert after.ordered
        assert after.partition_type_attribute == case.inventory.partition_type_attribute
        kinds = {name: type(value) for name, value in found.published["usb/all"].attributes.items()}
        assert (kinds["int"], kinds["flag"]) == (int, bool)


@pytest.mark.parametrize("part", range(3))
async def test_devices_at_and_beyond_their_limits(start, part: int):
    """All devices of the tables of the checks, in one inventory."""
    bad = {f"bad-{n}": each for n, each in enumerate([*BAD.values(), *SHARED])}
    names = sorted(bad)[part::3]
    given_ = {name: (_named(name, bad[name][0]), bad[name][1]) for name in names}
    good = [_named(f"good-{n}", each) for n, each in enumerate(GOOD.values())]
    async with start(BEFORE) as home:
        if home.kind == GO:  # what its types do not have is refused by the compiler
            given_ = {name: each for name, each in given_.items() if sendable(each[0])}
        devices = [device for device, _ in given_.values() if isinstance(device, Device)]
        sets = [CounterSet(name=n, counters={f"m{k}": "1" for k in range(32)}) for n in "st"]
        listed = Inventory(devices=(*devices, *good, MARK), counter_sets=sets)
        await home.list(listed)
        after = await home.inventory(last=MARK.name)
    found = seen(BEFORE, after)
    assert len(devices) > 10
    for device, problem in given_.values():
        if isinstance(device, Device):
            assert problem in found.rejected[shown_place(device.pool, device.name)]
    published = {f"{each.pool}/{each.name}".lstrip("/"): each for each in (*good, MARK)}
    assert {name: found.published[name] for name in published} == published
    assert found.published.keys() == published.keys()


SHARED = [
    (Device(name="c", allow_multiple_allocations=True, capacity={"m": each}), problem)
    for each, problem in CAPACITIES.values()
    if problem is not None
]


def _named(name: str, device: object) -> object:
    """Give a device a name of its own, unless its name is what the table is about."""
    is_plain = isinstance(device, Device) and device.name == "c"
    return replace(device, name=name) if is_plain else device


def test_a_device_plugin_lists_a_device_beyond_its_limits_as_little():
    options = DevicePluginOptions(resources=(resource_of("gpu.example.com/gpu"),))
    for device, problem in (*BAD.values(), *SHARED):
        if problem == "too long":
            continue  # the kubelet's IDs have no node's name before the pool
        listed = Inventory(devices=(device, MARK))
        found = plugin_devices(listed, driver=DRIVER, options=options)
        assert [*found.by_resource["gpu.example.com/gpu"]] == ["mark"]
        assert problem in found.problems[0]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.id)
async def test_a_call(home: Home, case: Called):
    if home.kind in case.not_in:
        pytest.skip(case.not_in[home.kind])
    await home.does(**case.does)
    wanted = case.go if home.kind == GO and case.go is not None else case.answers
    answers = await home.call(case.operation, *case.claims)
    for answer, expected in zip(map(as_a_pod_sees, answers), wanted, strict=True):
        if not isinstance(expected, Failed):
            assert answer == expected
            continue
        assert isinstance(answer, DeviceFailedError), answer
        assert str(answer).startswith(expected.text)
        assert len(str(answer)) < 1100
        assert answer.pending == expected.pending
        if case.go is not None:
            assert answer.index == expected.index


def as_a_pod_sees(answer: Any) -> Any:
    """Return a result, or the failure that its CDI file would be."""
    if not isinstance(answer, list | tuple):
        return answer
    try:
        for each in answer:
            assert isinstance(each, PreparedDevice)
            container_edits(each.edits)
    except InvalidEditsError as error:
        return DeviceFailedError(str(error))
    return list(answer)


@pytest.mark.parametrize("case", PARAMETERS.values(), ids=PARAMETERS)
async def test_parameters(home: Home, case: Configured):
    if home.kind != GO and case.only_go:
        pytest.skip(case.only_go)
    (answer,) = await home.call("prepare", [replace(ONE, configs=tuple(case.configs))])
    if case.parameters is None:
        assert isinstance(answer, DeviceFailedError)
        assert case.names in str(answer)
        assert not home.log
        return
    assert as_a_pod_sees(answer) == [given("a")]
    prefix, _, got = home.log[0].partition(" ")
    assert prefix == "parameters"
    assert {"rooms": []} | {k: v for k, v in json.loads(got).items() if v is not None} == {
        **WHITE,
        "rooms": [],
        **case.parameters,
    }


@pytest.mark.parametrize("name", HEALTH)
async def test_health(home: Home, name: str):
    told, expected, not_in_go = HEALTH[name]
    if home.kind == GO and not_in_go:
        pytest.skip(not_in_go)
    await home.report({"a": told, "b": Health.healthy()})
    while (health := await home.health("a")) != expected:
        assert health == Health.healthy()
    await home.report({"a": Health.healthy()})
    assert await home.health("a") == Health.healthy()


# ------------------------------------------------------------ scenes


async def test_a_list_that_is_as_before_is_no_news(home: Home):
    await home.list(Inventory(devices=tuple(replace(each) for each in HELD)))
    await home.list(Inventory(devices=(*HELD, MARK)))
    assert len((await home.inventory()).devices) == 4


async def test_a_driver_that_fails_is_stopped_with_its_reason_and_lists_again(home: Home):
    await home.fail("cannot read /dev/lamps")
    assert "cannot read /dev/lamps" in await home.listener.reason()
    (answer,) = await home.call("prepare", [ONE])
    if not isinstance(answer, EndpointStoppedError):  # it is there again
        assert as_a_pod_sees(answer) == [given("a")]
    await until(lambda: home.endpoint.unavailable() is None)
    await home.inventory()
    (answer,) = await home.call("prepare", [ONE])
    assert as_a_pod_sees(answer) == [given("a")]


async def test_claims_without_hardware_in_common_do_not_wait_for_each_other(home: Home):
    await home.does(a=Does(waits=True))
    slow = asyncio.create_task(home.call("prepare", [ONE]))
    await until(lambda: "prepare a" in home.log)
    assert await home.call("unprepare", [TWO], first=1) == [None]
    assert not slow.done()
    await home.let()
    assert [as_a_pod_sees(each) for each in await slow] == [[given("a")]]


# ------------------------------------------------------------ with a socket


@pytest.fixture
def remote(kind):
    if kind == PLUGIN:
        pytest.skip("a class in the node plugin has no socket, and no process of its own")


CARD = {"card": {"slots": "1"}}
FIRST = replace(ONE, consumes=CARD)


@pytest.mark.parametrize(
    ("first", "device"),
    [
        pytest.param(0, FIRST, id="one-claim"),
        pytest.param(1, ONE, id="one-device"),
        pytest.param(1, replace(TWO, consumes=CARD), id="one-counter-set"),
    ],
)
async def test_a_call_whose_caller_left_ends_before_the_next_one(
    remote, home: Home, first: int, device: AllocatedDevice
):
    async def leave(call: Awaitable[Any]) -> None:
        await home.endpoint.connection.close()
        await call
        await until(lambda: home.endpoint.unavailable() is None)

    await home.does(a=Does(waits=True))
    left = asyncio.create_task(home.call("prepare", [FIRST]))
    await until(lambda: "prepare a" in home.log)
    await leave(left)
    waiting = asyncio.create_task(home.call("check", [device], first=first))
    await asyncio.sleep(0.05)
    await leave(waiting)
    undo = asyncio.create_task(home.call("unprepare", [device], first=first))
    other = allocated("c", pool=f"{NODE}/usb", consumes=CARD)
    assert await home.call("check", [other], first=2) == [True]
    await home.does()
    await home.let()
    assert await undo == [None]
    name = device.name
    ends = [each for each in home.log if not each.startswith("parameters") and " c" not in each]
    assert ends == ["prepare a", "prepare a ends", f"unprepare {name}", f"unprepare {name} ends"]


async def test_a_driver_whose_socket_was_removed_is_called_until_it_ends(remote, home, found):
    (found.path / "driver.sock").unlink()
    await asyncio.sleep(0.1)
    assert as_a_pod_sees((await home.call("prepare", [ONE]))[0]) == [given("a")]


async def test_two_node_plugins_are_served_at_once_and_their_calls_do_not_overlap(
    remote, home: Home, found
):
    listener = Listener()
    async with running(new_endpoint(found, listener)) as other:
        second = Home(home.script, listener)
        assert len((await second.inventory()).devices) == len(HELD)
        await home.does(a=Does(waits=True))
        item = AllocatedClaim(claim=claim(0), devices=(ONE,))
        calls = [
            asyncio.create_task(home.call("prepare", [ONE])),
            asyncio.create_task(other.prepare([item])),
        ]
        await until(lambda: "prepare a" in home.log)
        await asyncio.sleep(0.05)
        await home.does()
        await home.let()
        (one,), two = await asyncio.gather(*calls)
        assert [*one] == [*two["uid-0"]] == [given("a")]
        calls_ = [each for each in home.log if not each.startswith("parameters")]
        assert calls_ == ["prepare a", "prepare a ends"] * 2
        await home.list(Inventory(devices=(MARK,)))
        assert (await second.inventory()).devices == (MARK,)
    assert home.endpoint.unavailable() is None


async def test_an_update_ends_calls_in_flight_and_goes_on_in_the_next_process(
    remote, home: Home, found
):
    await home.does(a=Does(waits=True))
    call = asyncio.create_task(home.call("prepare", [ONE]))
    await until(lambda: "prepare a" in home.log)
    other = successor(home)
    async with instance(other, found):
        stopping = asyncio.create_task(home.stop())
        undo = asyncio.create_task(home.call("unprepare", [ONE]))
        await asyncio.sleep(0.2)
        assert not call.done()
        assert "unprepare a" not in [*home.log, *other.log], "the old process works on it"
        await home.does()
        await home.let()
        assert [as_a_pod_sees(each) for each in await call] == [[given("a")]]
        await stopping
        await undo
        await until(lambda: home.endpoint.unavailable() is None)
        assert await home.call("unprepare", [ONE]) == [None]
        assert "unprepare a ends" in other.log
