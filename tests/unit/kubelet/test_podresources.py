"""What the kubelet says of claims: over its socket, in its state file, and both together."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import zlib

import pytest

from drakit_nodeplugin.claims.kubeletview import KubeletClaims, claim_uid, kubelet_claims
from drakit_nodeplugin.claims.stored import StoredClaim
from drakit_nodeplugin.kubelet.claimview import KubeletClaimView
from drakit_nodeplugin.kubelet.podresources import PodResources, PodResourcesError
from drakit_nodeplugin.kubelet.statefile import StateFileError, read_claim_uids
from drakit_proto.kubelet.podresources.v1 import podresources_pb2
from tests.fakes.podresources import FakePodResources

DRIVER = "camera.example.com"
UID = "0f7a8f5e-6d0c-4d3c-9a68-000000000001"


def row(uid: str, name: str = "cam") -> StoredClaim:
    return StoredClaim(
        uid=uid,
        namespace="lab",
        name=name,
        state="prepared",
        boot_id="boot-1",
        devices=(),
    )


@pytest.fixture
def socket(root):
    return root / "pod-resources" / "kubelet.sock"


@pytest.fixture
async def kubelet(socket):
    async with FakePodResources(socket) as kubelet:
        yield kubelet


# ------------------------------------------------------------ the socket


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (podresources_pb2.ListPodResourcesResponse, {"pod_resources": 1}),
        (podresources_pb2.PodResources, {"name": 1, "namespace": 2, "containers": 3}),
        (
            podresources_pb2.ContainerResources,
            {"name": 1, "devices": 2, "cpu_ids": 3, "memory": 4, "dynamic_resources": 5},
        ),
        (
            podresources_pb2.DynamicResource,
            {"claim_name": 2, "claim_namespace": 3, "claim_resources": 4},
        ),
        (
            podresources_pb2.ClaimResource,
            {"cdi_devices": 1, "driver_name": 2, "pool_name": 3, "device_name": 4, "share_id": 5},
        ),
        (podresources_pb2.CDIDevice, {"name": 1}),
        (podresources_pb2.GetPodResourcesRequest, {"pod_name": 1, "pod_namespace": 2}),
    ],
    ids=lambda value: getattr(getattr(value, "DESCRIPTOR", None), "full_name", ""),
)
def test_fields_have_the_kubelets_numbers(message, fields):
    assert {field.name: field.number for field in message.DESCRIPTOR.fields} == fields


def test_the_service_has_the_kubelets_name():
    assert "PodResourcesLister" in podresources_pb2.DESCRIPTOR.services_by_name
    assert podresources_pb2.DESCRIPTOR.package == "v1"


async def test_devices_of_claims_are_listed(kubelet, socket):
    kubelet.add("cam", "cam-0", "cam-1", uid=UID, shares={"cam-1": "share-7"})
    first, second = await PodResources(socket).list()
    assert (first.namespace, first.claim, first.driver, first.pool, first.device) == (
        "lab",
        "cam",
        DRIVER,
        "node-1",
        "cam-0",
    )
    assert first.share_id is None
    assert second.share_id == "share-7"
    assert second.cdi_names == (f"{DRIVER}/claim={UID}-0", f"{DRIVER}/claim={UID}-1")


async def test_one_drivers_devices_can_be_asked_for(kubelet, socket):
    kubelet.add("cam", "cam-0", uid=UID)
    kubelet.add("lid", "lidar-0", uid="other", driver="lidar.example.com")
    listed = await PodResources(socket).list(driver=DRIVER)
    assert [device.device for device in listed] == ["cam-0"]


async def test_a_kubelet_without_claims_lists_none(kubelet, socket):
    assert list(await PodResources(socket).list()) == []


async def test_pods_without_claims_are_no_claims(kubelet, socket):
    kubelet.pods.append(podresources_pb2.PodResources(name="plain", namespace="lab"))
    assert list(await PodResources(socket).list()) == []


async def test_an_answer_larger_than_grpcs_default_is_read(kubelet, socket):
    for number in range(5000):
        kubelet.add(f"{'x' * 1000}-{number}", "cam-0", uid=UID)
    assert len(await PodResources(socket).list()) == 5000


async def test_a_kubelet_that_does_not_know_claims_says_nothing_of_them(kubelet, socket):
    kubelet.knows_claims = False
    kubelet.add("cam", "cam-0", uid=UID)
    with pytest.raises(PodResourcesError, match="does not tell the claims of its containers"):
        await PodResources(socket).list()


async def test_a_kubelet_that_did_not_know_claims_is_believed_after_its_update(kubelet, socket):
    podresources = PodResources(socket)
    kubelet.knows_claims = False
    with pytest.raises(PodResourcesError):
        await podresources.list()
    kubelet.knows_claims = True
    assert list(await podresources.list()) == []


async def test_resources_of_which_the_kubelets_device_manager_has_devices_are_named(
    kubelet, socket
):
    kubelet.allocatable = {"vendor.example/gpu": ("gpu-0", "gpu-1"), "vendor.example/gone": ()}
    assert await PodResources(socket).device_manager_resources() == {"vendor.example/gpu": True}


async def test_resources_of_which_containers_still_have_devices_of_the_device_manager_are_named(
    kubelet, socket
):
    kubelet.allocatable = {"vendor.example/gpu": ("gpu-0",), "vendor.example/moved": ()}
    kubelet.hold("vendor.example/gpu", "gpu-0")
    kubelet.hold("vendor.example/moved", "moved-0")
    kubelet.hold("vendor.example/none")
    kubelet.add("cam", "cam-0", uid=UID)
    assert await PodResources(socket).device_manager_resources() == {
        "vendor.example/gpu": True,
        "vendor.example/moved": False,
    }


async def test_a_kubelet_that_does_not_name_its_resources_is_a_sentence(socket):
    with pytest.raises(PodResourcesError, match="cannot be read"):
        await PodResources(socket, timeout_seconds=0.2).device_manager_resources()


async def test_a_missing_socket_is_a_sentence(socket):
    with pytest.raises(PodResourcesError, match=rf"at {socket} cannot be read: unavailable"):
        await PodResources(socket).list()


async def test_another_service_on_the_socket_is_a_sentence(serve, socket):
    async with serve() as server:
        with pytest.raises(PodResourcesError, match="cannot be read: unimplemented"):
            await PodResources(server.paths.dra).list()


async def test_a_kubelet_that_hangs_is_not_waited_for(kubelet, socket):
    async def hang(request, context):
        await asyncio.sleep(3600)

    kubelet.List = hang
    await kubelet.__aexit__()
    await kubelet.__aenter__()
    with pytest.raises(PodResourcesError, match="cannot be read: deadline exceeded"):
        await PodResources(socket, timeout_seconds=0.05).list()


async def test_a_kubelet_that_starts_again_is_asked_at_its_new_socket(socket):
    podresources = PodResources(socket)
    for uid in ("a", "b"):
        async with FakePodResources(socket) as kubelet:
            kubelet.add("cam", "cam-0", uid=uid)
            (listed,) = await podresources.list()
            assert listed.cdi_names == (f"{DRIVER}/claim={uid}-0",)


def test_a_node_plugin_that_never_asks_has_not_loaded_the_contract():
    code = (
        "import sys, drakit_nodeplugin.kubelet.claimview as _;"
        "sys.exit(any('podresources_pb2' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode == 0


# ------------------------------------------------------------ whose claim it is


@pytest.mark.parametrize(
    ("name", "uid"),
    [
        pytest.param(f"{DRIVER}/claim={UID}-0", UID, id="first-device"),
        pytest.param(f"{DRIVER}/claim={UID}-12", UID, id="thirteenth-device"),
        pytest.param(f"{DRIVER}/claim=cam", None, id="no-index"),
        pytest.param(f"{DRIVER}/claim=-1", None, id="no-uid"),
        pytest.param(f"{DRIVER}/device={UID}-0", None, id="other-class"),
        pytest.param(f"lidar.example.com/claim={UID}-0", None, id="other-driver"),
        pytest.param("", None, id="empty"),
    ],
)
def test_a_cdi_name_tells_its_claim(name, uid):
    assert claim_uid(name, driver=DRIVER) == uid


async def test_a_listed_claim_is_known_by_its_uid(kubelet, socket):
    kubelet.add("cam", "cam-0", uid=UID)
    claims = kubelet_claims(DRIVER, await PodResources(socket).list())
    assert claims.holds(row(UID, name="cam"))
    # The claim of this name was replaced; the old one is not what the container uses.
    assert not claims.holds(row("older", name="cam"))


async def test_a_listed_claim_without_our_cdi_names_is_known_by_its_name(kubelet, socket):
    kubelet.add("cam", "cam-0", uid=UID, cdi=False)
    claims = kubelet_claims(DRIVER, await PodResources(socket).list())
    assert claims.holds(row("any", name="cam"))
    assert not claims.holds(row("any", name="other"))


async def test_a_claim_of_another_driver_is_not_ours(kubelet, socket):
    kubelet.add("cam", "cam-0", uid=UID, driver="lidar.example.com", cdi=False)
    claims = kubelet_claims(DRIVER, await PodResources(socket).list())
    assert claims == KubeletClaims()


# ------------------------------------------------------------ the state file


def state(*uids: str, **changes: object) -> str:
    inner = {
        "kind": "DRACheckpoint",
        "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
        "ClaimInfoStateList": [
            {"ClaimUID": uid, "ClaimName": "cam", "Namespace": "lab", "PodUIDs": {}} for uid in uids
        ]
        or None,
    }
    text = json.dumps(inner | changes)
    return json.dumps({"Data": text, "Checksum": zlib.crc32(text.encode())})


# Written by the kubelet's own code (its unit test of Kubernetes 1.36).
WRITTEN = (
    r'{"Data":"{\"kind\":\"DRACheckpoint\",\"apiVersion\":\"checkpoint.dra.kubelet.k8s.io/v1\",'
    r"\"ClaimInfoStateList\":[{\"ClaimUID\":\"067798be-454e-4be4-9047-1aa06aea63f7\","
    r"\"ClaimName\":\"example\",\"Namespace\":\"default\",\"PodUIDs\":"
    r"{\"139cdb46-f989-4f17-9561-ca10cfb509a6\":{}},\"DriverState\":{\"test-driver.cdi.k8s.io\":"
    r"{\"Devices\":[{\"PoolName\":\"worker-1\",\"DeviceName\":\"dev-1\",\"ShareID\":null,"
    r"\"RequestNames\":[\"test request\"],\"CDIDeviceIDs\":[\"example.com/example=cdi-example\"]"
    r'}]}}}]}","Checksum":2570581864}'
)


@pytest.mark.parametrize(
    ("text", "uids"),
    [
        pytest.param(WRITTEN, {"067798be-454e-4be4-9047-1aa06aea63f7"}, id="of-a-kubelet"),
        pytest.param(state("a", "b"), {"a", "b"}, id="two-claims"),
        pytest.param(state(), set(), id="none"),
    ],
)
def test_the_state_file_names_claims(tmp_path, text, uids):
    file = tmp_path / "dra_manager_state"
    file.write_text(text)
    assert read_claim_uids(file) == uids


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="cut"),
        pytest.param("[]", id="list"),
        pytest.param("{}", id="no-data"),
        pytest.param('{"Data": 7, "Checksum": 7}', id="data-is-no-text"),
        pytest.param(state("a").replace('"Checksum": ', '"Checksum": 1'), id="wrong-checksum"),
        pytest.param(state("a", kind="Other"), id="other-kind"),
        pytest.param(state("a", apiVersion="v2"), id="later-version"),
        pytest.param(state(ClaimInfoStateList=[7]), id="entry-is-a-number"),
        pytest.param(state(ClaimInfoStateList=[{"ClaimUID": ""}]), id="no-uid"),
        pytest.param(state(ClaimInfoStateList=[{"UID": "a"}]), id="renamed-field"),
        pytest.param("[" * 100_000, id="nested-without-end"),
    ],
)
def test_a_state_file_that_is_not_understood_says_nothing(tmp_path, text):
    file = tmp_path / "dra_manager_state"
    file.write_text(text)
    with pytest.raises(StateFileError, match="is no checkpoint of a known kubelet"):
        read_claim_uids(file)


def test_a_missing_state_file_says_nothing(tmp_path):
    with pytest.raises(StateFileError, match="cannot be read: No such file"):
        read_claim_uids(tmp_path / "dra_manager_state")


def test_a_state_file_that_was_replaced_behind_its_mount_says_nothing(tmp_path):
    file = tmp_path / "dra_manager_state"
    file.write_text(state("a"))
    with file.open() as opened:
        file.unlink()
        with pytest.raises(StateFileError, match="mount its directory, not the file"):
            # As a mount of the file alone does, this path leads to what is gone.
            read_claim_uids(file.__class__(f"/proc/{os.getpid()}/fd/{opened.fileno()}"))


# ------------------------------------------------------------ both together


@pytest.fixture
def view(socket, tmp_path):
    return KubeletClaimView(DRIVER, PodResources(socket), state_file=tmp_path / "dra_manager_state")


async def test_the_state_file_adds_claims_that_no_container_uses(kubelet, view, tmp_path):
    kubelet.add("cam", "cam-0", uid="used")
    (tmp_path / "dra_manager_state").write_text(state("used", "left"))
    claims = await view.listed()
    assert claims is not None
    assert claims.uids == {"used", "left"}
    assert claims.containers_told


async def test_the_state_file_alone_is_marked(view, tmp_path):
    (tmp_path / "dra_manager_state").write_text(state("left"))
    claims = await view.listed()
    assert claims is not None
    assert claims.uids == {"left"}
    assert not claims.containers_told


async def test_podresources_alone_are_enough(kubelet, socket):
    kubelet.add("cam", "cam-0", uid="used")
    claims = await KubeletClaimView(DRIVER, PodResources(socket)).listed()
    assert claims is not None
    assert claims.uids == {"used"}


async def test_without_any_source_nothing_is_known(view):
    assert await view.listed() is None


async def test_a_source_that_fails_is_told_once_and_its_return_too(socket, caplog):
    caplog.set_level("INFO")
    view = KubeletClaimView(DRIVER, PodResources(socket))
    for _ in range(3):
        await view.listed()
    async with FakePodResources(socket):
        for _ in range(3):
            await view.listed()
    assert [record.message for record in caplog.records if "kubelet" in record.message] == [
        "the kubelet's claims cannot be read",
        "the kubelet's claims can be read again",
    ]
