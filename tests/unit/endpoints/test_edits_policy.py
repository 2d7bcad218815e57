"""The edits that an allow list entry permits, and the messages of refusals."""

from __future__ import annotations

import dataclasses
import os
import stat

import pytest

from drakit.device import DeviceNode, Edits, Hook, IntelRdt, Mount, NetDevice
from drakit_nodeplugin.allowed import AllowedEndpoint
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.host_paths import HostDeviceNodes, HostNode

WHERE = "backends.allowed.gpu"
HOST = {
    "/dev/gpu0": HostNode(path="/dev/gpu0", device=("c", 195, 0)),
    "/dev/gpu1": HostNode(path="/dev/sda", device=("b", 8, 0)),
    "/dev/gpus/a": HostNode(path="/dev/gpu0", device=("c", 195, 0)),
}
ALLOWED = AllowedEndpoint(
    devices=("/dev/gpu[0-9]*", "/dev/gpus/*"),
    mounts={"/opt/gpu": "ro", "/opt/gpu/state": "rw"},
    hooks=("/usr/bin/gpu-hook",),
    net_devices=("gpu*",),
    additional_gids=(44,),
    intel_rdt=True,
    cdi_devices=("gpu.example.com/card", "gpu.example.com/link=port*"),
    env=("GPU", "NVIDIA_*"),
)


def problem(allowed: AllowedEndpoint = ALLOWED, **edits) -> str | None:
    rights = Rights(
        where=WHERE, allowed=allowed, find_node=lambda path: HOST.get(path, HostNode(path=path))
    )
    return rights.edits_problem(Edits(**edits))


def node(path: str, **fields) -> dict:
    return {"device_nodes": (DeviceNode(path=path, **fields),)}


def mount(path: str, *options: str, at: str = "/gpu", type: str | None = None) -> dict:
    options = options or ("ro", "nosuid", "nodev", "bind")
    made = Mount(host_path=path, container_path=at, options=options, type=type)
    return {"mounts": (made,)}


ALLOWED_EDITS = {
    "nothing": {},
    "a-variable": {"env": {"GPU": "0"}},
    "variables-with-a-prefix": {"env": {"NVIDIA_A": "0", "NVIDIA_": "1"}},
    "a-device-node": node("/dev/gpu0"),
    "a-path-that-is-not-normalised": node("/dev/x", host_path="/dev//./gpu0"),
    "the-hosts-numbers": node("/dev/gpu0", type="c", major=195, minor=0),
    "unbuffered": node("/dev/gpu0", type="u", major=195, minor=0),
    "a-link-to-an-allowed-device-node": node("/dev/gpus/a"),
    "a-device-node-that-is-not-there-yet": node("/dev/gpu7"),
    "permissions": node("/dev/gpu0", file_mode=0o660, uid=1, gid=2),
    "a-read-only-mount-of-a-prefix": mount("/opt/gpu"),
    "read-only-throughout": mount("/opt/gpu/lib", "rbind", "rprivate", "rro"),
    "the-longest-prefix-decides": mount("/opt/gpu/state/1", "rbind", "rw"),
    "a-hook": {"hooks": (Hook(name="prestart", path="/usr/bin/gpu-hook", args=("a",)),)},
    "a-network-interface": {"net_devices": (NetDevice(host_interface_name="gpu0", name="net0"),)},
    "a-group": {"additional_gids": (44,)},
    "intel-rdt": {"intel_rdt": IntelRdt(clos_id="a")},
    "a-cdi-kind": {"cdi_devices": ("gpu.example.com/card=1",)},
    "a-cdi-device": {"cdi_devices": ("gpu.example.com/link=port1",)},
}


@pytest.mark.parametrize("edits", ALLOWED_EDITS.values(), ids=ALLOWED_EDITS)
def test_edits_that_an_entry_lists_are_allowed(edits):
    assert problem(**edits) is None


REFUSED = {
    "a-device-node": (node("/dev/sda"), "device node /dev/sda", "devices"),
    "the-path-in-the-container-does-not-count": (
        node("/dev/gpu0", host_path="/dev/sda"),
        "device node /dev/sda",
        "devices",
    ),
    "no-wildcard-for-/": (node("/dev/gpus/a/b"), "device node /dev/gpus/a/b", "devices"),
    "a-link-to-another-device-node": (
        node("/dev/gpu1"),
        "device node /dev/gpu1, which leads to /dev/sda",
        "devices",
    ),
    "a-mount": (mount("/etc"), "a mount of /etc", "mounts"),
    "half-a-component": (mount("/opt/gpu-other"), "a mount of /opt/gpu-other", "mounts"),
    **{
        f"a-read-only-prefix-mounted-{'-'.join(options)}": (
            mount("/opt/gpu", *options),
            "a mount of /opt/gpu that is not recursively read-only",
            "mounts",
        )
        for options in (("bind", "rw"), ("bind",), ("ro", "rw", "bind"), ("rbind", "ro"))
    },
    "hook": ({"hooks": (Hook(name="prestart", path="/bin/sh"),)}, "hook /bin/sh", "hooks"),
    "a-hook-by-another-path": (
        {"hooks": (Hook(name="prestart", path="/usr/bin/../bin/gpu-hook"),)},
        "hook /usr/bin/../bin/gpu-hook",
        "hooks",
    ),
    "a-network-interface": (
        {"net_devices": (NetDevice(host_interface_name="eth0", name="gpu0"),)},
        "network interface eth0",
        "netDevices",
    ),
    **{
        name: ({"env": {name: "x"}}, f"environment variable {name}", "env")
        for name in ("LD_PRELOAD", "BASH_ENV", "http_proxy", "GPU_0", "nvidia_a", "NVIDIA")
    },
    "a-group": ({"additional_gids": (44, 6)}, "group 6", "additionalGids"),
    **{
        name: ({"cdi_devices": (name,)}, f"CDI device {name}", "cdiDevices")
        for name in ("gpu.example.com/cards=1", "gpu.example.com/link=1")
    },
}


