"""CDI specs are made of edits, and invalid edits are refused."""

from __future__ import annotations

import enum
from pathlib import PurePosixPath

import pytest

from drakit.device import DeviceNode, Edits, Hook, IntelRdt, Mount, NetDevice
from drakit_formats.cdi import (
    InvalidEditsError,
    InvalidNameError,
    build_spec,
    container_edits,
    transient_file_name,
)
from drakit_formats.cdi.checks import split_qualified_name

KIND = "hostdev.drakit.dev/claim"
UID = "3f0d9a52-7c1c-4ad3-a7de-0f6bb5d1fd7e"


def one(edits: Edits, name: str = "cam") -> dict:
    return build_spec(KIND, [(name, edits)])["devices"][0]["containerEdits"]


def node(**fields) -> Edits:
    return Edits(device_nodes=(DeviceNode(**({"path": "/dev/a"} | fields)),))


def mount(**fields) -> Edits:
    return Edits(mounts=(Mount(**({"host_path": "/x", "container_path": "/x"} | fields)),))


def hook(**fields) -> Edits:
    return Edits(hooks=(Hook(**({"name": "createRuntime", "path": "/x"} | fields)),))


def net(host: object, name: object) -> Edits:
    return Edits(net_devices=(NetDevice(host_interface_name=host, name=name),))


def test_a_device_node_is_written_in_full():
    edits = node(
        path="/dev/cam",
        host_path="/dev/video0",
        type="c",
        major=81,
        minor=0,
        permissions="rw",
        file_mode=0o660,
        uid=0,
        gid=44,
    )
    assert build_spec(KIND, [(f"{UID}-0", edits)]) == {
        "cdiVersion": "0.5.0",
        "kind": KIND,
        "devices": [
            {
                "name": f"{UID}-0",
                "containerEdits": {
                    "deviceNodes": [
                        {
                            "path": "/dev/cam",
                            "hostPath": "/dev/video0",
                            "type": "c",
                            "major": 81,
                            "minor": 0,
                            "fileMode": 0o660,
                            "permissions": "rw",
                            "uid": 0,
                            "gid": 44,
                        }
                    ]
                },
            }
        ],
    }


def test_everything_else_is_written_in_full():
    edits = Edits(
        env={"CAM": "a=b"},
        mounts=(
            Mount(host_path="/opt/lib", container_path="/lib/vendor"),
            Mount(host_path="tmpfs", container_path="/t", type="tmpfs", options=("size=1m",)),
        ),
        hooks=(
            Hook(
                name="createContainer",
                path="/usr/bin/tune",
                args=("tune", "--all"),
                env={"A": "b"},
                timeout_seconds=5,
            ),
        ),
        net_devices=(NetDevice(host_interface_name="enp1s0f1", name="eth1"),),
        additional_gids=(44, 109),
        intel_rdt=IntelRdt(
            clos_id="gold",
            l3_cache_schema="L3:0=ff",
            mem_bw_schema="MB:0=50",
            schemata=("L2:0=f",),
            enable_monitoring=True,
        ),
    )
    assert one(edits) == {
        "env": ["CAM=a=b"],
        "mounts": [
            {
                "hostPath": "/opt/lib",
                "containerPath": "/lib/vendor",
                "options": ["ro", "nosuid", "nodev", "bind"],
            },
            {
                "hostPath": "tmpfs",
                "containerPath": "/t",
                "type": "tmpfs",
                "options": ["size=1m"],
            },
        ],
        "hooks": [
            {
                "hookName": "createContainer",
                "path": "/usr/bin/tune",
                "args": ["tune", "--all"],
                "env": ["A=b"],
                "timeout": 5,
            }
        ],
        "netDevices": [{"hostInterfaceName": "enp1s0f1", "name": "eth1"}],
        "additionalGids": [44, 109],
        "intelRdt": {
            "closID": "gold",
            "l3CacheSchema": "L3:0=ff",
            "memBwSchema": "MB:0=50",
            "schemata": ["L2:0=f"],
            "enableMonitoring": True,
        },
    }


def test_what_is_not_given_is_not_written():
    assert one(hook()) == {"hooks": [{"hookName": "createRuntime", "path": "/x"}]}
    assert one(Edits(intel_rdt=IntelRdt())) == {"intelRdt": {}}
    assert one(node(major=0, minor=0)) == {
        "deviceNodes": [{"path": "/dev/a", "major": 0, "minor": 0}]
    }


