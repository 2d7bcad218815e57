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
    qualified_name,
    transient_file_name,
)

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


@pytest.mark.parametrize(
    ("name", "edits", "version"),
    [
        pytest.param("cam", Edits(env={"A": "b"}), "0.3.0", id="env-needs-the-earliest"),
        pytest.param("cam", node(host_path="/dev/a"), "0.3.0", id="an-equal-host-path-is-left-out"),
        pytest.param("cam", hook(), "0.3.0", id="a-hook-needs-the-earliest"),
        pytest.param("cam", mount(type="none"), "0.4.0", id="a-mount-type-needs-0.4"),
        pytest.param("cam", node(host_path="/dev/b"), "0.5.0", id="a-host-path-needs-0.5"),
        pytest.param("0cam", Edits(), "0.5.0", id="a-leading-digit-needs-0.5"),
        pytest.param("cam", Edits(additional_gids=(1,)), "0.7.0", id="gids-need-0.7"),
        pytest.param("cam", Edits(intel_rdt=IntelRdt()), "0.7.0", id="rdt-needs-0.7"),
        pytest.param(
            "cam", Edits(intel_rdt=IntelRdt(schemata=("x",))), "1.1.0", id="schemata-need-1.1"
        ),
        pytest.param(
            "cam",
            Edits(intel_rdt=IntelRdt(enable_monitoring=True)),
            "1.1.0",
            id="monitoring-needs-1.1",
        ),
        pytest.param("cam", net("a", "b"), "1.1.0", id="net-devices-need-1.1"),
    ],
)
def test_the_lowest_version_that_works(name, edits, version):
    assert build_spec(KIND, [(name, edits)])["cdiVersion"] == version