@pytest.mark.parametrize(("edits", "what", "setting"), REFUSED.values(), ids=REFUSED)
def test_edits_that_an_entry_does_not_list_are_refused_with_the_remedy(edits, what, setting):
    assert problem(**edits) == (
        f"asks for {what}, which is not allowed; to allow it, extend {setting} in {WHERE}"
    )


NEVER = {
    "a-node-that-goes-back": (
        node("/dev/x", host_path="/dev/gpus/../sda"),
        "must not contain '..'",
    ),
    "relative-in-container": (node("../dev/x", host_path="/dev/gpu0"), "must be absolute"),
    "a-null-byte": (node("/dev/gpu0\0"), "must be absolute"),
    "numbers-of-another-device": (node("/dev/gpu0", type="b", major=8, minor=0), "numbers"),
    "type-of-another-device": (node("/dev/gpu0", type="b", major=195, minor=0), "type"),
    "half-of-the-numbers": (node("/dev/gpu0", minor=1), "numbers"),
    "numbers-of-no-device": (node("/dev/gpu7", type="c", major=195, minor=7), "verified"),
    "a-fifo": (node("/dev/gpu0", type="p"), "type p"),
    "a-mode-that-is-a-type": (node("/dev/gpu0", file_mode=0o060660), "mode"),
    "a-mount-that-goes-back": (mount("/opt/gpu/../../etc"), "must not contain '..'"),
    "at-a-relative-path": (mount("/opt/gpu", at="../gpu"), "must be absolute"),
    "no-bind-mount": (mount("/opt/gpu", "ro"), "not a bind mount"),
    "a-file-system": (mount("/opt/gpu", "ro", "bind", type="ext4"), "not a bind mount"),
    **{
        option: (mount("/opt/gpu", "ro", "bind", option), f"option {option}")
        for option in ("rshared", "dev", "suid")
    },
    "an-option-in-two-lines": (mount("/opt/gpu", "ro", "bind", "a\nb"), r"option 'a\nb'"),
    "a-hook-with-variables": (
        {"hooks": (Hook(name="prestart", path="/usr/bin/gpu-hook", env={"LD_PRELOAD": "/x"}),)},
        "environment variables",
    ),
    **{
        f"a-claim-of-{driver}": (
            {"cdi_devices": (f"{driver}/claim=uid-b",)},
            "no entry can allow the devices of claims",
        )
        for driver in ("gpu.example.com", "hostdev.drakit.dev", "of-another-release.example")
    },
}


@pytest.mark.parametrize(("edits", "text"), NEVER.values(), ids=NEVER)
def test_edits_that_no_entry_can_allow_are_refused(edits, text):
    refused = problem(**edits)
    assert refused is not None
    assert text in refused
    assert refused.isprintable()


def test_each_field_of_edits_is_refused_by_default():
    full = Edits(
        env={"A": "b"},
        device_nodes=(DeviceNode(path="/dev/gpu0"),),
        mounts=(Mount(host_path="/opt/gpu", container_path="/gpu"),),
        hooks=(Hook(name="prestart", path="/usr/bin/gpu-hook"),),
        net_devices=(NetDevice(host_interface_name="gpu0", name="net0"),),
        additional_gids=(44,),
        intel_rdt=IntelRdt(),
        cdi_devices=("gpu.example.com/card=1",),
    )
    refused = set()
    for field in dataclasses.fields(Edits):
        value = getattr(full, field.name)
        assert value, f"{field.name} is a new field: decide whether an allow list covers it"
        if problem(AllowedEndpoint(), **{field.name: value}) is not None:
            refused.add(field.name)
    assert refused == {field.name for field in dataclasses.fields(Edits)}


def test_a_long_path_is_cut_off():
    refused = problem(**mount("/" + "x" * 4000))
    assert refused is not None
    assert len(refused) < 500


def test_the_host_s_device_nodes_are_looked_up_in_its_dev(tmp_path):
    (tmp_path / "null").symlink_to("/dev/zero")
    (tmp_path / "away").symlink_to("/etc/passwd")
    (tmp_path / "gone").symlink_to("missing")
    (tmp_path / "file").touch()
    host = HostDeviceNodes(root=tmp_path)
    assert host.node("/dev/null") == HostNode(path="/dev/zero")
    assert host.node("/dev/away") == HostNode(path="/etc/passwd")
    assert host.node("/dev/gone") == HostNode(path="/dev/missing")
    assert host.node("/dev/file") == HostNode(path="/dev/file")
    assert host.node("/dev/" + "x" * 300) == HostNode(path="/dev/" + "x" * 300)
    status = os.stat("/dev/null")
    assert stat.S_ISCHR(status.st_mode)
    assert HostDeviceNodes.found().node("/dev/null") == HostNode(
        path="/dev/null", device=("c", os.major(status.st_rdev), os.minor(status.st_rdev))
    )
