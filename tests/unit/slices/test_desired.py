from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drakit import Device
from drakit_nodeplugin.slices.desired import PoolIdentity, plan, slice_name
from drakit_nodeplugin.slices.packing import PackingLimits, pack

POOL = PoolIdentity(driver="camera.example.com", node="node-1", node_uid="node-uid")
SMALL = PackingLimits(max_devices=4, fill_devices=3)


def devices(*names: str) -> list[Device]:
    return [
        Device(name=name, attributes={"model": "x"}, capacity={"size": "1024Mi"}) for name in names
    ]


class Server:
    """What an API server would hold after the writes of plans, and how many those were."""

    def __init__(self) -> None:
        self.slices: dict[str, dict] = {}
        self.version = 0

    def publish(self, wanted, limits=SMALL) -> tuple[int, int, int]:
        todo = plan(wanted, pool=POOL, stored=list(self.slices.values()), limits=limits)
        for body in todo.delete:
            del self.slices[body["metadata"]["name"]]
        for body in (*todo.replace, *todo.create):
            self.version += 1
            metadata = body["metadata"] | {"resourceVersion": str(self.version), "uid": "u"}
            stored = body | {"metadata": metadata}
            for device in stored["spec"]["devices"]:
                if device.get("capacity", {}).get("size") == {"value": "1024Mi"}:
                    device["capacity"]["size"] = {"value": "1Gi"}
            self.slices[metadata["name"]] = stored
        return len(todo.create), len(todo.replace), len(todo.delete)

    def published(self) -> dict[str, str]:
        """Device to slice, as the scheduler sees it; checks the pool's rules."""
        top = max(body["spec"]["pool"]["generation"] for body in self.slices.values())
        current = [b for b in self.slices.values() if b["spec"]["pool"]["generation"] == top]
        assert len(current) == len(self.slices) == current[0]["spec"]["pool"]["resourceSliceCount"]
        homes = {
            device["name"]: body["metadata"]["name"]
            for body in current
            for device in body["spec"]["devices"]
        }
        assert sum(len(body["spec"]["devices"]) for body in current) == len(homes)
        return homes


def test_a_first_publication_and_a_repetition_that_writes_nothing():
    server = Server()
    assert server.publish(devices("a", "b")) == (1, 0, 0)
    assert server.publish(devices("b", "a")) == (0, 0, 0), "1024Mi is what the server calls 1Gi"
    (body,) = server.slices.values()
    assert body["spec"]["nodeName"] == body["spec"]["pool"]["name"] == "node-1"
    assert body["metadata"]["ownerReferences"][0]["uid"] == "node-uid"


def test_a_driver_without_devices_has_one_empty_slice():
    server = Server()
    assert server.publish([]) == (1, 0, 0)
    assert server.publish([]) == (0, 0, 0)


def test_one_change_writes_one_slice_and_keeps_the_generation():
    server = Server()
    server.publish(devices("a", "b", "c", "d", "e"))
    before = server.published()

    assert server.publish(devices("a", "c", "d", "e")) == (0, 1, 0)
    assert server.publish(devices("a", "c", "d", "e", "f")) == (0, 1, 0)

    after = server.published()
    assert {name: after[name] for name in "acde"} == {name: before[name] for name in "acde"}
    assert {b["spec"]["pool"]["generation"] for b in server.slices.values()} == {1}


def test_growth_bumps_the_generation_of_all():
    server = Server()
    server.publish(devices("a", "b", "c"))
    assert server.publish(devices("a", "b", "c", "d")) == (1, 1, 0)
    assert {b["spec"]["pool"]["generation"] for b in server.slices.values()} == {2}


def test_a_slice_that_somebody_deleted_is_made_again():
    server = Server()
    server.publish(devices(*"abcdef"))
    del server.slices[slice_name(POOL, 0)]
    assert server.publish(devices(*"abcdef")) == (1, 1, 0)
    assert set(server.published()) == set("abcdef")


def test_foreign_names_and_old_generations_are_removed():
    server = Server()
    server.publish(devices("a"))
    (body,) = server.slices.values()
    server.slices["random"] = body | {"metadata": body["metadata"] | {"name": "random"}}
    assert server.publish(devices("a")) == (0, 0, 1)


def test_another_node_object_of_the_same_name_becomes_the_owner():
    server = Server()
    server.publish(devices("a"))
    (body,) = server.slices.values()
    body["metadata"]["ownerReferences"][0]["uid"] = "an-older-node"
    assert server.publish(devices("a")) == (0, 1, 0)


def test_devices_stand_in_the_order_of_their_numbers():
    server = Server()
    server.publish(devices("kvm-10", "kvm-9", "kvm-1"), limits=PackingLimits())
    (body,) = server.slices.values()
    assert [device["name"] for device in body["spec"]["devices"]] == ["kvm-1", "kvm-9", "kvm-10"]


def test_two_pools_never_share_a_name():
    one = PoolIdentity(driver="a", node="b-c", node_uid="u")
    other = PoolIdentity(driver="a-b", node="c", node_uid="u")
    assert slice_name(one, 0) != slice_name(other, 0)


def test_a_name_is_never_longer_than_the_api_allows():
    long = PoolIdentity(driver="d" * 63, node=".".join(["n" * 60] * 4), node_uid="u")
    names = {slice_name(long, index) for index in range(3)}
    assert len(names) == 3
    assert all(len(name) <= 253 for name in names)


@given(st.lists(st.sets(st.sampled_from("abcdefghijklmnop"), max_size=12), min_size=1, max_size=8))
def test_packing_holds_for_any_sequence(history):
    """Limits hold, nothing moves without need, and the server ends with what was wanted."""
    server = Server()
    before: dict[str, str] = {}
    for wanted in history:
        server.publish(devices(*sorted(wanted)))
        after = server.published() if server.slices else {}
        assert set(after) == wanted
        assert all(after[name] == before[name] for name in set(after) & set(before))
        assert server.publish(devices(*sorted(wanted))) == (0, 0, 0)
        before = after


@pytest.mark.parametrize(
    ("names", "placed", "expected"),
    [
        pytest.param("abcd", {}, {"a": 0, "b": 0, "c": 0, "d": 1}, id="new-ones-leave-room"),
        pytest.param("abcd", dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 0), id="room-is-used"),
        pytest.param("z", {"z": 2}, {"z": 2}, id="a-device-stays-where-it-is"),
        pytest.param("zy", {"z": 1}, {"z": 1, "y": 0}, id="gaps-are-filled-first"),
        pytest.param(
            "abcde", dict.fromkeys("abcde", 0), dict.fromkeys("abcd", 0) | {"e": 1}, id="overfull"
        ),
    ],
)
def test_packing(names, placed, expected):
    assert pack(list(names), placed=placed, limits=SMALL) == expected
