"""The driver on a host: publishing, preparing, and errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace

import pytest

from drakit import (
    AllocatedClaim,
    AllocatedDevice,
    ClaimReference,
    DeviceNode,
    DriverError,
    Inventory,
    Mount,
    NoParameters,
)
from drakit_drivers.hostdev import HostDevices, HostDevicesConfig
from tests.fakes.hostdev import Labeled, inventory
from tests.fakes.node import StaticNode
from tests.fakes.sysfs import FakeHost, policy, prepared

CLAIM = ClaimReference(namespace="default", name="c", uid="u")
KVM = {"kvm": policy("misc", "/dev/kvm", sharing={"mode": "Users", "users": 2})}
ZRAM = {"zram": policy("block", "/dev/zram*")}


def allocated(name: str, request: str = "main") -> AllocatedDevice:
    return AllocatedDevice(name=name, pool="node-1", request=request)


def made_outside(config: HostDevicesConfig, node: Labeled | StaticNode) -> HostDevices:
    """Make a driver as the node plugin does: in a thread without an event loop."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(HostDevices, config, node).result()


def driver(
    host: FakeHost, policies: dict[str, dict], node: Labeled | None = None, **options
) -> HostDevices:
    return made_outside(host.config(policies, **options), node or Labeled())


async def published(made: HostDevices) -> list[str]:
    return [device.name for device in (await inventory(made)).devices]


async def next_names(stream: AsyncIterator[Inventory]) -> list[str]:
    return [device.name for device in (await anext(stream)).devices]


def test_opaque_parameters_are_refused_and_not_ignored():
    assert HostDevices.parameters_type is NoParameters


async def test_devices_are_published_with_attributes_and_size(host):
    host.device("virtual/misc/kvm", "10:232", node=True)
    host.block("virtual/block/zram0", "253:0", size=32768, devtype="disk", node=True)
    devices = {each.name: each for each in (await inventory(driver(host, KVM | ZRAM))).devices}
    assert list(devices) == ["kvm-0", "kvm-1", "zram-zram0"]
    assert devices["kvm-0"].attributes["policy"] == "kvm"
    assert devices["zram-zram0"].capacity == {"size": "16777216"}
    assert devices["zram-zram0"].attributes["devtype"] == "disk"


@pytest.mark.looptime
async def test_a_change_is_noticed_within_the_rescan_interval(host, looptime):
    async with aclosing(driver(host, ZRAM, rescanInterval="10s").devices()) as stream:
        assert await next_names(stream) == []
        change = asyncio.create_task(next_names(stream))
        await asyncio.sleep(60)
        assert not change.done()
        host.block("virtual/block/zram0", "253:0", node=True)
        assert await change == ["zram-zram0"]
        assert looptime <= 70
        host.mount("253:0", "/mnt", source="/dev/zram0")
        assert await next_names(stream) == []
    assert looptime <= 80


@pytest.mark.looptime
async def test_labels_that_become_known_are_noticed_within_a_second(host, looptime):
    host.device("virtual/misc/kvm", "10:232", node=True)
    node = Labeled(labels=None)
    made = driver(
        host,
        {"kvm": KVM["kvm"] | {"nodeSelector": {"matchLabels": {"kvm": "yes"}}}},
        node=node,
        rescanInterval="1h",
    )
    async with aclosing(made.devices()) as stream:
        first = asyncio.ensure_future(next_names(stream))
        await asyncio.sleep(30)
        assert not first.done(), "devices that were published before must not vanish meanwhile"
        node.labels = {}
        assert await first == []
        node.labels = {"kvm": "yes"}
        assert len(await next_names(stream)) == 2
    assert looptime <= 31.5


