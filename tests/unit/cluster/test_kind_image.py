"""The content of kind's node image: images, files and tars. Building it needs root."""

import io
import json
import tarfile

import pytest

from e2e.cluster.api import ClusterError
from e2e.cluster.kind import image, image_tree
from e2e.cluster.kind.image_tree import Copy, File, Folder, Link, Programs

REQUIRED = (
    "images.test/kube-apiserver:v1.36.3",
    "images.test/kube-proxy:v1.36.3",
    "images.test/coredns/coredns:v1.14.2",
    "images.test/pause:3.10.2",
    "images.test/etcd:3.6.8-0",
)
"""The output of `kubeadm config images list`, shortened."""

CONFIG = """\
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "images.test/pause:3.10"
  restrict_oom_score_adj = false
"""

SPEC = json.dumps({"process": {"rlimits": [{"type": "RLIMIT_NOFILE"}], "cwd": "/"}})


@pytest.fixture
def programs(tmp_path):
    return Programs(local=tmp_path / "local-1", kind=tmp_path / "kind-1")


@pytest.fixture
def kind_files(tmp_path):
    folder = tmp_path / "kind-files"
    for path, text in {
        "etc/containerd/config.toml": CONFIG,
        "etc/systemd/system/kubelet.service": "[Service]",
        "kind/bin/undo-mount-hacks.sh": "#!/bin/bash",
        "usr/local/bin/entrypoint": "#!/bin/bash",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture
def node(programs, kind_files):
    return image_tree.node_tree(
        programs,
        kind_files=kind_files,
        node_files=image.NODE_FILES,
        version="v1.36.3",
        runtime_spec=SPEC,
    )


def write_root(path, entries):
    """A tar like mmdebstrap's: names start with `./`; a value of None is a folder."""
    with tarfile.open(path, "w") as root:
        for name, content in entries.items():
            info = tarfile.TarInfo(f"./{name}")
            if content is None:
                info.type = tarfile.DIRTYPE
                root.addfile(info)
            else:
                info.size = len(content)
                root.addfile(info, io.BytesIO(content))
    return path


def read(path):
    """Name -> content of a file, target of a link, or None for a folder."""
    found = {}
    with tarfile.open(path) as tree:
        for member in tree:
            name = member.name.removeprefix("./")
            assert name not in found, f"{name} is there twice"
            stream = tree.extractfile(member) if member.isreg() else None
            found[name] = stream.read() if stream else member.linkname or None
    return found


def test_a_node_has_every_image_that_kubeadm_and_kind_need():
    images = image_tree.inner_images(REQUIRED, sandbox="images.test/pause:3.10")
    names = [name for image in images for name in image.names]
    assert sorted(names) == sorted({*REQUIRED, "images.test/pause:3.10", image_tree.CNI_IMAGE})


def test_images_whose_pods_name_no_command_have_an_entry_point():
    images = image_tree.inner_images(REQUIRED, sandbox="images.test/pause:3.10")
    found = {name: image.entrypoint for image in images for name in image.names}
    assert found["images.test/pause:3.10"] == ["/usr/local/bin/pause"]
    assert found["images.test/pause:3.10.2"] == ["/usr/local/bin/pause"]
    assert found["images.test/coredns/coredns:v1.14.2"] == ["/usr/local/bin/coredns"]
    assert not found["images.test/kube-proxy:v1.36.3"]


def test_the_pod_network_runs_the_image_that_nodes_have():
    manifest = (image.NODE_FILES / "default-cni.yaml").read_text()
    assert f"image: {image_tree.CNI_IMAGE}\n" in manifest


def test_inner_images_have_the_programs_at_the_paths_that_kubeadm_names(programs):
    tree = image_tree.inner_tree(programs, node_files=image.NODE_FILES)
    assert tree["usr/local/bin/kube-proxy"] == Link("kubernetes")
    assert tree["usr/local/bin/etcd"] == File(programs.local / "etcd", 0o755)
    assert tree["usr/local/bin/coredns"] == File(programs.kind / "coredns", 0o755)
    assert tree["usr/local/bin/cni.sh"] == File(image.NODE_FILES / "cni.sh", 0o755)


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        ("usr/bin/kubeadm", Link("kubernetes")),
        ("usr/sbin/init", Link("/usr/lib/systemd/systemd")),
        ("etc/kubernetes/manifests", Folder()),
        ("kind/version", File(b"v1.36.3")),
        ("etc/systemd/system/dev-mqueue.mount", Link("/dev/null")),
        (
            "etc/systemd/system/multi-user.target.wants/kubelet.service",
            Link("/etc/systemd/system/kubelet.service"),
        ),
    ],
)
def test_a_node_has(node, path, entry):
    assert node[path] == entry