def test_a_device_without_edits_gets_a_variable_of_ours():
    assert one(Edits(), name=f"{UID}-0") == {
        "env": [f"DRAKIT_DEVICE_3F0D9A52_7C1C_4AD3_A7DE_0F6BB5D1FD7E_0={KIND}={UID}-0"]
    }


def test_a_member_of_an_enumeration_is_its_text():
    class Mode(str, enum.Enum):  # noqa: UP042 - StrEnum looks like its text, this does not
        FAST = "fast"

    assert one(Edits(env={"MODE": Mode.FAST})) == {"env": ["MODE=fast"]}


VERSIONS = {
    "env-needs-the-earliest": ("cam", Edits(env={"A": "b"}), "0.3.0"),
    "an-equal-host-path-is-left-out": ("cam", node(host_path="/dev/a"), "0.3.0"),
    "a-hook-needs-the-earliest": ("cam", hook(), "0.3.0"),
    "a-mount-type-needs-0.4": ("cam", mount(type="none"), "0.4.0"),
    "a-host-path-needs-0.5": ("cam", node(host_path="/dev/b"), "0.5.0"),
    "a-leading-digit-needs-0.5": ("0cam", Edits(), "0.5.0"),
    "gids-need-0.7": ("cam", Edits(additional_gids=(1,)), "0.7.0"),
    "rdt-needs-0.7": ("cam", Edits(intel_rdt=IntelRdt()), "0.7.0"),
    "schemata-need-1.1": ("cam", Edits(intel_rdt=IntelRdt(schemata=("x",))), "1.1.0"),
    "monitoring-needs-1.1": ("cam", Edits(intel_rdt=IntelRdt(enable_monitoring=True)), "1.1.0"),
    "net-devices-need-1.1": ("cam", net("a", "b"), "1.1.0"),
}


@pytest.mark.parametrize(("name", "edits", "version"), VERSIONS.values(), ids=VERSIONS)
def test_the_lowest_version_that_works(name, edits, version):
    assert build_spec(KIND, [(name, edits)])["cdiVersion"] == version


def test_the_identity_of_a_device_node_is_not_written():
    edit = node(type="c", major=188, minor=0, identity="usb:" + "a" * 252)
    assert one(edit) == one(node(type="c", major=188, minor=0))


BAD = {
    "path": (node(path="dev/a"), "deviceNodes[0].path must be an absolute path"),
    "no-path": (node(path=""), "deviceNodes[0].path must be an absolute path"),
    "path-upwards": (node(path="/dev/../etc"), "contains '..'"),
    "host-path": (node(host_path="b"), "deviceNodes[0].hostPath must be"),
    "node-type": (node(type="d"), "must be one of b, c, u, p, not 'd'"),
    "major-alone": (node(major=1), "both major and minor"),
    "minor-alone": (node(minor=1), "both major and minor"),
    "major-zero": (node(major=0, minor=3), "minor is ignored by runtimes"),
    "negative": (node(major=-1, minor=1), "major must be from 0 to 4095"),
    "too-large": (node(gid=2**32), "not 4294967296"),
    "far-too-large": (node(uid=10**5000), "a number with thousands of digits"),
    "bare": (node(identity="usb:a"), "must have the type b or c, and a major and a minor"),
    "identity-of-a-pipe": (node(identity="a", type="u", major=1, minor=1), "type b or c"),
    "long-identity": (
        node(identity="a" * 257, type="c", major=1, minor=1),
        "deviceNodes[0].identity must have 1 to 256 characters",
    ),
    "empty-identity": (node(identity="", type="c", major=1, minor=1), "1 to 256"),
    "identity-with-a-newline": (
        node(identity="a\n", type="c", major=1, minor=1),
        "deviceNodes[0].identity must contain printable characters only",
    ),
    "identity-that-is-no-text": (
        node(identity=7, type="c", major=1, minor=1),
        "deviceNodes[0].identity must be of type str",
    ),
    "permission": (node(permissions="rx"), "letters of 'rwm', or 'none'"),
    "permission-twice": (node(permissions="rr"), "has a letter twice"),
    "no-permission": (node(permissions=""), "for no permission, write 'none'"),
    "file-mode": (node(file_mode=0o1777), "(octal 777), not 1023"),
    "file-mode-that-is-no-octal": (node(file_mode=660), "write 432"),
    "node-twice": (
        Edits(device_nodes=(DeviceNode(path="/dev/a"), DeviceNode(path="/dev/a"))),
        "deviceNodes has '/dev/a' twice",
    ),
    "env-name": (Edits(env={"": "x"}), "env[0] must have the form NAME=value"),
    "env-name-with-equals": (Edits(env={"A=B": "x"}), "'=' in the name 'A=B'"),
    "env-name-with-newline": (Edits(env={"A\n": "x"}), "control character"),
    "env-value-with-null": (Edits(env={"A": "\0"}), "null byte"),
    "env-value-of-no-character": (Edits(env={"A": "\udc80"}), "surrogate pair"),
    "mount-source": (mount(host_path="x"), "mounts[0].hostPath must be"),
    "target": (mount(container_path="x"), "mounts[0].containerPath must be"),
    "mount-without-bind": (mount(options=("ro",)), "'bind' or 'rbind'"),
    "type-is-not-enough": (mount(options=(), type="bind"), "'bind' or 'rbind'"),
    "hook-name": (hook(name="before"), "hookName must be one of prestart"),
    "hook-path": (hook(path="x"), "hooks[0].path must be an absolute path"),
    "timeout": (hook(timeout_seconds=0), "hooks[0].timeout must be from 1"),
    "hook-env": (hook(env={"": ""}), "hooks[0].env[0] must have the form"),
    "interface-name": (net("x" * 16, "a"), "at most 15 bytes"),
    "interface-with-a-blank": (net("a", "b c"), "netDevices[0].name must be"),
    "interface-twice": (
        Edits(net_devices=2 * (NetDevice(host_interface_name="a", name="b"),)),
        "netDevices has the hostInterfaceName 'a' twice",
    ),
    "gid-0": (Edits(additional_gids=(0,)), "which runtimes ignore"),
    "gid-too-large": (Edits(additional_gids=(2**31,)), "to 2147483647"),
    "clos-id": (Edits(intel_rdt=IntelRdt(clos_id="a/b")), "intelRdt.closID must be"),
}