async def test_a_device_is_prepared_with_its_node_and_its_path_in_the_environment(host):
    host.device("virtual/misc/tun", "10:200", devname="net/tun", node=True)
    made = driver(
        host,
        {
            "tun": policy(
                "misc",
                "/dev/net/tun",
                container={"permissions": "r", "uid": 1, "gid": 2, "mode": "0640"},
            )
        },
    )
    edits = await prepared(made, allocated("tun-net-tun", request="vpn-dev/fast"))
    assert edits.device_nodes == (
        DeviceNode(
            path="/dev/net/tun",
            type="c",
            major=10,
            minor=200,
            permissions="r",
            file_mode=0o640,
            uid=1,
            gid=2,
            identity="misc - - net/tun - net/tun",
        ),
    )
    assert edits.env == {
        "HOSTDEV_VPN_DEV": "/dev/net/tun",
        "HOSTDEV_VPN_DEV__TUN_NET_TUN": "/dev/net/tun",
    }
    assert edits == await prepared(made, allocated("tun-net-tun", request="vpn-dev/fast"))


async def test_two_devices_of_a_claim_cannot_have_one_path_in_the_container(host):
    for index in (0, 1):
        host.block(f"virtual/block/zram{index}", f"253:{index}", node=True)
    devices = tuple(allocated(f"zram-zram{index}") for index in (0, 1))
    claims = [
        AllocatedClaim(claim=CLAIM, devices=devices),
        AllocatedClaim(claim=replace(CLAIM, uid="one"), devices=devices[:1]),
    ]
    at_one = {"zram": policy("block", "/dev/zram*", container={"path": "/dev/scratch"})}
    results = await driver(host, at_one).prepare_claims(claims)
    assert "two devices of the claim have the path /dev/scratch" in str(results["u"])
    (edits,) = results["one"]
    assert edits.device_nodes[0].path == "/dev/scratch"
    in_directory = {"zram": policy("block", "/dev/zram*", container={"path": "/dev/scratch/"})}
    results = await driver(host, in_directory).prepare_claims(claims)
    assert [node.path for edits in results["u"] for node in edits.device_nodes] == [
        "/dev/scratch/zram0",
        "/dev/scratch/zram1",
    ]
    env = {name: path for edits in results["u"] for name, path in edits.env.items()}
    assert env["HOSTDEV_MAIN__ZRAM_ZRAM0"] == "/dev/scratch/zram0"
    assert env["HOSTDEV_MAIN__ZRAM_ZRAM1"] == "/dev/scratch/zram1"


async def test_mounts_of_the_policy_are_read_only(host):
    host.device("virtual/misc/kvm", "10:232", node=True)
    paths = {"/usr/share/a": "/usr/share/a", "/lib/firmware": "/fw"}
    mounts = [{"hostPath": host, "containerPath": own} for host, own in paths.items()]
    made = driver(host, {"kvm": policy("misc", "/dev/kvm", container={"mounts": mounts})})
    edits = await prepared(made, allocated("kvm-kvm"))
    assert edits.mounts == (
        Mount(host_path="/usr/share/a", container_path="/usr/share/a"),
        Mount(host_path="/lib/firmware", container_path="/fw"),
    )
    assert all("ro" in mount.options for mount in edits.mounts)


async def test_each_disk_that_a_policy_names_is_refused_and_its_zram_devices_are_published(host):
    for index, name in enumerate(("sda", "sdb", "zram0", "zram1")):
        host.block(f"virtual/block/{name}", f"8:{index}", node=True)
    made = driver(host, {"mixed": policy("block", "/dev/sd*", "/dev/zram*")})
    listed = await inventory(made)
    assert [each.name for each in listed.devices] == ["mixed-zram0", "mixed-zram1"]
    found = [(each.device, each.reason, each.policy) for each in listed.rejected]
    assert found == [(path, "NotSupported", "mixed") for path in ("/dev/sda", "/dev/sdb")]
    for rejected in listed.rejected:
        assert "use a CSI driver: see 'Disks: use CSI'" in rejected.message
    with pytest.raises(DriverError, match="hostdev publishes no disk; use a CSI driver"):
        await prepared(made, allocated("mixed-sdb"))


async def test_a_policy_decides_whether_the_pods_of_a_vanished_device_are_evicted(host):
    host.device("virtual/misc/kvm", "10:232", node=True)
    host.device("virtual/misc/fuse", "10:229", node=True)
    policies = {
        "evicts": policy("misc", "/dev/kvm", onVanish="Evict"),
        "taints": policy("misc", "/dev/fuse"),
    }
    listed = await inventory(driver(host, policies))
    devices = {each.name: each.evict_if_gone for each in listed.devices}
    assert devices == {"evicts-kvm": True, "taints-fuse": False}