def test_scripts_of_kind_are_executable_and_its_other_files_are_not(node):
    assert node["usr/local/bin/entrypoint"].mode == 0o755
    assert node["kind/bin/undo-mount-hacks.sh"].mode == 0o755
    assert node["etc/systemd/system/kubelet.service"].mode == 0o644


def test_no_path_of_a_node_goes_through_a_link_of_debian(node):
    assert not [path for path in node if path.startswith(("bin/", "lib/", "sbin/", "var/run/"))]


def test_containers_start_where_root_lacks_capabilities(node):
    assert b"restrict_oom_score_adj = true" in node["etc/containerd/config.toml"].content


def test_containers_start_without_limits_and_with_the_hook_of_kind(node):
    spec = json.loads(node["etc/containerd/cri-base.json"].content)
    assert spec["process"] == {"cwd": "/"}
    assert spec["hooks"]["createContainer"] == [{"path": "/kind/bin/mount-product-files.sh"}]


@pytest.mark.parametrize("change", [image_tree.containerd_config, image_tree.sandbox_image])
def test_a_configuration_of_another_form_is_an_error(change):
    with pytest.raises(ClusterError, match="kind's containerd configuration does not set"):
        change("version = 9\n")


def test_a_tree_is_debian_with_changes(tmp_path):
    root = write_root(
        tmp_path / "root.tar",
        {"etc": None, "etc/hostname": b"builder", "etc/issue": b"old", "etc/fstab": b"kept"},
    )
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "blob").write_text("layer")
    tree = {
        "etc/issue": File(b"new"),
        "opt/cni/bin/ptp": Link("other"),
        "var/lib/containerd": Copy(tmp_path / "store"),
    }
    image_tree.write_tree(tmp_path / "tree.tar", tree, root=root, dropped=["*/hostname"])
    assert read(tmp_path / "tree.tar") == {
        "etc": None,
        "etc/fstab": b"kept",
        "etc/issue": b"new",
        "opt": None,
        "opt/cni": None,
        "opt/cni/bin": None,
        "opt/cni/bin/ptp": "other",
        "var": None,
        "var/lib": None,
        "var/lib/containerd": None,
        "var/lib/containerd/blob": b"layer",
    }


def test_a_node_drops_services_and_settings_of_the_machine(tmp_path):
    units = "usr/lib/systemd/system"
    dropped = (
        "dev/null",
        "usr/lib/sysctl.d/99-protect-links.conf",
        f"{units}/multi-user.target.wants/getty.target",
        f"{units}/sockets.target.wants/systemd-initctl.socket",
        "etc/systemd/system/timers.target.wants/apt-daily.timer",
    )
    kept = (
        f"{units}/sockets.target.wants/systemd-journald.socket",
        f"{units}/sysinit.target.wants/systemd-sysctl.service",
        "etc/sysctl.d/10-network-magic.conf",
    )
    root = write_root(tmp_path / "root.tar", dict.fromkeys((*dropped, *kept), b""))
    image_tree.write_tree(tmp_path / "tree.tar", {}, root=root, dropped=image_tree.DROPPED)
    assert sorted(read(tmp_path / "tree.tar")) == sorted(kept)


def test_the_key_depends_on_programs_and_files(programs, tmp_path, monkeypatch):
    files = tmp_path / "node"
    files.mkdir()
    (files / "cni.sh").write_text("one")
    monkeypatch.setattr(image, "NODE_FILES", files)
    key = image._key(programs)
    assert image._key(programs) == key
    assert image._key(Programs(local=tmp_path / "local-2", kind=programs.kind)) != key
    assert image._key(Programs(local=programs.local, kind=tmp_path / "kind-2")) != key
    (files / "cni.sh").write_text("two")
    assert image._key(programs) != key


def test_the_name_has_the_version_and_the_key(tmp_path):
    tar = tmp_path / "0123abc" / "node.tar"
    assert image.image_name(tar) == "drakit-kind-node:v1.36.3-0123abc"


def fake_docker(folder, *, has_image):
    """A command that logs its arguments, and knows the image or not."""
    program = folder / "docker"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {folder}/calls\n'
        f'[ "$1" != image ] || exit {0 if has_image else 1}\n'
    )
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("has_image", "calls"),
    [
        pytest.param(True, ["image"], id="once-imported-it-stays"),
        pytest.param(False, ["image", "import"], id="a-missing-one-is-imported"),
    ],
)
def test_an_engine_gets_the_image_once(tmp_path, monkeypatch, has_image, calls):
    tar = tmp_path / "0123abc" / "node.tar"
    monkeypatch.setattr(image, "build", lambda: tar)
    docker = fake_docker(tmp_path, has_image=has_image)
    assert image.ensure([str(docker)]) == image.image_name(tar)
    lines = (tmp_path / "calls").read_text().splitlines()
    assert [line.split()[0] for line in lines] == calls
    if not has_image:
        assert lines[-1].endswith(f"{tar} {image.image_name(tar)}")
        assert "--change ENV container=docker" in lines[-1]