class Unreadable(dict):
    def items(self):
        raise OSError("the vendor's disk is full")


WRONG_TYPES = {
    "nothing": (None, "the driver's answer must be of type Edits, not null"),
    "a-dictionary": ({}, "must be of type Edits, not an object"),
    "env": (Edits(env=["A=b"]), "env must be of type Mapping, not a list"),
    "value": (Edits(env={"A": 1}), "env['A'] must be of type str, not a number"),
    "name": (Edits(env={1: "A"}), "env[1] must be of type str, not a number"),
    "trap": (Edits(env=Unreadable()), "the vendor's disk is full"),
    "s": (Edits(device_nodes="/dev/a"), "deviceNodes must be a tuple, not a string"),
    "none": (Edits(device_nodes=None), "deviceNodes must be a tuple, not null"),
    "a-text-as-node": (
        Edits(device_nodes=("/dev/a",)),
        "deviceNodes[0] must be of type DeviceNode, not a string",
    ),
    "a-path-object": (
        node(path=PurePosixPath("/dev/a")),
        "deviceNodes[0].path must be a string, not PurePosixPath",
    ),
    "bytes": (node(path=b"/dev/a"), "must be a string, not bytes"),
    "path-none": (node(path=None), "deviceNodes[0].path is missing"),
    "a-list": (node(type=[]), "deviceNodes[0].type must be a string, not a list"),
    "boolean": (node(uid=True), "must be a whole number, not true or false"),
    "float": (node(uid=1.0), "not a number with a fraction"),
    "options": (mount(options="ro,bind"), "mounts[0].options must be a tuple"),
    "option": (mount(options=(1, "bind")), "mounts[0].options[0] must be a string"),
    "args": (hook(args="x"), "hooks[0].args must be a tuple, not a string"),
    "h-env": (hook(env=()), "hooks[0].env must be of type Mapping, not tuple"),
    "timeout": (hook(timeout_seconds="5"), "must be a whole number, not a string"),
    "interface-none": (net(None, "a"), "hostInterfaceName is missing"),
    "interface": (net("a", 1), "netDevices[0].name must be a string, not a number"),
    "gids": (Edits(additional_gids=5), "additionalGids must be a tuple"),
    "gid": (Edits(additional_gids=("video",)), "must be a whole number"),
    "rdt": (Edits(intel_rdt={}), "intelRdt must be of type IntelRdt"),
    "flag": (Edits(intel_rdt=IntelRdt(enable_monitoring=1)), "must be true or false"),
}


