"""Conversion of the response to Allocate to edits, and of paths on the host."""

from __future__ import annotations

import itertools
import os
import stat
from dataclasses import replace

import pytest

from drakit.device import DeviceNode, Mount
from drakit_formats.cdi import build_spec
from drakit_nodeplugin.endpoints.deviceplugin.messages import (
    BadResponseError,
    allocate_response,
    edits_of,
    host_paths,
    lost_annotations,
)
from drakit_nodeplugin.endpoints.host_paths import (
    DirectoryError,
    HostDeviceNodes,
    TooManyNodesError,
)
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb


def answer(**fields):
    return pb.ContainerAllocateResponse(**fields)


def node(container, host="", permissions="rw"):
    return pb.DeviceSpec(container_path=container, host_path=host, permissions=permissions)


NODES = {
    "another-path": (
        node("/dev/a", "/dev/b", "rw"),
        DeviceNode(path="/dev/a", host_path="/dev/b", permissions="rw"),
    ),
    "no-host-path": (
        node("/dev/a"),
        DeviceNode(path="/dev/a", host_path="/dev/a", permissions="rw"),
    ),
    "no-permissions-are-all": (
        node("/dev/a", "/dev/a", ""),
        DeviceNode(path="/dev/a", host_path="/dev/a"),
    ),
    "odd-but-clear": (
        node("/dev/../dev//a", "/dev/./a", "rrw"),
        DeviceNode(path="/dev/a", host_path="/dev/a", permissions="rw"),
    ),
}


@pytest.mark.parametrize(("given", "made"), NODES.values(), ids=NODES)
def test_a_device_node_is_as_the_plugin_reports(given, made):
    assert edits_of(answer(devices=[given]), {}).device_nodes == (made,)


@pytest.mark.parametrize("read_only", [True, False], ids=["read-only", "writable"])
def test_a_mount_is_made_as_for_the_kubelet(read_only):
    mount = pb.Mount(container_path="/opt/lib", host_path="/usr/lib", read_only=read_only)
    options = ("rbind", "rprivate", "rro" if read_only else "rw")
    assert edits_of(answer(mounts=[mount]), {}).mounts == (
        Mount(host_path="/usr/lib", container_path="/opt/lib", options=options),
    )


def test_the_first_entry_of_a_path_counts():
    edits = edits_of(
        answer(
            devices=[node("/dev/a", "/dev/1"), node("/dev/a", "/dev/2")],
            mounts=[
                pb.Mount(container_path="/a", host_path="/1"),
                pb.Mount(container_path="/a", host_path="/2"),
            ],
            cdi_devices=[pb.CDIDevice(name="v.example/c=d")] * 2,
        ),
        {},
    )
    assert [each.host_path for each in edits.device_nodes] == ["/dev/1"]
    assert [each.host_path for each in edits.mounts] == ["/1"]
    assert edits.cdi_devices == ("v.example/c=d",)


def test_the_edits_can_be_written():
    edits = edits_of(answer(envs={"A": "=b"}, devices=[node("/dev/a", "/dev/b", "mwr")]), {})
    assert build_spec("v.example/c", [("d", edits)])


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(answer(envs={"": "x"}), id="env-without-a-name"),
        pytest.param(answer(envs={"a": "\0"}), id="null-byte"),
        pytest.param(answer(devices=[node("dev/a")]), id="relative-path"),
        pytest.param(answer(devices=[node("/dev/a", "/dev/a", "x")]), id="permission"),
        pytest.param(answer(mounts=[pb.Mount(container_path="/a")]), id="mount-of-nothing"),
        pytest.param(answer(cdi_devices=[pb.CDIDevice(name="v.example/c")]), id="cdi-name"),
        pytest.param(answer(annotations={"cdi.k8s.io/x": "v.example/c"}), id="cdi-annotation"),
    ],
)
def test_edits_that_cdi_does_not_allow_are_refused(wrong):
    with pytest.raises(BadResponseError, match="a CDI spec cannot contain"):
        edits_of(wrong, {})


def test_an_answer_without_end_is_refused():
    with pytest.raises(BadResponseError, match="more than 256"):
        host_paths(answer(envs={str(number): "" for number in range(257)}))
    with pytest.raises(BadResponseError, match="more than 256"):
        host_paths(answer(annotations={"cdi.k8s.io/x": ",".join(map(str, range(257)))}))


def test_directories_with_many_device_nodes_are_refused():
    nodes = {"/dev/x": [(str(number), f"/dev/x/{number}") for number in range(200)]}
    twice = [node("/dev/a", "/dev/x"), node("/dev/b", "/dev/x")]
    with pytest.raises(BadResponseError, match="more than 256 device nodes"):
        edits_of(answer(devices=twice), nodes)