def test_the_identity_of_a_device_node_is_not_written():
    edit = node(type="c", major=188, minor=0, identity="usb:" + "a" * 252)
    assert one(edit) == one(node(type="c", major=188, minor=0))


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        pytest.param(node(path="dev/a"), "deviceNodes[0].path must be an absolute path", id="path"),
        pytest.param(node(path=""), "deviceNodes[0].path must be an absolute path", id="no-path"),
        pytest.param(node(path="/dev/../etc"), "contains '..'", id="path-upwards"),
        pytest.param(node(host_path="b"), "deviceNodes[0].hostPath must be", id="host-path"),
        pytest.param(node(type="d"), "must be one of b, c, u, p, not 'd'", id="node-type"),
        pytest.param(node(major=1), "both major and minor", id="major-alone"),
        pytest.param(node(minor=1), "both major and minor", id="minor-alone"),
        pytest.param(node(major=0, minor=3), "minor is ignored by runtimes", id="major-zero"),
        pytest.param(node(major=-1, minor=1), "major must be from 0 to 4095", id="negative"),
        pytest.param(node(gid=2**32), "not 4294967296", id="too-large"),
        pytest.param(node(uid=10**5000), "a number with thousands of digits", id="far-too-large"),
        pytest.param(
            node(identity="usb:a"), "must have the type b or c, and a major and a minor", id="bare"
        ),
        pytest.param(
            node(identity="a", type="u", major=1, minor=1), "type b or c", id="identity-of-a-pipe"
        ),
        pytest.param(
            node(identity="a" * 257, type="c", major=1, minor=1),
            "deviceNodes[0].identity must have 1 to 256 characters",
            id="long-identity",
        ),
        pytest.param(
            node(identity="", type="c", major=1, minor=1), "1 to 256", id="empty-identity"
        ),
        pytest.param(
            node(identity="a\n", type="c", major=1, minor=1),
            "deviceNodes[0].identity must contain printable characters only",
            id="identity-with-a-newline",
        ),
        pytest.param(
            node(identity=7, type="c", major=1, minor=1),
            "deviceNodes[0].identity must be of type str",
            id="identity-that-is-no-text",
        ),
        pytest.param(node(permissions="rx"), "letters of 'rwm', or 'none'", id="permission"),
        pytest.param(node(permissions="rr"), "has a letter twice", id="permission-twice"),
        pytest.param(node(permissions=""), "for no permission, write 'none'", id="no-permission"),
        pytest.param(node(file_mode=0o1777), "(octal 777), not 1023", id="file-mode"),
        pytest.param(node(file_mode=660), "write 432", id="file-mode-that-is-no-octal"),
        pytest.param(
            Edits(device_nodes=(DeviceNode(path="/dev/a"), DeviceNode(path="/dev/a"))),
            "deviceNodes has '/dev/a' twice",
            id="node-twice",
        ),
        pytest.param(Edits(env={"": "x"}), "env[0] must have the form NAME=value", id="env-name"),
        pytest.param(Edits(env={"A=B": "x"}), "'=' in the name 'A=B'", id="env-name-with-equals"),
        pytest.param(Edits(env={"A\n": "x"}), "control character", id="env-name-with-newline"),
        pytest.param(Edits(env={"A": "\0"}), "null byte", id="env-value-with-null"),
        pytest.param(Edits(env={"A": "\udc80"}), "surrogate pair", id="env-value-of-no-character"),
        pytest.param(mount(host_path="x"), "mounts[0].hostPath must be", id="mount-source"),
        pytest.param(mount(container_path="x"), "mounts[0].containerPath must be", id="target"),
        pytest.param(mount(options=("ro",)), "'bind' or 'rbind'", id="mount-without-bind"),
        pytest.param(mount(options=(), type="bind"), "'bind' or 'rbind'", id="type-is-not-enough"),
        pytest.param(hook(name="before"), "hookName must be one of prestart", id="hook-name"),
        pytest.param(hook(path="x"), "hooks[0].path must be an absolute path", id="hook-path"),
        pytest.param(hook(timeout_seconds=0), "hooks[0].timeout must be from 1", id="timeout"),
        pytest.param(hook(env={"": ""}), "hooks[0].env[0] must have the form", id="hook-env"),
        pytest.param(net("x" * 16, "a"), "at most 15 bytes", id="interface-name"),
        pytest.param(net("a", "b c"), "netDevices[0].name must be", id="interface-with-a-blank"),
        pytest.param(
            Edits(net_devices=2 * (NetDevice(host_interface_name="a", name="b"),)),
            "netDevices has the hostInterfaceName 'a' twice",
            id="interface-twice",
        ),
        pytest.param(Edits(additional_gids=(0,)), "which runtimes ignore", id="gid-0"),
        pytest.param(Edits(additional_gids=(2**31,)), "to 2147483647", id="gid-too-large"),
        pytest.param(
            Edits(intel_rdt=IntelRdt(clos_id="a/b")), "intelRdt.closID must be", id="clos-id"
        ),
    ],
)
def test_bad_edits_are_refused_with_device_and_reason(edits, reason):
    with pytest.raises(InvalidEditsError) as caught:
        one(edits)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"CDI device {KIND}=cam: ")


