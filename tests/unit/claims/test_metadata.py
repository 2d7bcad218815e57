"""The metadata files of claims that are prepared, repeated, changed, restored and unprepared."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drakit import Device, NetworkData, PreparedDevice, Topology
from drakit_nodeplugin.claims.recovery import Rebuilder
from drakit_nodeplugin.state.holds import PoolContent
from tests.fakes.claims import DRIVER, NODE, FakeDevices, claim_body, reference
from tests.unit.claims.conftest import Plugin
from tests.unit.claims.test_rebuild import Kubelet

A, B = "uid-a", "uid-b"
ROOT = "/var/run/kubernetes.io/dra-device-attributes"
FRONT = {"device": "cam-1", "request": "front/big"}


@pytest.fixture
def devices() -> FakeDevices:
    devices = FakeDevices()
    devices.traits = replace(devices.traits, metadata_files=True)
    return devices


@pytest.fixture(autouse=True)
def claims_of_a_pod(claims) -> None:
    """A claim that the pod names, and one from a template; each has devices of two requests."""
    generated = claim_body(B, "cam-2", {"device": "cam-3", "request": "back"})
    generated["metadata"]["annotations"] = {"resource.kubernetes.io/pod-claim-name": "my-cam"}
    claims.store(claim_body(A, "cam-0", FRONT, {"device": "cam-4", "request": "front/big"}))
    claims.store(generated)


def lists(plugin: Plugin) -> Plugin:
    """List devices, each with its name as an attribute."""
    listed = [
        Device(name=f"cam-{n}", attributes={"serial": f"s{n}"}, topology=Topology(numa_node=n))
        for n in range(5)
    ]
    plugin.inventories.pools = {NODE: PoolContent(devices={each.name: each for each in listed})}
    return plugin


@pytest.fixture
async def plugin(start) -> Plugin:
    return lists(await start())


def names(plugin: Plugin) -> set[str]:
    folder = plugin.metadata.directory
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def content(plugin: Plugin, name: str) -> dict[str, Any]:
    """The content of a file, which is the same in both versions."""
    newest, older = map(json.loads, (plugin.metadata.directory / name).read_text().splitlines())
    assert newest.pop("apiVersion") == "metadata.resource.k8s.io/v1beta1"
    assert older.pop("apiVersion") == "metadata.resource.k8s.io/v1alpha1"
    assert newest == older
    return newest


def attributes(plugin: Plugin, name: str) -> dict[str, dict[str, Any]]:
    """The attributes of each device in a file, and its network data."""
    (request,) = content(plugin, name)["requests"]
    return {
        each["name"]: each["attributes"] | {"network": each.get("networkData")}
        for each in request["devices"]
    }


def mounts(plugin: Plugin, uid: str) -> dict[str, dict[str, str]]:
    """The host path by the container path of each mount, by the device that has it."""
    spec = json.loads((plugin.cdi / f"{DRIVER}-claim_{uid}.json").read_text())
    return {
        device["name"]: {each["containerPath"]: each["hostPath"] for each in found}
        for device in spec["devices"]
        if (found := device["containerEdits"].get("mounts"))
    }


async def prepare(plugin: Plugin, *uids: str) -> None:
    answers = await plugin.prepare(*map(reference, uids))
    assert [answers[uid].error for uid in uids] == [None] * len(uids)


async def test_containers_get_what_drakit_publishes_and_what_the_driver_returns(plugin, devices):
    network = NetworkData(interface_name="net1", ips=("192.0.2.5/24",))
    devices.results["cam-1"] = PreparedDevice(attributes={"serial": "new", "lens": 3})
    devices.results["cam-3"] = PreparedDevice(network_data=network)
    mask = os.umask(0o077)
    await prepare(plugin, A, B)
    os.umask(mask)
    assert {each.stat().st_mode & 0o777 for each in plugin.metadata.directory.iterdir()} == {0o644}
    assert names(plugin) == {f"{uid}_{r}.json" for uid, r in ((A, "main"), (A, "front"))} | {
        f"{B}_main.json",
        f"{B}_back.json",
    }
    front = content(plugin, f"{A}_front.json")
    assert front["metadata"] == {
        "name": f"claim-{A}",
        "namespace": "lab",
        "uid": A,
        "generation": 1,
    }
    assert "podClaimName" not in front
    assert front["requests"][0]["name"] == "front/big"
    device = front["requests"][0]["devices"][0]
    assert (device["driver"], device["pool"]) == (DRIVER, NODE)
    numa = "resource.kubernetes.io/numaNode"
    assert attributes(plugin, f"{A}_front.json") == {
        "cam-1": {
            "serial": {"string": "new"},
            "lens": {"int": 3},
            numa: {"int": 1},
            "network": None,
        },
        "cam-4": {"serial": {"string": "s4"}, numa: {"int": 4}, "network": None},
    }
    back = attributes(plugin, f"{B}_back.json")["cam-3"]
    assert back["network"] == {"interfaceName": "net1", "ips": ["192.0.2.5/24"]}
    assert content(plugin, f"{B}_back.json")["podClaimName"] == "my-cam"

    folder = plugin.metadata.directory
    own, generated = f"{ROOT}/resourceclaims/claim-{A}", f"{ROOT}/resourceclaimtemplates/my-cam"
    file = f"{DRIVER}-metadata.json"
    assert mounts(plugin, A) == {
        f"{A}-0": {f"{own}/main/{file}": f"{folder}/{A}_main.json"},
        f"{A}-1": {f"{own}/front/{file}": f"{folder}/{A}_front.json"},
    }
    assert mounts(plugin, B) == {
        f"{B}-0": {f"{generated}/main/{file}": f"{folder}/{B}_main.json"},
        f"{B}-1": {f"{generated}/back/{file}": f"{folder}/{B}_back.json"},
    }


async def test_the_files_go_with_their_claim(plugin):
    await prepare(plugin, A, B)
    await plugin.unprepare(reference(A))
    assert names(plugin) == {f"{B}_main.json", f"{B}_back.json"}
    assert plugin.files() == {f"{DRIVER}-claim_{B}.json"}
    await plugin.unprepare(reference(B))
    assert names(plugin) == set()


async def test_a_repeat_writes_a_lost_or_damaged_file_without_the_driver(plugin, claims, devices):
    await prepare(plugin, A, B)
    lost, damaged = (plugin.metadata.directory / f"{A}_{r}.json" for r in ("main", "front"))
    texts = [path.read_text() for path in (lost, damaged)]
    kept = (plugin.metadata.directory / f"{B}_main.json").stat().st_ino
    lost.unlink()
    damaged.write_text("{")
    claims.answers = False
    await prepare(plugin, A, B)
    assert [path.read_text() for path in (lost, damaged)] == texts
    assert (plugin.metadata.directory / f"{B}_main.json").stat().st_ino == kept, "it is unchanged"
    assert devices.prepares == 5


async def test_a_deleted_file_is_restored_and_an_outdated_one_at_the_start(start, plugin, devices):
    await prepare(plugin, A, B)
    path = plugin.metadata.directory / f"{A}_main.json"
    text = path.read_text()
    path.unlink()
    assert await plugin.restorer.restore() == 1
    assert path.read_text() == text
    path.write_text("{}")
    plugin = lists(await start())
    await plugin.restorer.clean()
    assert await plugin.restorer.restore(compare=True) == 1
    assert path.read_text() == text
    assert devices.prepares == 5


async def test_a_second_prepare_replaces_the_file_with_a_higher_generation(plugin, devices):
    await prepare(plugin, A)
    running = (plugin.metadata.directory / f"{A}_main.json").open()
    await plugin.queue.prepare_again(reference(A))
    assert content(plugin, f"{A}_main.json")["metadata"]["generation"] == 1, "it is the same"
    devices.results["cam-0"] = PreparedDevice(network_data=NetworkData(interface_name="net1"))
    await plugin.queue.prepare_again(reference(A))
    assert content(plugin, f"{A}_main.json")["metadata"]["generation"] == 2
    found = attributes(plugin, f"{A}_main.json")["cam-0"]
    assert found["network"] == {"interfaceName": "net1"}
    assert "net1" not in running.read(), "a running container keeps its file"
    running.close()


async def test_a_claim_that_is_allocated_again_loses_the_files_of_its_former_requests(
    plugin, claims
):
    await prepare(plugin, A)
    claims.store(claim_body(A, {"device": "cam-1", "request": "other"}))
    await prepare(plugin, A)
    assert names(plugin) == {f"{A}_other.json"}


async def test_a_reboot_keeps_the_generation_and_an_update_of_the_driver_drops_the_files(
    start, plugin, devices
):
    await prepare(plugin, A)
    plugin = lists(await start(boot_id="boot-2"))
    await plugin.restorer.clean()
    await prepare(plugin, A)
    assert content(plugin, f"{A}_main.json")["metadata"]["generation"] == 1
    devices.traits = replace(devices.traits, metadata_files=False)
    plugin = lists(await start(boot_id="boot-3"))
    await prepare(plugin, A)
    assert (names(plugin), mounts(plugin, A)) == (set(), {})


async def test_files_without_an_entry_and_a_cdi_file_are_removed_at_the_start(start, plugin):
    await prepare(plugin, A, B)
    await plugin.checkpoint.close()
    for path in (plugin.checkpoint.path, *plugin.cdi.glob(f"*{A}*")):
        path.unlink()
    (plugin.metadata.directory / f".{A}_front.json.0123abcd.drakit").write_text("{")
    plugin = lists(await start())
    await plugin.restorer.clean()
    assert names(plugin) == {f"{B}_main.json", f"{B}_back.json"}, "its containers may be running"
    assert await plugin.unprepare(reference(B)) == {B: None}
    assert names(plugin) == set()


async def test_a_rebuilt_claim_keeps_the_files_that_its_cdi_file_mounts(start, plugin, tmp_path):
    await prepare(plugin, A, B)
    before = names(plugin)
    await plugin.checkpoint.close()
    for path in tmp_path.glob("checkpoint.db*"):
        path.unlink()
    plugin = lists(await start())
    await plugin.restorer.clean()
    kubelet = Kubelet()
    kubelet.uses(A, "cam-0", "cam-1", "cam-4")
    kubelet.uses(B, "cam-2", "cam-3")
    await Rebuilder(plugin.parts, kubelet=kubelet).rebuild()
    (plugin.cdi / f"{DRIVER}-claim_{A}.json").unlink()
    (plugin.metadata.directory / f"{B}_main.json").unlink()
    assert await plugin.restorer.restore() == 2
    assert set(mounts(plugin, A)) == {f"{A}-0", f"{A}-1"}
    assert names(plugin) == before - {f"{B}_main.json"}, "containers could not restart without"
    assert await plugin.restorer.restore() == 0, "what is lost is not looked for again"
    await prepare(plugin, A, B)
    assert names(plugin) == before
    await plugin.unprepare(reference(A), reference(B))
    assert names(plugin) == set()


@pytest.mark.parametrize("side_effects", [True, False])
async def test_too_much_metadata_fails_its_claim_alone_and_is_undone(plugin, devices, side_effects):
    devices.traits = replace(devices.traits, side_effects=side_effects)
    many = {f"a{n}": n for n in range(31)}
    devices.results["cam-0"] = PreparedDevice(attributes=many)
    answers = await plugin.prepare(reference(A), reference(B))
    assert "device cam-0 has 33 attributes" in (answers[A].error or "")
    assert answers[B].error is None
    assert names(plugin) == {f"{B}_main.json", f"{B}_back.json"}
    assert await plugin.states() == {B: "prepared"}


async def test_a_file_that_cannot_be_written_fails_its_claim_alone(plugin):
    plugin.metadata.directory.mkdir(parents=True)
    obstacle = plugin.metadata.directory / f"{A}_main.json"
    obstacle.mkdir()
    answers = await plugin.prepare(reference(A), reference(B))
    assert str(obstacle) in (answers[A].error or "")
    assert answers[B].error is None
    obstacle.rmdir()
    await prepare(plugin, A)
    assert f"{A}_main.json" in names(plugin)


async def test_a_driver_without_metadata_has_no_files(plugin, devices, tmp_path: Path):
    devices.traits = replace(devices.traits, metadata_files=False)
    devices.results["cam-0"] = PreparedDevice(attributes={"lens": 3})
    await prepare(plugin, A)
    assert mounts(plugin, A) == {}
    assert not (tmp_path / "metadata").exists()


async def test_a_directory_that_cannot_be_read_fails_only_the_claims_with_metadata(start, devices):
    plugin = lists(await start())
    plugin.metadata.directory.write_text("")
    answers = await plugin.prepare(reference(A))
    assert f"{plugin.metadata.directory}/{A}_" in (answers[A].error or "")

    devices.traits = replace(devices.traits, metadata_files=False)
    await prepare(plugin, B)
    file = plugin.cdi / f"{DRIVER}-claim_{B}.json"
    file.unlink()
    with pytest.raises(NotADirectoryError):  # logged, and tried again
        await plugin.restorer.restore()
    assert file.exists()
    assert await plugin.unprepare(reference(B)) == {B: None}