async def test_the_outcome_of_each_policy_is_reported_with_conflicts(host):
    host.device("virtual/misc/kvm", "10:232", node=True)
    host.device("virtual/misc/fuse", "10:229", node=True)
    policies = KVM | {"more": policy("misc", "/dev/k*", "/dev/fuse")}
    outcomes = {each.policy: each for each in (await inventory(driver(host, policies))).policies}
    assert (outcomes["kvm"].matched, outcomes["kvm"].published) == (1, 2)
    assert (outcomes["more"].matched, outcomes["more"].published) == (2, 1)
    assert [(c.device, c.policy) for c in outcomes["kvm"].conflicts] == [("/dev/kvm", "more")]
    assert [(c.device, c.policy) for c in outcomes["more"].conflicts] == [("/dev/kvm", "kvm")]


async def test_a_device_that_is_gone_is_named(host):
    with pytest.raises(DriverError, match="device kvm-0 is no longer on node node-1; connect"):
        await prepared(driver(host, KVM), allocated("kvm-0"))


async def test_a_device_that_was_mounted_since_is_not_prepared(host):
    host.block("virtual/block/zram0", "253:0", node=True)
    made = driver(host, ZRAM)
    assert await published(made) == ["zram-zram0"]
    host.mount("253:0", "/mnt", source="/dev/zram0")
    with pytest.raises(DriverError) as caught:
        await prepared(made, allocated("zram-zram0"))
    assert "device zram-zram0 (/dev/zram0)" in str(caught.value)
    assert "it is mounted at /mnt" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param("c", "10:1", id="another-number"),
        pytest.param("b", "10:232", id="another-type"),
        pytest.param(None, "", id="no-node"),
    ],
)
async def test_a_node_that_is_not_the_device_is_not_published(host, kind, number):
    host.device("virtual/misc/kvm", "10:232")
    made = driver(host, KVM)
    if kind:
        host.node("kvm", kind, number)
    assert await published(made) == []
    with pytest.raises(DriverError, match="its device node"):
        await prepared(made, allocated("kvm-0"))


async def test_conflicts_and_mistakes_are_logged_once_with_names(host, caplog):
    host.device("virtual/misc/kvm", "10:232", node=True)
    made = driver(
        host,
        KVM
        | {
            "more": policy("misc", "/dev/k*"),
            "wrong": policy("tty", "/dev/kvm"),
        },
    )
    await published(made)
    await published(made)
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    facts = [{k: vars(r).get(k) for k in ("path", "other", "policy", "subsystem")} for r in said]
    assert {"path": "/dev/kvm", "policy": "kvm", "other": "more"}.items() <= facts[
        [r.getMessage() for r in said].index("two policies match a device")
    ].items()
    assert {"path": "/dev/kvm", "policy": "wrong", "subsystem": "misc"}.items() <= facts[
        [r.getMessage() for r in said].index("path is not in the subsystem of its matcher")
    ].items()
    assert len(said) == 2


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        pytest.param("/dev/file", "is not a device node, but a file", id="file"),
        pytest.param("/dev/dir", "is not a device node, but a directory", id="directory"),
        pytest.param("/dev/ring", "cannot be read: Too many levels", id="unreadable"),
    ],
)
async def test_a_path_that_cannot_be_a_device_is_a_problem_of_its_policy_only(host, path, reason):
    (host.dev / "file").touch()
    (host.dev / "dir").mkdir()
    host.link("ring", "ring")
    host.device("virtual/misc/kvm", "10:232", node=True)
    listed = await inventory(driver(host, KVM | {"a": policy("misc", "/dev/t*", path)}))
    problems = {each.policy: each.problem for each in listed.policies}
    assert problems["a"].startswith(f"match[0].paths[1]: {path} {reason}")
    assert problems["kvm"] == ""
    assert len(listed.devices) == 2


@pytest.mark.parametrize("key", ["sysRoot", "devRoot"])
def test_a_root_that_is_not_there_is_refused_at_start(host, key):
    with pytest.raises(DriverError, match=f"{key}: /nowhere is not a directory"):
        driver(host, KVM, **{key: "/nowhere"})