class Unreadable(dict):
    def items(self):
        raise OSError("the vendor's disk is full")


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        pytest.param(None, "the driver's answer must be of type Edits, not null", id="nothing"),
        pytest.param({}, "must be of type Edits, not an object", id="a-dictionary"),
        pytest.param(Edits(env=["A=b"]), "env must be of type Mapping, not a list", id="env"),
        pytest.param(Edits(env={"A": 1}), "env['A'] must be of type str, not a number", id="value"),
        pytest.param(Edits(env={1: "A"}), "env[1] must be of type str, not a number", id="name"),
        pytest.param(Edits(env=Unreadable()), "the vendor's disk is full", id="trap"),
        pytest.param(Edits(device_nodes="/dev/a"), "deviceNodes must be a tuple, not text", id="s"),
        pytest.param(Edits(device_nodes=None), "deviceNodes must be a tuple, not null", id="none"),
        pytest.param(
            Edits(device_nodes=("/dev/a",)),
            "deviceNodes[0] must be of type DeviceNode, not text",
            id="a-text-as-node",
        ),
        pytest.param(
            node(path=PurePosixPath("/dev/a")),
            "deviceNodes[0].path must be text, not PurePosixPath",
            id="a-path-object",
        ),
        pytest.param(node(path=b"/dev/a"), "must be text, not bytes", id="bytes"),
        pytest.param(node(path=None), "deviceNodes[0].path is missing", id="path-none"),
        pytest.param(node(type=[]), "deviceNodes[0].type must be text, not a list", id="a-list"),
        pytest.param(node(uid=True), "must be a whole number, not true or false", id="boolean"),
        pytest.param(node(uid=1.0), "not a number with a fraction", id="float"),
        pytest.param(mount(options="ro,bind"), "mounts[0].options must be a tuple", id="options"),
        pytest.param(mount(options=(1, "bind")), "mounts[0].options[0] must be text", id="option"),
        pytest.param(hook(args="x"), "hooks[0].args must be a tuple, not text", id="args"),
        pytest.param(hook(env=()), "hooks[0].env must be of type Mapping, not tuple", id="h-env"),
        pytest.param(hook(timeout_seconds="5"), "must be a whole number, not text", id="timeout"),
        pytest.param(net(None, "a"), "hostInterfaceName is missing", id="interface-none"),
        pytest.param(net("a", 1), "netDevices[0].name must be text, not a number", id="interface"),
        pytest.param(Edits(additional_gids=5), "additionalGids must be a tuple", id="gids"),
        pytest.param(Edits(additional_gids=("video",)), "must be a whole number", id="gid"),
        pytest.param(Edits(intel_rdt={}), "intelRdt must be of type IntelRdt", id="rdt"),
        pytest.param(
            Edits(intel_rdt=IntelRdt(enable_monitoring=1)), "must be true or false", id="flag"
        ),
    ],
)
def test_values_of_wrong_types_are_refused_like_bad_ones(edits, reason):
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
    assert qualified_name(KIND, f"{UID}-0") == f"{KIND}={UID}-0"
    assert transient_file_name(KIND, UID) == f"hostdev.drakit.dev-claim_{UID}.json"
    with pytest.raises(InvalidNameError):
        qualified_name(KIND, "a/b")
    with pytest.raises(InvalidNameError, match="identifier"):
        transient_file_name(KIND, "../a")


# ---------------------------------------------------------------- devices of others


def test_names_of_others_are_no_part_of_the_spec():
    alone = Edits(cdi_devices=("vendor.example/gpu=0", "v/c=a.b:c"))
    assert build_spec(KIND, [("cam", alone)]) == build_spec(KIND, [("cam", Edits())])


QUALIFIED = "must be a qualified CDI name (vendor/class=name), not "


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        pytest.param(("v.com/c=0", ""), f"cdi_devices[1] {QUALIFIED}''", id="empty"),
        pytest.param(("gpu0",), f"cdi_devices[0] {QUALIFIED}'gpu0'", id="no-kind"),
        pytest.param(("gpu=0",), f"cdi_devices[0] {QUALIFIED}'gpu=0'", id="no-class"),
        pytest.param(("v.com/c",), f"cdi_devices[0] {QUALIFIED}'v.com/c'", id="no-name"),
        pytest.param(("v.com/c=",), f"cdi_devices[0] {QUALIFIED}'v.com/c='", id="empty-name"),
        pytest.param(("/dev/a=b",), f"cdi_devices[0] {QUALIFIED}'/dev/a=b'", id="a-path"),
        pytest.param(
            ("v.com/c=a\n",), f"cdi_devices[0] {QUALIFIED}'v.com/c=a\\n'", id="a-line-end"
        ),
        pytest.param(("v.com/c=a=b",), f"cdi_devices[0] {QUALIFIED}'v.com/c=a=b'", id="two-names"),
        pytest.param(
            (f"{KIND}={UID}-0",),
            "cdi_devices[0] must not use the CDI kind of drakit's own files",
            id="another-claim-of-ours",
        ),
        pytest.param((7,), "cdi_devices[0] must be of type str, not a number", id="no-text"),
        pytest.param("v.com/c=0", "cdi_devices must be a tuple, not text", id="no-tuple"),
        pytest.param(("x" * 10_000,), "…", id="a-long-one-is-cut"),
    ],
)
def test_names_of_others_that_no_runtime_knows_are_refused(names, sentence):
    with pytest.raises(InvalidEditsError) as caught:
        build_spec(KIND, [("cam", Edits(cdi_devices=names))])
    text = str(caught.value)
    assert text.startswith(f"CDI device {KIND}=cam: cdi_devices")
    assert sentence in text
    assert len(text) < 300