@pytest.mark.parametrize(
    ("edits", "reason"), [*BAD.values(), *WRONG_TYPES.values()], ids=[*BAD, *WRONG_TYPES]
)
def test_bad_edits_are_refused_with_device_and_reason(edits, reason):
    with pytest.raises(InvalidEditsError) as caught:
        one(edits)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"CDI device {KIND}=cam: ")


def test_what_is_refused_is_shown_in_short():
    with pytest.raises(InvalidEditsError) as caught:
        one(Edits(env={"A" * 100_000 + "=": "x"}))
    assert len(str(caught.value)) < 250


def test_edits_without_a_device_are_checked_alike():
    assert container_edits(Edits()) == {}
    assert container_edits(hook()) == one(hook())
    with pytest.raises(InvalidEditsError, match=r"^hooks\[0\]\.path must be an absolute path"):
        container_edits(hook(path="x"))


@pytest.mark.parametrize(
    ("kind", "devices", "reason"),
    [
        pytest.param(KIND, [], "at least one device", id="no-device"),
        pytest.param(KIND, [("a", Edits()), ("a", Edits())], "is defined twice", id="device-twice"),
        pytest.param(KIND, [("a b", Edits())], "device name 'a b'", id="device-name"),
        pytest.param("claim", [("a", Edits())], "form vendor/class", id="kind-without-vendor"),
        pytest.param("1a/claim", [("a", Edits())], "vendor '1a'", id="vendor-with-digit-first"),
        pytest.param("a/claim-", [("a", Edits())], "class 'claim-'", id="class-ends-with-hyphen"),
        pytest.param("a/b/c", [("a", Edits())], "class 'b/c'", id="kind-with-two-slashes"),
    ],
)
def test_bad_names_are_refused(kind, devices, reason):
    with pytest.raises(InvalidEditsError, match=reason):
        build_spec(kind, devices)


def test_qualified_names_and_file_names():
    assert split_qualified_name(f"{KIND}={UID}-0") == (KIND, f"{UID}-0")
    assert transient_file_name(KIND, UID) == f"hostdev.drakit.dev-claim_{UID}.json"
    with pytest.raises(InvalidNameError):
        split_qualified_name(f"{KIND}=a/b")
    with pytest.raises(InvalidNameError, match="identifier"):
        transient_file_name(KIND, "../a")


# ---------------------------------------------------------------- devices of others


def test_names_of_others_are_no_part_of_the_spec():
    alone = Edits(cdi_devices=("vendor.example/gpu=0", "v/c=a.b:c"))
    assert build_spec(KIND, [("cam", alone)]) == build_spec(KIND, [("cam", Edits())])


QUALIFIED = "must be a qualified CDI name (vendor/class=name), not "


BAD_NAMES = {
    "empty": (("v.com/c=0", ""), f"cdi_devices[1] {QUALIFIED}''"),
    "no-kind": (("gpu0",), f"cdi_devices[0] {QUALIFIED}'gpu0'"),
    "no-class": (("gpu=0",), f"cdi_devices[0] {QUALIFIED}'gpu=0'"),
    "no-name": (("v.com/c",), f"cdi_devices[0] {QUALIFIED}'v.com/c'"),
    "empty-name": (("v.com/c=",), f"cdi_devices[0] {QUALIFIED}'v.com/c='"),
    "a-path": (("/dev/a=b",), f"cdi_devices[0] {QUALIFIED}'/dev/a=b'"),
    "a-line-end": (("v.com/c=a\n",), f"cdi_devices[0] {QUALIFIED}'v.com/c=a\\n'"),
    "two-names": (("v.com/c=a=b",), f"cdi_devices[0] {QUALIFIED}'v.com/c=a=b'"),
    "another-claim-of-ours": (
        (f"{KIND}={UID}-0",),
        "cdi_devices[0] must not use the CDI kind of drakit's own files",
    ),
    "no-text": ((7,), "cdi_devices[0] must be of type str, not a number"),
    "no-tuple": ("v.com/c=0", "cdi_devices must be a tuple, not a string"),
    "a-long-one-is-cut": (("x" * 10_000,), "…"),
}


@pytest.mark.parametrize(("names", "sentence"), BAD_NAMES.values(), ids=BAD_NAMES)
def test_names_of_others_that_no_runtime_knows_are_refused(names, sentence):
    with pytest.raises(InvalidEditsError) as caught:
        build_spec(KIND, [("cam", Edits(cdi_devices=names))])
    text = str(caught.value)
    assert text.startswith(f"CDI device {KIND}=cam: cdi_devices")
    assert sentence in text
    assert len(text) < 300
