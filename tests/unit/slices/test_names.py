"""The names of slices: another client may have created an object under the name of one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import pytest

from drakit_daemon.kube import UnavailableError
from tests.fakes.kube import StatusError
from tests.unit.slices.conftest import SLICES, Published
from tests.unit.slices.world import DRIVER, NODE, PoolServer, device, many, pool

pytestmark = pytest.mark.looptime

GPUS = f"{NODE}/gpus"
OTHER_NODE, OTHER_DRIVER = "node-2", "gpu.example.com"
RANDOM = re.compile(r"[0-9a-f]{5}-[0-9a-f]{16}-camera[.]example[.]com-node-1(-gpus)?-[0-9a-f]{8}")

PLAIN = {
    (NODE, 0): "00000-camera.example.com-node-1-510df1f7",
    (NODE, 1): "00001-camera.example.com-node-1-510df1f7",
    (GPUS, 0): "00000-camera.example.com-node-1-gpus-40abec41",
}


def foreign(driver: str = DRIVER, node: str | None = OTHER_NODE) -> dict[str, Any]:
    """A slice of another driver or node."""
    selection = {"allNodes": True} if node is None else {"nodeName": node}
    of_pool = {"name": node or "shared", "generation": 1, "resourceSliceCount": 1}
    return {"spec": {"driver": driver, "pool": of_pool, "devices": [{"name": "x"}]} | selection}


def squat(published: Published, name: str, body: Mapping[str, Any] | None = None) -> None:
    published.server.store(f"{SLICES}/{name}", dict(body or foreign()))


def own(published: Published) -> dict[str, dict[str, Any]]:
    """The slices of the driver on the node, keyed by name."""
    return {
        body["metadata"]["name"]: body
        for body in published.slices()
        if (body["spec"]["driver"], body["spec"].get("nodeName")) == (DRIVER, NODE)
    }


def own_devices(published: Published) -> list[str]:
    return sorted(
        each["name"] for body in own(published).values() for each in body["spec"]["devices"]
    )


async def test_without_other_clients_names_are_the_same_for_every_instance(published: Published):
    await published.publish({NODE: pool(*many(100)), GPUS: pool("a")})
    assert set(own(published)) == set(PLAIN.values())
    assert published.taken == []


@pytest.mark.parametrize(
    ("driver", "node", "whose"),
    [
        pytest.param(DRIVER, OTHER_NODE, "pool node-2, node node-2", id="of-another-node"),
        pytest.param(OTHER_DRIVER, NODE, "pool node-1, node node-1", id="of-another-driver"),
        pytest.param(OTHER_DRIVER, None, "pool shared, not bound to one node", id="of-no-node"),
    ],
)
async def test_a_slice_whose_name_is_taken_by_a_slice(published: Published, driver, node, whose):
    squat(published, PLAIN[NODE, 1], foreign(driver, node))
    published.source.publish({NODE: pool(*many(100)), GPUS: pool("a")})
    await asyncio.sleep(2)
    assert len(own_devices(published)) == 101, "published within 2 s"
    randoms = sorted(set(own(published)) - {PLAIN[GPUS, 0]})
    assert all(map(RANDOM.fullmatch, randoms)), "of the whole pool, and of no other"
    assert [each[:6] for each in randoms] == ["00000-", "00001-"], "the index stays in front"
    (note,) = published.taken
    assert note == (
        f"the node plugin uses different names for new slices of pool node-1 of driver {DRIVER}, "
        f"because ResourceSlice {PLAIN[NODE, 1]} already exists (driver {driver}, {whose}); "
        f"identify the client that created it, and delete the slice"
    )
    published.new_writes()
    assert await published.settled(600) == [], "nothing is tried again"
    assert published.publisher.last_error is None


async def test_a_slice_of_a_lower_version_of_the_api_takes_a_name_in_all_versions(
    published: Published,
):
    await published.stop()
    published.server.served["resource.k8s.io"] = ["v1beta1"]
    squat_path = f"/apis/resource.k8s.io/v1beta1/resourceslices/{PLAIN[NODE, 0]}"
    published.server.store(squat_path, foreign())
    await published.start()
    await published.publish(pool("a"))
    names = {
        body["metadata"]["name"]
        for body in published.slices("/apis/resource.k8s.io/v1beta1/resourceslices")
    }
    (random,) = names - {PLAIN[NODE, 0]}
    assert RANDOM.fullmatch(random)
    assert len(published.taken) == 1


async def test_a_device_keeps_its_slice_under_any_name(published: Published):
    squat(published, PLAIN[NODE, 0])
    await published.publish(pool(*many(100)))
    before = own(published)
    await published.publish(pool(device("dev-3", attributes={"model": "y"}), *many(97, start=3)))
    after = own(published)
    assert after.keys() == before.keys()
    await published.publish(pool(*many(300)))
    kept = own(published)
    assert after.keys() < kept.keys()
    for name, body in after.items():
        here = {each["name"] for each in body["spec"]["devices"]}
        assert here <= {each["name"] for each in kept[name]["spec"]["devices"]}


async def test_a_restart_adopts_slices_with_random_names(published: Published):
    squat(published, PLAIN[NODE, 0])
    await published.publish({NODE: pool(*many(100)), GPUS: pool("a")})
    before = own(published)
    await published.start()
    assert await published.settled(60) == []
    assert own(published) == before
    assert len(published.taken) == 1


async def test_wiped_slices_whose_names_are_taken_are_restored_within_two_seconds(
    published: Published,
):
    squat(published, PLAIN[NODE, 0])
    await published.publish(pool(*many(100)))
    for _ in range(3):
        for name in own(published):
            published.server.remove(f"{SLICES}/{name}")
        await asyncio.sleep(2)
        assert len(own_devices(published)) == 100
    for name in own(published):
        published.server.remove(f"{SLICES}/{name}")
        squat(published, name)  # the names were public
    await asyncio.sleep(2)
    assert len(own_devices(published)) == 100


async def test_a_restart_after_the_wipe_finds_the_names_taken_again(published: Published):
    squat(published, PLAIN[NODE, 0])
    await published.publish(pool("a"))
    await published.stop()
    for name in own(published):
        published.server.remove(f"{SLICES}/{name}")
    await published.start()
    await asyncio.sleep(2)
    assert own_devices(published) == ["a"]
    assert len(set(published.taken)) == 1, "the same sentence, so one Event with a count"


@pytest.mark.parametrize("taken", [False, True], ids=["a-plain-name", "a-random-name"])
async def test_a_create_whose_answer_was_lost_is_not_repeated_under_another_name(
    published: Published, taken: bool
):
    if taken:
        squat(published, PLAIN[NODE, 0])
    lost: list[str] = []
    ask = published.link.ask

    async def losing(method: str, path: str, params: Any = None, body: Any = None) -> Any:
        answer = await ask(method, path, params, body)
        if method == "POST" and not lost:
            lost.append(body["metadata"]["name"])
            raise UnavailableError.no_response(method, path, why="the connection broke")
        return answer

    published.link.ask = losing  # type: ignore[method-assign]
    published.link.watch_seconds = 20  # the create is repeated before the watch reports the slice
    writes = await published.publish(pool("a"), seconds=60)
    assert writes == ["POST"] * (3 if taken else 2)
    assert list(own(published)) == lost
    assert len(published.taken) == taken


async def test_an_attacker_that_guesses_every_name_is_answered_with_a_backoff(
    published: Published,
):
    def taken(method: str, path: str, body: Any) -> StatusError | None:
        if method != "POST":
            return None
        squat(published, body["metadata"]["name"])
        return StatusError(409, "AlreadyExists", "already exists")

    published.link.refuse = taken
    published.source.publish(pool("a"))
    await asyncio.sleep(600)
    assert len(published.new_writes()) < 30
    assert published.publisher.last_error is not None
    published.link.refuse = lambda method, path, body: None
    await asyncio.sleep(90)
    assert own_devices(published) == ["a"]
    assert published.publisher.last_error is None


async def test_an_object_that_is_gone_when_it_is_read_does_not_keep_its_name_from_being_changed(
    published: Published,
):
    def flickers(method: str, path: str, body: Any) -> StatusError | None:
        if method == "POST" and body["metadata"]["name"] == PLAIN[NODE, 0]:
            return StatusError(409, "AlreadyExists", "already exists")
        return None

    published.link.refuse = flickers
    published.source.publish(pool("a"))
    await asyncio.sleep(2)
    assert own_devices(published) == ["a"]
    assert published.taken == [], "nobody can be named"


async def test_a_slice_that_is_replaced_by_another_nodes_slice_is_published_again(
    published: Published,
):
    await published.publish({NODE: pool("a"), GPUS: pool("b")})
    published.server.remove(f"{SLICES}/{PLAIN[NODE, 0]}")
    squat(published, PLAIN[NODE, 0])
    published.source.publish({NODE: pool("a", "c"), GPUS: pool("b")})
    await asyncio.sleep(4)
    assert own_devices(published) == ["a", "b", "c"]
    assert published.publisher.published_count == 3
    assert all(pools <= {NODE, GPUS} for pools in published.source.pools), "no pool of another node"


@pytest.mark.parametrize("while_running", [False, True], ids=["before-the-start", "at-a-wipe"])
async def test_a_slice_of_a_pool_that_nobody_wants_is_deleted_and_takes_no_name_for_long(
    published: Published, while_running: bool
):
    """An earlier version may have left it, under a name that is now another pool's."""
    left_over = foreign(node=NODE)
    left_over["spec"]["pool"]["name"] = f"{NODE}/old"
    if while_running:
        await published.publish({NODE: pool("a"), GPUS: pool("b")})
        published.server.remove(f"{SLICES}/{PLAIN[NODE, 0]}")
    squat(published, PLAIN[NODE, 0], left_over)
    published.source.publish({NODE: pool("a"), GPUS: pool("b")})
    await asyncio.sleep(3)
    assert own_devices(published) == ["a", "b"]
    assert {body["spec"]["pool"]["name"] for body in own(published).values()} == {NODE, GPUS}


# ------------------------------------------------------------ the plan


def test_of_two_slices_with_one_index_one_is_kept_and_no_device_is_published_twice():
    made = PoolServer()
    made.publish(pool(*many(100)))
    first, second = made.slices.values()
    name = first["metadata"]["name"].replace("00000-", "00000-0123456789abcdef-")
    made.store(first | {"metadata": first["metadata"] | {"name": name}})
    assert made.publish(pool(*many(100))) == (0, 0, 1)
    assert len(made.published()) == 100
    assert second["metadata"]["name"] in made.slices
