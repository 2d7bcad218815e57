"""
Devices that are allocated several times: shares, over the real sockets of the node plugin.

The API server is in memory. The driver is the scripted one of the tests on a cluster.
"""

from __future__ import annotations

import json

import pytest

from drakit.layout import driver_directory
from e2e.scripted.control import Script
from tests.fakes.kubelet import FakeKubelet, reference
from tests.integration.test_node_plugin import CLAIMS, NODE, rig  # noqa: F401

LAMPS = "scripted.test.drakit.dev"
SHARES = ("3f1c9a52-0000-4000-8000-000000000001", "3f1c9a52-0000-4000-8000-000000000002")


def result(device, *, request="main", share=None, light=None) -> dict:
    """One result of an allocation, as the scheduler writes it."""
    body = {"driver": LAMPS, "pool": NODE, "request": request, "device": device}
    if share is not None:
        body |= {"shareID": share, "consumedCapacity": {"light": light}}
    return body


@pytest.fixture
def lamps(rig):  # noqa: F811
    """The node's directories with the scripted driver, and its script."""
    folder = driver_directory(rig.root, LAMPS)
    folder.mkdir(parents=True)
    rig.config["drivers"] = [
        {"driver": "e2e.scripted.image.scripted:Scripted", "config": {"folder": str(folder)}}
    ]
    rig.script = Script(folder)
    return rig


def allocate(rig, uid, *results) -> None:  # noqa: F811
    allocation = {"devices": {"results": list(results)}}
    body = {"metadata": {"uid": uid}, "status": {"allocation": allocation}}
    rig.api_server.store(f"{CLAIMS}/claim-{uid}", body)


def environment(rig, uid) -> list[dict]:  # noqa: F811
    """The environment of a claim's containers, in the order of the CDI file's devices."""
    (file,) = rig.cdi.glob(f"*claim_{uid}.json")
    edits = [device["containerEdits"] for device in json.loads(file.read_text())["devices"]]
    return [json.loads(text.partition("=")[2]) for edit in edits for text in edit["env"]]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_one_device_is_prepared_for_several_claims_by_shares(lamps, version):
    allocate(lamps, "uid-a", result("lamp-0", share=SHARES[0], light="3"))
    allocate(lamps, "uid-b", result("lamp-0", share=SHARES[1], light="5"))
    allocate(lamps, "uid-c", result("lamp-1"))
    claims = [reference(uid) for uid in ("uid-a", "uid-b", "uid-c")]
    async with FakeKubelet(lamps.root) as kubelet, lamps.plugin():
        await lamps.until(lambda: kubelet.sockets() and lamps.published())
        dra = await kubelet.register()
        answers = await kubelet.prepare(dra, *claims, version=version)
        assert {answer.error for answer in answers.values()} == {""}
        devices = {uid: answer.devices[0] for uid, answer in answers.items()}
        assert {d.device_name for d in devices.values()} == {"lamp-0", "lamp-1"}
        if version == "v1":
            shares = {uid: d.share_id for uid, d in devices.items() if d.HasField("share_id")}
            assert shares == {"uid-a": SHARES[0], "uid-b": SHARES[1]}
        (told,) = environment(lamps, "uid-a")
        assert (told["share"], told["capacity"]) == (SHARES[0], {"light": "3"})
        (told,) = environment(lamps, "uid-c")
        assert (told["share"], told["capacity"]) == (None, {})

        assert await kubelet.unprepare(dra, claims[0], version=version) == {"uid-a": ""}
        held = lamps.script.held()
        assert held == {f"lamp-0@uid-b@{SHARES[1]}", "lamp-1@uid-c"}, "one share alone is undone"


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_a_claim_with_two_shares_of_one_device_gets_both(lamps, version):
    allocate(
        lamps,
        "uid-a",
        result("lamp-0", request="left", share=SHARES[0], light="1"),
        result("lamp-0", request="right", share=SHARES[1], light="2"),
    )
    claim = reference("uid-a")
    async with FakeKubelet(lamps.root) as kubelet, lamps.plugin():
        await lamps.until(lambda: kubelet.sockets() and lamps.published())
        dra = await kubelet.register()
        answer = (await kubelet.prepare(dra, claim, version=version))["uid-a"]
        assert answer.error == ""
        assert [tuple(d.request_names) for d in answer.devices] == [("left",), ("right",)]
        ids = [cdi for device in answer.devices for cdi in device.cdi_device_ids]
        assert len(set(ids)) == 2, "each container finds its own share"
        told = {body["request"]: body for body in environment(lamps, "uid-a")}
        assert {name: (b["share"], b["capacity"]) for name, b in told.items()} == {
            "left": (SHARES[0], {"light": "1"}),
            "right": (SHARES[1], {"light": "2"}),
        }
        again = (await kubelet.prepare(dra, claim, version=version))["uid-a"]
        assert again == answer, "a repeat is answered with the same shares"
        assert len(lamps.script.calls("prepare", "ended")) == 2

        assert await kubelet.unprepare(dra, claim, version=version) == {"uid-a": ""}
        assert lamps.script.held() == set()