def test_annotations_may_name_cdi_devices():
    given = answer(
        cdi_devices=[pb.CDIDevice(name="v.example/c=a")],
        annotations={"cdi.k8s.io/v-plugin_1": "v.example/c=b,v.example/c=a"},
    )
    assert edits_of(given, {}).cdi_devices == ("v.example/c=a", "v.example/c=b")
    assert not lost_annotations(given)
    assert lost_annotations(answer(annotations={"cdi.k8s.io/x": "v.example/c=b", "other": ""}))


# ------------------------------------------------------------ what is counted before it is parsed


def answered(answer):
    return pb.AllocateResponse(container_responses=[answer]).SerializeToString()


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        pytest.param(b"\x0a\x00" * 500_000, "more than 40,000 fields", id="answers"),
        pytest.param(
            answered(pb.ContainerAllocateResponse(mounts=itertools.repeat(pb.Mount(), 40_001))),
            "more than 40,000 fields",
            id="mounts",
        ),
    ],
)
def test_an_answer_without_end_is_not_read(raw, text):
    with pytest.raises(BadResponseError, match=text):
        allocate_response(raw)


# ------------------------------------------------------------ paths on the host


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A directory as the host's /dev, in which ordinary files are treated as device nodes."""
    monkeypatch.setattr(stat, "S_ISCHR", stat.S_ISREG)
    (tmp_path / "snd").mkdir()
    for name in ("video0", "snd/pcm", "snd/timer"):
        (tmp_path / name).touch()
    return HostDeviceNodes(root=tmp_path)


INVISIBLE = ("/dev/gone", "/var/run/x", "relative", "/", "", "/dev/a\0b", f"/dev/{'x' * 300}")


@pytest.mark.parametrize(
    ("target", "path", "node"),
    [
        pytest.param(None, "/dev/video0", "/dev/video0", id="a-node"),
        *(
            pytest.param(target, "/dev/link", "/dev/video0", id=f"a-link-to-{target}")
            for target in ("video0", "/dev/video0", "./snd/../video0", "../dev/video0", "second")
        ),
        pytest.param("snd", "/dev/link/pcm", "/dev/snd/pcm", id="a-link-in-the-middle"),
        pytest.param("/proc/kcore", "/dev/link", "/proc/kcore", id="a-link-out-of-dev"),
        pytest.param("../proc/kcore", "/dev/link", "/proc/kcore", id="a-link-back-out-of-dev"),
        pytest.param("link", "/dev/link", "/dev/link", id="a-link-to-itself"),
        *(pytest.param(None, path, path, id=ascii(path)[:20]) for path in INVISIBLE),
    ],
)
def test_a_path_is_followed_to_its_node_and_an_invisible_one_stays(host, target, path, node):
    (host.root / "second").symlink_to("video0")
    if target is not None:
        (host.root / "link").symlink_to(target)
    assert host.nodes(path) == [("", node)]


def test_a_directory_is_all_nodes_in_it(host):
    (host.root / "snd" / "by-path").mkdir()
    (host.root / "snd" / "by-path" / "deep").touch()
    (host.root / "snd" / "pts").mkdir()
    (host.root / "snd" / "pts" / "0").touch()
    nodes = {"/dev/snd": host.nodes("/dev/snd")}
    given = pb.DeviceSpec(container_path="/dev/sound/", host_path="/dev/snd", permissions="r")
    edits = edits_of(pb.ContainerAllocateResponse(devices=[given]), nodes)
    assert [(each.path, each.host_path) for each in edits.device_nodes] == [
        ("/dev/sound/by-path/deep", "/dev/snd/by-path/deep"),
        ("/dev/sound/pcm", "/dev/snd/pcm"),
        ("/dev/sound/timer", "/dev/snd/timer"),
    ]


def test_nested_directories_count_as_they_are_read(host):
    """The limit counts all levels together: each level could have a thousand other files."""
    at = host.root / "snd"
    for _ in range(8):
        at /= "a"
        at.mkdir()
        for number in range(200):
            (at / str(number)).symlink_to("nowhere")
    with pytest.raises(TooManyNodesError, match="1,024 files"):
        host.nodes("/dev/snd")


def test_a_directory_is_not_read_where_that_takes_too_long(host):
    in_loop = replace(host, walk=False)
    assert in_loop.nodes("/dev/snd/pcm") == [("", "/dev/snd/pcm")]
    with pytest.raises(DirectoryError):
        in_loop.nodes("/dev/snd")


def test_a_directory_without_end_is_refused(host):
    for number in range(300):
        (host.root / "snd" / str(number)).touch()
    with pytest.raises(TooManyNodesError, match="/dev/snd, which contains more than 256"):
        host.nodes("/dev/snd")


def test_a_long_path_below_nothing_is_not_walked(host, monkeypatch):
    links: list[object] = []
    read = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: (links.append(path), read(path))[1])
    path = "/dev/" + "/".join("a" * 2000)
    assert host.nodes(path) == [("", path)]
    assert len(links) == 1


def test_a_directory_that_goes_meanwhile_is_no_error(host):
    os.rename(host.root / "snd", host.root / "was")
    assert host.nodes("/dev/snd") == [("", "/dev/snd")]
