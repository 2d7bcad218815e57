"""What a CDI spec made of edits looks like, and which edits are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drakit.cdi import (
    InvalidEditsError,
    InvalidNameError,
    build_spec,
    qualified_name,
    required_version,
    transient_file_name,
)
from drakit.device import DeviceNode, Edits, Mount

KIND = "hostdev.drakit.dev/claim"
UID = "3f0d9a52-7c1c-4ad3-a7de-0f6bb5d1fd7e"


def one(edits: Edits, name: str = "cam") -> dict:
    return build_spec(KIND, [(name, edits)])["devices"][0]["containerEdits"]


def test_a_device_node_is_written_in_full():
    node = DeviceNode(
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
    assert build_spec(KIND, [(f"{UID}-0", Edits(device_nodes=(node,)))]) == {
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


def test_env_and_mounts_are_written():
    mount = Mount(host_path="/opt/lib", container_path="/lib/vendor")
    assert one(Edits(env={"CAM": "a=b"}, mounts=(mount,))) == {
        "env": ["CAM=a=b"],
        "mounts": [
            {
                "hostPath": "/opt/lib",
                "containerPath": "/lib/vendor",
                "options": ["ro", "nosuid", "nodev", "bind"],
            }
        ],
    }


def test_a_device_without_edits_gets_a_variable_of_ours():
    assert one(Edits(), name=f"{UID}-0") == {
        "env": [f"DRAKIT_DEVICE_3F0D9A52_7C1C_4AD3_A7DE_0F6BB5D1FD7E_0={KIND}={UID}-0"]
    }


@pytest.mark.parametrize(
    ("name", "edits", "version"),
    [
        pytest.param("cam", Edits(env={"A": "b"}), "0.3.0", id="env-needs-the-earliest"),
        pytest.param(
            "cam",
            Edits(device_nodes=(DeviceNode(path="/dev/a", host_path="/dev/a"),)),
            "0.3.0",
            id="an-equal-host-path-is-left-out",
        ),
        pytest.param(
            "cam",
            Edits(device_nodes=(DeviceNode(path="/dev/a", host_path="/dev/b"),)),
            "0.5.0",
            id="a-host-path-needs-0.5",
        ),
        pytest.param("0cam", Edits(), "0.5.0", id="a-leading-digit-needs-0.5"),
    ],
)
def test_the_lowest_version_that_works(name, edits, version):
    assert build_spec(KIND, [(name, edits)])["cdiVersion"] == version


@pytest.mark.parametrize(
    ("spec", "version"),
    [
        pytest.param(
            {"kind": "a/b", "containerEdits": {"mounts": [{"type": "tmpfs"}]}},
            "0.4.0",
            id="mount-type",
        ),
        pytest.param({"kind": "a/b.c", "devices": []}, "0.6.0", id="dot-in-class"),
        pytest.param(
            {"kind": "a.b/c", "devices": [{"name": "x", "annotations": {"a": "b"}}]},
            "0.6.0",
            id="annotations",
        ),
        pytest.param({"kind": "a.b/c", "devices": []}, "0.3.0", id="dot-in-vendor"),
    ],
)
def test_versions_of_fields_that_edits_do_not_have_yet(spec, version):
    assert required_version(spec) == version


def node(**fields) -> Edits:
    return Edits(device_nodes=(DeviceNode(**({"path": "/dev/a"} | fields)),))


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        pytest.param(node(path="dev/a"), "must be absolute", id="relative-path"),
        pytest.param(node(path=""), "must be absolute", id="empty-path"),
        pytest.param(node(path="/dev/../etc"), "without '..'", id="path-upwards"),
        pytest.param(node(host_path="b"), "its host path", id="relative-host-path"),
        pytest.param(node(type="d"), "type 'd' is none of b, c, u, p", id="node-type"),
        pytest.param(node(major=1), "both major and minor", id="major-alone"),
        pytest.param(node(minor=1), "both major and minor", id="minor-alone"),
        pytest.param(node(major=-1, minor=1), "major -1", id="negative"),
        pytest.param(node(gid=2**32), "gid 4294967296", id="too-large"),
        pytest.param(node(permissions="rx"), "letters of 'rwm'", id="unknown-permission"),
        pytest.param(node(permissions="rr"), "each once", id="permission-twice"),
        pytest.param(node(permissions=""), "letters of 'rwm'", id="no-permission"),
        pytest.param(node(file_mode=0o1777), "file mode 1777", id="file-mode"),
        pytest.param(
            Edits(device_nodes=(DeviceNode(path="/dev/a"), DeviceNode(path="/dev/a"))),
            "/dev/a is given twice",
            id="node-twice",
        ),
        pytest.param(Edits(env={"": "x"}), "name '' is empty", id="empty-env-name"),
        pytest.param(Edits(env={"A=B": "x"}), "'A=B'", id="env-name-with-equals"),
        pytest.param(Edits(env={"A\n": "x"}), "control character", id="env-name-with-newline"),
        pytest.param(Edits(env={"A": "\0"}), "null byte", id="env-value-with-null"),
        pytest.param(
            Edits(mounts=(Mount(host_path="x", container_path="/x"),)),
            "its host path must be absolute",
            id="relative-mount-source",
        ),
        pytest.param(
            Edits(mounts=(Mount(host_path="/x", container_path="x"),)),
            "its container path must be absolute",
            id="relative-mount-target",
        ),
        pytest.param(
            Edits(mounts=(Mount(host_path="/x", container_path="/x", options=("ro",)),)),
            "'bind' or 'rbind'",
            id="mount-without-bind",
        ),
    ],
)
def test_bad_edits_are_refused_with_device_and_reason(edits, reason):
    with pytest.raises(InvalidEditsError) as caught:
        one(edits)
    assert reason in str(caught.value)
    assert f"CDI device {KIND}=cam" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "devices", "reason"),
    [
        pytest.param(KIND, [], "at least one device", id="no-device"),
        pytest.param(KIND, [("a", Edits()), ("a", Edits())], "is given twice", id="device-twice"),
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


@given(st.text())
def test_a_device_name_is_accepted_only_if_it_cannot_be_misread(name):
    try:
        qualified = qualified_name(KIND, name)
    except InvalidNameError:
        return
    assert qualified.split("=") == [KIND, name]
    assert name.isascii()
    assert name[0].isalnum()
    assert name[-1].isalnum()
