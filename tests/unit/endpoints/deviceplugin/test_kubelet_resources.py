"""Resources that the kubelet's device manager does not use, and plugins that wait for them."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from drakit_driver.runtime.failures import EndpointStoppedError
from drakit_nodeplugin.endpoints.deviceplugin import plugins
from drakit_nodeplugin.endpoints.deviceplugin.plugins import KubeletResources
from drakit_nodeplugin.state.podresources import DeviceManagerResources
from tests.fakes.deviceplugin import FakeDevicePlugin
from tests.unit.endpoints.camera import until
from tests.unit.endpoints.deviceplugin.conftest import THING, World

SILENT = OSError("the kubelet's podresources cannot be read")
PARTIAL = DeviceManagerResources(resources={}, unknown="the kubelet does not list our own pod")
FREE = DeviceManagerResources(resources={})
SERVED = DeviceManagerResources(resources={THING: True})
HELD = DeviceManagerResources(resources={THING: False})
OTHER = DeviceManagerResources(resources={"vendor.example/other": True})


# ------------------------------------------------------------ conclusions from the responses


class Kubelet:
    """Answers, one after another; the last one stays."""

    def __init__(self, *answers: DeviceManagerResources | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def read(self) -> DeviceManagerResources:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def free_after(
    *answers: DeviceManagerResources | Exception, pause: float, limit: float = 600
) -> float:
    """Poll at this interval, and return the seconds until the resource is free."""
    resources, loop = KubeletResources(Kubelet(*answers).read), asyncio.get_running_loop()
    began = loop.time()
    while await resources.check(THING) is not None:
        if loop.time() - began >= limit:
            return float("inf")
        await asyncio.sleep(pause)
    return loop.time() - began


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("answers", "pause", "seconds"),
    [
        pytest.param([FREE], 2, 2, id="never-the-kubelets"),
        pytest.param([OTHER], 2, 2, id="the-kubelet-has-another-resource"),
        pytest.param([SILENT], 2, float("inf"), id="no-answer-never-frees"),
        pytest.param([PARTIAL], 2, float("inf"), id="a-list-without-our-pod-never-frees"),
        pytest.param([SILENT, SILENT, FREE], 2, 6, id="silent-and-then-two-answers"),
        pytest.param([FREE, PARTIAL, FREE], 2, 6, id="answers-must-follow-each-other"),
        pytest.param([SERVED, FREE], 30, 150, id="served-and-then-missing-for-two-minutes"),
        pytest.param([HELD, FREE], 30, 150, id="held-and-then-missing-for-two-minutes"),
        pytest.param([SERVED, FREE], 60, 180, id="three-answers-are-the-fewest"),
        pytest.param([SERVED, FREE], 61, float("inf"), id="what-was-between-must-be-known"),
        pytest.param([SERVED, FREE, SILENT, FREE], 30, 210, id="a-silence-begins-it-again"),
        pytest.param([SERVED, FREE, PARTIAL, FREE], 30, 210, id="a-restart-begins-it-again"),
        pytest.param([SERVED, SILENT], 30, float("inf"), id="served-and-then-silent"),
        pytest.param([SERVED, PARTIAL], 30, float("inf"), id="served-and-then-without-our-pod"),
    ],
)
async def test_a_resource_is_free_after(answers, pause, seconds):
    assert await free_after(*answers, pause=pause) == seconds


@pytest.mark.looptime
async def test_a_resource_that_no_plugin_wanted_while_the_kubelet_had_it_does_not_wait():
    resources = KubeletResources(Kubelet(SERVED, FREE).read)
    for _ in range(3):
        await resources.ask()
        await asyncio.sleep(2)
    assert await resources.check(THING) is None


@pytest.mark.looptime
async def test_a_kubelet_that_hangs_is_waited_for_once_for_all_plugins(looptime):
    async def hang() -> DeviceManagerResources:
        await asyncio.sleep(3600)
        return FREE

    resources = KubeletResources(hang)
    bars = await asyncio.gather(*(resources.check(f"vendor.example/{n}") for n in range(50)))
    assert looptime == 2
    assert all("did not respond within 2 s" in bar.text for bar in bars if bar is not None)
    assert None not in bars


@pytest.mark.looptime
async def test_a_silent_kubelet_is_polled_with_backoff():
    resources = KubeletResources(Kubelet(SILENT).read)
    pauses = []
    for _ in range(6):
        await resources.ask()
        pauses.append(resources.pause_seconds())
    assert pauses == [2, 4, 8, 16, 30, 30]


# ------------------------------------------------------------ plugins that register


@pytest.fixture
def fast(short_delays, monkeypatch) -> None:
    """Shorten minutes to fractions of a second."""
    # Twice this time without a response restarts the wait, so a busy machine must be faster than
    # that.
    monkeypatch.setattr(plugins, "PERIOD_SECONDS", 0.15)
    monkeypatch.setattr(plugins, "CLEAR_SECONDS", 0.4)


@pytest.mark.parametrize(
    ("serves", "text"),
    [
        pytest.param(True, "own device manager serves", id="served"),
        pytest.param(False, "delete these pods", id="held-by-pods"),
    ],
)
async def test_a_resource_that_the_kubelet_has_is_refused_until_it_is_free(
    directory, fast, serves, text
):
    async with World(directory).running() as world:
        world.kubelet = {THING: serves}
        with pytest.raises(grpc.aio.AioRpcError, match=text) as raised:
            await FakeDevicePlugin(directory).register()
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert world.reasons() == ["ResourceServedByKubelet"]
        world.kubelet = {"vendor.example/other": False}
        async with FakeDevicePlugin(directory):  # it is accepted, and waits
            assert world.health() == {}
            with pytest.raises(
                EndpointStoppedError, match="has been absent from the kubelet's list for"
            ):
                await world.prepare("thing-0")
            await world.until_listed("thing-0", "thing-1")


async def test_a_resource_that_the_kubelet_gives_up_is_stopped_until_its_pods_are_gone_too(
    directory, fast
):
    async with World(directory).running() as world, FakeDevicePlugin(directory):
        await world.until_listed("thing-0", "thing-1")
        world.kubelet = {THING: True}
        await world.until_stopped()
        world.kubelet = {THING: False}
        await until(lambda: len(world.diagnostics) == 2)
        assert "delete these pods" in world.diagnostics[-1].note
        assert world.health() == {}
        with pytest.raises(EndpointStoppedError, match="delete these pods"):
            await world.prepare("thing-0")
        world.kubelet = {}
        await world.until_listed("thing-0", "thing-1")


@pytest.mark.parametrize("then", ["silent", "without-our-pod", "empty-once"])
async def test_a_resource_that_the_kubelet_has_had_stays_stopped_while_nothing_proves_otherwise(
    directory, fast, then
):
    world = World(directory)
    async with world.running(), FakeDevicePlugin(directory) as plugin:
        await world.until_listed("thing-0", "thing-1")
        world.kubelet = {THING: True}
        assert "own device manager serves vendor.example/thing" in await world.until_stopped()
        if then == "silent":
            world.kubelet = SILENT
        elif then == "without-our-pod":
            world.kubelet, world.unknown = {}, "it lacks our pod"
        else:
            world.kubelet = {}
            await asyncio.sleep(0.2)
            world.kubelet = SILENT
        await plugin.register()
        await asyncio.sleep(1)
        assert world.health() == {}
        world.kubelet, world.unknown = {}, None
        await world.until_listed("thing-0", "thing-1")


async def test_the_last_registration_counts_once_the_kubelet_no_longer_serves_a_resource(
    directory, fast
):
    async with World(directory).running() as world, FakeDevicePlugin(directory) as old:
        await world.until_listed("thing-0", "thing-1")
        world.kubelet = {THING: True}
        await world.until_stopped()
        await old.stop()
        new = FakeDevicePlugin(directory, endpoint="new.sock", devices=["thing-9"])
        await new.start()
        with pytest.raises(grpc.aio.AioRpcError, match="own device manager"):
            await new.register()
        world.kubelet = {}
        await world.until_listed("thing-9")
        await new.stop()


@pytest.mark.parametrize("unknown", ["silent", "without-our-pod"])
async def test_a_plugin_that_registers_while_nothing_is_known_of_the_kubelet_waits(
    directory, fast, unknown
):
    world = World(directory)
    if unknown == "silent":
        world.kubelet = SILENT
    else:
        world.unknown = "it lacks our pod"
    async with world.running(), FakeDevicePlugin(directory):
        await until(lambda: world.diagnostics)
        assert world.reasons() == ["KubeletResourcesUnknown"]
        await asyncio.sleep(0.2)
        assert world.reports == {}
        with pytest.raises(EndpointStoppedError, match="cannot determine whether the kubelet"):
            await world.prepare("thing-0")
        world.kubelet, world.unknown = {}, None
        await world.until_listed("thing-0", "thing-1")


async def test_a_plugin_that_comes_late_is_watched_as_any_other(directory, fast):
    async with World(directory).running() as world:
        await until(lambda: world.plugins._kubelet.idle)
        async with FakeDevicePlugin(directory):
            await world.until_listed("thing-0", "thing-1")
            world.kubelet = {THING: True}
            assert "own device manager serves" in await world.until_stopped()


async def test_a_kubelet_that_stops_answering_stops_no_plugin(directory, fast):
    async with World(directory).running() as world, FakeDevicePlugin(directory) as plugin:
        await world.until_listed("thing-0", "thing-1")
        world.kubelet = SILENT
        await asyncio.sleep(0.2)
        await plugin.register()
        await until(lambda: len(world.reports[THING]) == 2)
        assert world.stops() == []
        assert world.diagnostics == []


async def test_without_plugins_the_kubelet_is_asked_no_more_once_its_answers_agree(directory, fast):
    world = World(directory)
    asked = 0
    resources = world.resources

    async def count() -> DeviceManagerResources:
        nonlocal asked
        asked += 1
        return await resources()

    world.resources = count
    async with world.running():
        await until(lambda: world.plugins._kubelet.idle)
        settled = asked
        # Two answers settle it. The loop's clock counts whole milliseconds, so that the second one
        # can seem to be too early, and a third is needed.
        assert settled in (2, 3)
        await asyncio.sleep(0.3)
        assert asked == settled
