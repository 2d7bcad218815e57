"""
The status of claims on a real API server: the entries that the node plugin writes, and the writes
that its token may make.

A control plane without nodes is sufficient: the tests write claims in place of the scheduler. It
runs once with its defaults, and once without DRAResourceClaimGranularStatusAuthorization.
Kubernetes 1.34 and 1.35 do not have that feature, so there only the chart's admission policy
protects a status.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from drakit import ClaimReference, Condition, NetworkData, PreparedDevice
from drakit_daemon.kube import ApiError, Session, connect
from drakit_nodeplugin.claims.claim_status import ClaimStatuses
from drakit_nodeplugin.claims.source import ApiClaims
from drakit_nodeplugin.claims.work import ClaimResult, KubeletDevice
from e2e.alone import control_plane
from e2e.cluster.api import Capability, Cluster
from e2e.cluster.choice import REPOSITORY
from e2e.kit import write_kubeconfig

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.feature("claims"),
    pytest.mark.needs(Capability.CONTROL_PLANE_ALONE),
]

GATE = "DRAResourceClaimGranularStatusAuthorization"
NAMESPACE = "drakit-system"
CAMERAS, LAMPS, NICS = "cam.example.com", "lamp.example.com", "nic.example.com"
"""The release has the first two; the third belongs to another vendor."""
VALUES = {
    "image": {"repository": "registry.example.com/drakit"},
    "nodeplugin": {
        "claimStatus": {"enabled": True},
        "drivers": [
            {"driver": "cam:Cam", "name": CAMERAS},
            {"driver": "lamp:Lamp", "name": LAMPS},
        ],
    },
}
OURS = (
    "ServiceAccount",
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
)
POD = {"resource": "pods", "name": "pod", "uid": "00000000-0000-0000-0000-000000000001"}
NIC = {"driver": NICS, "pool": "n1", "device": "nic-0", "data": {"vf": 3}}
CAM = {"driver": CAMERAS, "pool": "n1", "device": "cam-0", "data": {"old": True}}
READY = Condition(type="Ready", status="True", reason="Configured")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="1.36", marks=pytest.mark.kubernetes(oldest="1.36")),
        pytest.param(False, id="as-1.34", marks=pytest.mark.slow),
    ],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    values = tmp_path_factory.mktemp("values") / "values.yaml"
    values.write_text(json.dumps(VALUES))
    with control_plane("status", **{GATE: request.param}) as started:
        chart = str(REPOSITORY / "charts/drakit")
        options = ("--namespace", NAMESPACE, "--values", str(values))
        text = started.helm("template", "drakit", chart, *options).stdout
        objects = [each for each in yaml.safe_load_all(text) if each and each["kind"] in OURS]
        started.kubectl("create", "namespace", NAMESPACE)
        for name in ("n1", "n2"):
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
            started.apply(json.dumps(node))
        started.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
        yield started


@pytest.fixture(scope="module")
def kubeconfig(server: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kubeconfig with the token of the node plugin of node n1."""
    token = server.kubectl(
        *("-n", NAMESPACE, "create", "token", "drakit-nodeplugin"),
        *("--bound-object-kind=Node", "--bound-object-name=n1"),
    ).stdout.strip()
    path = tmp_path_factory.mktemp("plugin") / "kubeconfig"
    write_kubeconfig(server, path, token=token)
    return path


@pytest.fixture
def claim(server: Cluster) -> Iterator[Callable[..., ClaimReference]]:
    """Create claims that are allocated on a node, with entries in their status."""
    made: list[str] = []

    def create(name: str, *entries: dict[str, Any], node: str = "n1") -> ClaimReference:
        made.append(name)
        requests = [
            {"name": each, "exactly": {"deviceClassName": "any"}} for each in ("cam", "lamp", "nic")
        ]
        body = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"devices": {"requests": requests}},
        }
        server.apply(json.dumps(body))
        field = {"key": "metadata.name", "operator": "In", "values": [node]}
        results = [
            {"request": request, "driver": driver, "pool": node, "device": device}
            for request, driver, device in (
                ("cam", CAMERAS, "cam-0"),
                ("lamp", LAMPS, "lamp-0"),
                ("nic", NICS, "nic-0"),
            )
        ]
        status = {
            "allocation": {
                "devices": {"results": results},
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
            },
            "reservedFor": [POD],
            "devices": [{**each, "pool": node} for each in entries],
        }
        patch(server, name, {"status": status})
        uid = server.get("resourceclaim", name)["metadata"]["uid"]
        return ClaimReference(namespace="default", name=name, uid=uid)

    yield create
    server.kubectl("delete", "resourceclaim", "--wait=false", *made)


def patch(server: Cluster, name: str, body: dict[str, Any], *options: str) -> None:
    server.kubectl(
        *("patch", "resourceclaim", name, "--subresource=status", "--type=merge"),
        *("-p", json.dumps(body), *options),
    )


def status(server: Cluster, claim: ClaimReference) -> dict[str, Any]:
    found: dict[str, Any] = server.get("resourceclaim", claim.name)["status"]
    return found


# ------------------------------------------------------------ writes of the plugin


def answer(device: str, prepared: PreparedDevice) -> ClaimResult:
    known = KubeletDevice(requests=("any",), pool="n1", device=device, cdi_ids=())
    return ClaimResult(devices=(known,), prepared=(prepared,))


