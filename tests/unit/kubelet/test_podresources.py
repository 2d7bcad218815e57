"""The kubelet's reports on claims: over its socket, in its state file, and both together."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import zlib
from dataclasses import replace

import grpc
import pytest

from drakit_nodeplugin.claims.kubelet_claims import (
    KubeletClaimView,
    StateFileError,
    read_claim_uids,
)
from drakit_nodeplugin.state.cdi_files import claim_uid
from drakit_nodeplugin.state.podresources import PodResources, PodResourcesError, PodView, own_pod
from drakit_nodeplugin.state.records import StoredClaim
from drakit_proto.kubelet.podresources.v1 import podresources_pb2
from tests.fakes.podresources import OWN_POD, OWN_POD_ENVIRONMENT, FakePodResources

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


def view_of(socket, **options) -> KubeletClaimView:
    return KubeletClaimView(DRIVER, PodResources(socket, own_pod=OWN_POD), **options)


@pytest.fixture
def socket(root):
    return root / "pod-resources" / "kubelet.sock"


@pytest.fixture
async def kubelet(socket):
    async with FakePodResources(socket) as kubelet:
        yield kubelet


# ------------------------------------------------------------ the socket


async def test_devices_of_claims_are_listed(kubelet, socket):
    kubelet.add("cam", "cam-0", "cam-1", uid=UID, shares={"cam-1": "share-7"})
    first, second = (await PodResources(socket, own_pod=OWN_POD).claims()).devices
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


async def test_pods_without_claims_are_no_claims(kubelet, socket):
    kubelet.pods.append(podresources_pb2.PodResources(name="plain", namespace="lab"))
    claims = await PodResources(socket, own_pod=OWN_POD).claims()
    assert (claims.devices, claims.pods) == ((), PodView.COMPLETE)


async def test_an_answer_larger_than_grpcs_default_is_read(kubelet, socket):
    for number in range(5000):
        kubelet.add(f"{'x' * 1000}-{number}", "cam-0", uid=UID)
    assert len((await PodResources(socket, own_pod=OWN_POD).claims()).devices) == 5000


async def test_a_kubelet_that_does_not_know_claims_is_believed_after_its_update(kubelet, socket):
    podresources = PodResources(socket, own_pod=OWN_POD, fresh_seconds=0)
    kubelet.knows_claims = False
    kubelet.add("cam", "cam-0", uid=UID)
    with pytest.raises(PodResourcesError, match="does not list the claims of its containers"):
        await podresources.claims()
    kubelet.knows_claims = True
    await asyncio.sleep(0)
    assert len((await podresources.claims()).devices) == 1


async def test_resources_of_which_containers_still_have_devices_of_the_device_manager_are_named(
    kubelet, socket
):
    kubelet.allocatable = {"vendor.example/gpu": ("gpu-0",), "vendor.example/moved": ()}
    kubelet.hold("vendor.example/gpu", "gpu-0")
    kubelet.hold("vendor.example/moved", "moved-0")
    kubelet.hold("vendor.example/none")
    kubelet.add("cam", "cam-0", uid=UID)
    manager = await PodResources(socket, own_pod=OWN_POD).device_manager()
    assert manager.resources == {
        "vendor.example/gpu": True,
        "vendor.example/moved": False,
    }
    assert manager.unknown is None


async def test_a_missing_socket_is_a_sentence(socket):
    podresources = PodResources(socket, own_pod=OWN_POD)
    for ask in (podresources.claims, podresources.device_manager):
        with pytest.raises(PodResourcesError, match=rf"at {socket} cannot be read: unavailable"):
            await ask()


async def test_another_service_on_the_socket_is_a_sentence(serve, socket):
    async with serve() as server:
        with pytest.raises(PodResourcesError, match="cannot be read: unimplemented"):
            await PodResources(server.paths.dra, own_pod=OWN_POD).claims()


async def answer_with(handler, kubelet: FakePodResources, method: str = "List") -> None:
    """Start the kubelet again, with another handler of a method."""
    setattr(kubelet, method, handler)
    await kubelet.__aexit__()
    await kubelet.__aenter__()


async def test_a_kubelet_that_hangs_is_not_waited_for(kubelet, socket):
    async def hang(request, context):
        await asyncio.sleep(3600)

    await answer_with(hang, kubelet)
    with pytest.raises(PodResourcesError, match="cannot be read: deadline exceeded"):
        await PodResources(socket, own_pod=OWN_POD, timeout_seconds=0.05).claims()


async def test_a_kubelet_that_starts_again_is_asked_at_its_new_socket(socket):
    podresources = PodResources(socket, own_pod=OWN_POD, fresh_seconds=0)
    for uid in ("a", "b"):
        async with FakePodResources(socket) as kubelet:
            kubelet.add("cam", "cam-0", uid=uid)
            (listed,) = (await podresources.claims()).devices
            assert listed.cdi_names == (f"{DRIVER}/claim={uid}-0",)


def test_a_node_plugin_that_never_asks_has_not_loaded_the_contract():
    code = (
        "import sys, drakit_nodeplugin.state.podresources as _;"
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
def test_a_cdi_name_identifies_its_claim(name, uid):
    assert claim_uid(name, driver=DRIVER) == uid


async def test_a_listed_claim_is_known_by_its_uid(kubelet, socket):
    kubelet.add("cam", "cam-0", uid=UID)
    claims = await view_of(socket).listed()
    assert claims.holds(row(UID, name="cam"))
    # The claim of this name was replaced; the old one is not what the container uses.
    assert not claims.holds(row("older", name="cam"))


async def test_a_listed_claim_without_our_cdi_names_is_known_by_its_name(kubelet, socket):
    kubelet.add("cam", "cam-0", uid=UID, cdi=False)
    claims = await view_of(socket).listed()
    assert claims.holds(row("any", name="cam"))
    assert not claims.holds(row("any", name="other"))


async def test_a_claim_of_another_driver_is_not_ours(kubelet, socket):
    kubelet.add("cam", "cam-0", uid=UID, driver="lidar.example.com", cdi=False)
    claims = await view_of(socket).listed()
    assert (claims.devices, claims.uids, claims.unnamed) == ((), frozenset(), frozenset())


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
def test_an_unknown_state_file_is_an_error(tmp_path, text):
    file = tmp_path / "dra_manager_state"
    file.write_text(text)
    with pytest.raises(StateFileError, match="is not a checkpoint of a known kubelet"):
        read_claim_uids(file)


def test_a_missing_state_file_is_an_error(tmp_path):
    with pytest.raises(StateFileError, match="cannot be read: No such file"):
        read_claim_uids(tmp_path / "dra_manager_state")


def test_a_state_file_that_was_replaced_behind_its_mount_is_an_error(tmp_path):
    file = tmp_path / "dra_manager_state"
    file.write_text(state("a"))
    with file.open() as opened:
        file.unlink()
        with pytest.raises(StateFileError, match="mount its directory, not the file"):
            # Like a mount of only the file, this path leads to a deleted file.
            read_claim_uids(file.__class__(f"/proc/{os.getpid()}/fd/{opened.fileno()}"))


# ------------------------------------------------------------ both together


@pytest.fixture
def view(socket, tmp_path):
    return view_of(socket, state_file=tmp_path / "dra_manager_state")


async def test_the_state_file_adds_claims_that_no_container_uses(kubelet, view, tmp_path):
    kubelet.add("cam", "cam-0", uid="used")
    (tmp_path / "dra_manager_state").write_text(state("used", "left"))
    claims = await view.listed()
    assert claims.uids == {"used", "left"}
    assert claims.pods is PodView.COMPLETE
    (tmp_path / "dra_manager_state").write_text("{")
    claims = await view.listed()
    assert (claims.uids, claims.pods) == ({"used"}, PodView.UNKNOWN), "the file may name others"


async def test_one_source_alone_is_marked_if_it_is_the_state_file(socket, view, tmp_path):
    claims = await view.listed()
    assert (claims.devices, claims.uids, claims.pods) == ((), frozenset(), PodView.UNKNOWN)
    (tmp_path / "dra_manager_state").write_text(state("left"))
    claims = await view.listed()
    assert (claims.uids, claims.pods) == ({"left"}, PodView.UNKNOWN)
    async with FakePodResources(socket) as kubelet:
        kubelet.add("cam", "cam-0", uid="used")
        claims = await view_of(socket).listed()
        assert (claims.uids, claims.pods) == ({"used"}, PodView.COMPLETE)


async def test_a_socket_that_fails_is_logged_once_for_all_drivers_and_its_return_too(
    socket, caplog
):
    caplog.set_level("INFO")
    podresources = PodResources(socket, own_pod=OWN_POD, fresh_seconds=0)
    views = [KubeletClaimView(driver, podresources) for driver in ("a.example", "b.example")]
    for _ in range(3):
        await asyncio.gather(*(view.listed() for view in views))
    async with FakePodResources(socket):
        for _ in range(3):
            await asyncio.gather(*(view.listed() for view in views))
    assert [record.message for record in caplog.records if "kubelet" in record.message] == [
        "the kubelet's podresources cannot be used",
        "the kubelet's podresources can be used again",
    ]


async def test_a_state_file_that_fails_is_logged_once_and_its_return_too(view, tmp_path, caplog):
    caplog.set_level("INFO")
    for _ in range(3):
        await view.listed()
    (tmp_path / "dra_manager_state").write_text(state("left"))
    for _ in range(3):
        await view.listed()
    assert [record.message for record in caplog.records if "state file" in record.message] == [
        "the kubelet's state file cannot be read",
        "the kubelet's state file can be read again",
    ]


# ------------------------------------------------------------ how much of the node it shows


async def test_a_kubelet_that_has_not_read_its_pods_yet_proves_nothing(kubelet, socket):
    kubelet.synced = False
    assert (await view_of(socket).listed()).pods is PodView.PARTIAL
    manager = await PodResources(socket, own_pod=OWN_POD).device_manager()
    assert manager.unknown is not None
    assert str(OWN_POD) in manager.unknown


@pytest.mark.parametrize(
    "other",
    [replace(OWN_POD, name="drakit-nodeplugin-other"), replace(OWN_POD, namespace="elsewhere")],
    ids=["another-name", "another-namespace"],
)
async def test_a_pod_that_is_like_ours_is_not_ours(kubelet, socket, other):
    listed = await PodResources(socket, own_pod=other).claims()
    assert listed.pods is PodView.PARTIAL


async def test_outside_of_a_pod_a_list_keeps_what_it_names_and_confirms_nothing(kubelet, socket):
    kubelet.add("cam", "cam-0", uid=UID)
    claims = await KubeletClaimView(DRIVER, PodResources(socket, own_pod=None)).listed()
    assert claims.uids == {UID}
    assert claims.pods is PodView.UNKNOWN


@pytest.mark.parametrize(
    ("environment", "pod"),
    [
        pytest.param(OWN_POD_ENVIRONMENT, OWN_POD, id="in-a-pod"),
        pytest.param({"POD_NAME": "a"}, None, id="no-namespace"),
        pytest.param({"POD_NAME": "", "POD_NAMESPACE": "a"}, None, id="empty"),
        pytest.param({}, None, id="outside"),
    ],
)
def test_our_own_pod_is_known_from_the_environment(environment, pod):
    assert own_pod(environment) == pod


# ------------------------------------------------------------ one client for all


async def test_all_drivers_that_ask_at_once_share_one_call(kubelet, socket):
    kubelet.limit = 10
    kubelet.add("cam", "cam-0", uid=UID)
    podresources = PodResources(socket, own_pod=OWN_POD)
    views = [KubeletClaimView(f"{n}.example.com", podresources) for n in range(40)]
    found = await asyncio.gather(*(view.listed() for view in views))
    assert {claims.pods for claims in found} == {PodView.COMPLETE}
    assert len({claims.asked_at for claims in found}) == 1
    assert (await podresources.device_manager()).unknown is None
    assert kubelet.calls == ["List", "GetAllocatableResources"]


async def test_an_answer_serves_for_a_moment_and_then_there_is_a_new_one(kubelet, socket):
    podresources = PodResources(socket, own_pod=OWN_POD, fresh_seconds=0.1)
    first = await podresources.claims()
    assert await podresources.claims() is first
    await asyncio.sleep(0.15)
    second = await podresources.claims()
    assert second.asked_at > first.asked_at
    assert kubelet.calls.count("List") == 2


async def test_a_failure_serves_for_a_moment_too(kubelet, socket):
    kubelet.limit = 0
    podresources = PodResources(socket, own_pod=OWN_POD, fresh_seconds=0.1)
    for _ in range(5):
        with pytest.raises(PodResourcesError):
            await podresources.claims()
    assert kubelet.calls == ["List"]
    kubelet.limit = None
    await asyncio.sleep(0.15)
    assert (await podresources.claims()).pods is PodView.COMPLETE


async def test_a_waiter_that_is_cancelled_leaves_the_call_to_the_others(kubelet, socket):
    podresources = PodResources(socket, own_pod=OWN_POD)
    first, second = (asyncio.create_task(podresources.claims()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).pods is PodView.COMPLETE
    assert kubelet.calls.count("List") == 1


@pytest.mark.parametrize("method", ["List", "Get", "GetAllocatableResources"])
async def test_a_call_beyond_the_kubelets_rate_limit_is_no_answer(kubelet, socket, method):
    async def refuse(request, context):
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")

    await answer_with(refuse, kubelet, method)
    podresources = PodResources(socket, own_pod=OWN_POD)
    asks_devices = method == "GetAllocatableResources"
    ask = podresources.device_manager if asks_devices else podresources.claims
    with pytest.raises(PodResourcesError, match=r"read: resource exhausted \(rejected by"):
        await ask()