async def written(session: Session, driver: str, *steps: tuple[ClaimReference, Any]) -> list[str]:
    """Run the writer of a driver until each step, a prepare or an unprepare, has its result."""
    future: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
    future.set_result(session)
    results: asyncio.Queue[str] = asyncio.Queue()
    statuses = ClaimStatuses(driver, ApiClaims(future), node="n1", on_write=results.put_nowait)
    running = asyncio.create_task(statuses.run())
    try:
        found: list[str] = []
        for claim, given in steps:
            operation = "unprepare" if given is None else "prepare"
            statuses.finished(claim, operation, given or ClaimResult(), 0.1)
            found.append(await asyncio.wait_for(results.get(), 30))
        return found
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_two_drivers_write_their_entries_and_remove_only_them(server, kubeconfig, claim):
    of = claim("two", NIC)
    before = status(server, of)
    full = PreparedDevice(
        conditions=(READY,),
        data={"channels": [1, {"a": None}], "text": "<ü>"},
        network_data=NetworkData(
            interface_name="net1", ips=("192.0.2.5/24", "2001:db8::5/64"), hardware_address="0a:58"
        ),
    )
    lit = PreparedDevice(data={"lit": True})
    async with await connect(kubeconfig, user_agent="test") as session:
        assert await written(session, CAMERAS, (of, answer("cam-0", full))) == ["success"]
        assert await written(session, LAMPS, (of, answer("lamp-0", lit))) == ["success"]
        now = status(server, of)
        entries = {each["driver"]: each for each in now.pop("devices")}
        assert entries[NICS] == {**NIC, "conditions": None}  # the API server adds the null
        assert entries[LAMPS]["data"] == {"lit": True}
        camera = entries[CAMERAS]
        assert (camera["pool"], camera["device"]) == ("n1", "cam-0")
        (condition,) = camera["conditions"]
        assert (condition["type"], condition["status"]) == ("Ready", "True")
        assert camera["data"] == full.data
        assert camera["networkData"] == {
            "interfaceName": "net1",
            "ips": ["192.0.2.5/24", "2001:db8::5/64"],
            "hardwareAddress": "0a:58",
        }
        assert now == {key: value for key, value in before.items() if key != "devices"}

        # The same status later keeps its time. Then a restart, and an unprepare.
        await asyncio.sleep(1.1)
        again = PreparedDevice(conditions=(READY,))
        assert await written(session, CAMERAS, (of, answer("cam-0", again))) == ["success"]
        (camera,) = (each for each in status(server, of)["devices"] if each["driver"] == CAMERAS)
        assert camera["conditions"] == [condition]
        assert "data" not in camera
        assert await written(session, CAMERAS, (of, None)) == ["success"]
    left = [each["driver"] for each in status(server, of)["devices"]]
    assert sorted(left) == [LAMPS, NICS]


async def test_a_claim_of_the_same_name_is_not_written(server, kubeconfig, claim):
    of = claim("same")
    other = ClaimReference(namespace="default", name="same", uid=POD["uid"])
    async with await connect(kubeconfig, user_agent="test") as session:
        result = answer("cam-0", PreparedDevice(conditions=(READY,)))
        assert await written(session, CAMERAS, (other, result)) == ["success"]
        # The claim can be replaced between the read and the write.
        future: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        future.set_result(session)
        entry = {"driver": CAMERAS, "pool": "n1", "device": "cam-0", "data": {"a": 1}}
        with pytest.raises(ApiError) as caught:
            await ApiClaims(future).apply_status(other, {"devices": [entry]}, field_manager="test")
        assert "uid" in str(caught.value)
    assert "devices" not in status(server, of)


# ------------------------------------------------------------ permissions of its token

CHANGED = {"driver": CAMERAS, "pool": "n1", "device": "cam-0", "data": {"new": True}}
POLICY = "ValidatingAdmissionPolicy 'drakit-nodeplugin-claims'"


@pytest.mark.parametrize(
    ("change", "allowed", "sentence"),
    [
        pytest.param({"devices": [CHANGED, NIC]}, True, "", id="own-entry"),
        pytest.param({"devices": [NIC]}, True, "", id="own-entry-removed"),
        pytest.param(
            {"devices": [CAM, {**NIC, "data": {"vf": 4}}]},
            False,
            "may only change entries of status.devices of the drivers",
            id="entry-of-another-driver",
        ),
        pytest.param(
            {"devices": [CAM]},
            False,
            "may only change entries of status.devices of the drivers",
            id="entry-of-another-driver-removed",
        ),
        pytest.param(
            {"reservedFor": [{**POD, "name": "other"}]},
            False,
            "may not change status.allocation and status.reservedFor",
            id="pod-that-uses-it",
        ),
        pytest.param({"allocation": None}, False, "may not change status.all", id="allocation"),
    ],
)
async def test_the_token_of_a_plugin_writes_only_entries_of_its_drivers(
    server: Cluster, kubeconfig: Path, claim, change: dict[str, Any], allowed: bool, sentence: str
):
    claim("written", CAM, NIC)
    refusal = await refused(kubeconfig, "written", change)
    if allowed:
        assert refusal == ""
        return
    # With the gate, the API server itself rejects the write before it evaluates the policy.
    assert (POLICY in refusal and sentence in refusal) or (
        server.gates[GATE] and "changing status." in refusal and "resourceclaims/" in refusal
    )


async def test_the_token_of_a_plugin_writes_no_claim_of_another_node(server, kubeconfig, claim):
    claim("elsewhere", CAM, node="n2")
    refusal = await refused(kubeconfig, "elsewhere", {"devices": [{**CHANGED, "pool": "n2"}]})
    assert (POLICY in refusal and "are allocated to that node" in refusal) or (
        server.gates[GATE] and "arbitrary-node:patch" in refusal
    )


async def refused(kubeconfig: Path, name: str, change: dict[str, Any]) -> str:
    """Patch a status with the token. Return the reason for the rejection, or an empty string."""
    path = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{name}/status"
    async with await connect(kubeconfig, user_agent="test") as session:
        try:
            await session.patch(path, {"status": change})
        except ApiError as error:
            return error.message
    return ""
