"""The cache of programs: what its key hangs on, and the configurations that go with them."""

import ipaddress
import json

import pytest

from e2e.cluster.api import ClusterError
from e2e.cluster.local import binaries, configs
from e2e.cluster.local.names import Names


@pytest.fixture
def sources(tmp_path):
    module = tmp_path / "kubernetes"
    module.mkdir()
    (module / "go.mod").write_text("go 1.26.6\nrequire (\n\tk8s.io/kubernetes v1.36.3\n)\n")
    (module / "go.sum").write_text("")
    (module / "go-1.37.mod").write_text("go 1.26.6\nrequire (\n\tk8s.io/kubernetes v1.37.2\n)\n")
    (module / "go-1.37.sum").write_text("")
    (module / "main.go").write_text("package main\n")
    return tmp_path


@pytest.mark.parametrize(("minor", "version"), [("1.36", "v1.36.3"), ("1.37", "v1.37.2")])
def test_the_version_is_that_of_the_module(sources, minor, version):
    assert binaries.kubernetes_version(minor, sources) == version
    assert binaries.minor_of(version) == minor


def test_an_unknown_minor_release_is_refused_with_the_known_ones(sources):
    with pytest.raises(ClusterError, match=r"Kubernetes 1\.35; KUBERNETES can be: 1\.36, 1\.37$"):
        binaries.kubernetes_version("1.35", sources)


@pytest.mark.parametrize("minor", binaries.minors())
def test_a_minor_release_has_a_module_of_its_version(minor):
    file = binaries.module_file(minor)
    version = binaries.kubernetes_version(minor)
    assert binaries.minor_of(version) == minor
    staging = {line.split()[-1] for line in file.read_text().splitlines() if "=>" in line}
    assert staging == {version.replace("v1.", "v0.")}
    assert f"k8s.io/kubernetes {version} " in file.with_suffix(".sum").read_text()


def test_the_key_hangs_on_files_and_go_version(sources):
    key = binaries.cache_key("go1.26.6", sources)
    assert binaries.cache_key("go1.26.6", sources) == key
    assert binaries.cache_key("go1.26.7", sources) != key
    (sources / "kubernetes" / "main.go").write_text("package main // changed\n")
    assert binaries.cache_key("go1.26.6", sources) != key


@pytest.mark.parametrize("name", ["go-1.37.mod", "go-1.37.sum"])
def test_the_files_of_a_minor_release_change_its_key_alone(sources, name):
    minors = ("1.36", "1.37")
    before = [binaries.cache_key("go1.26.6", sources, minor=minor) for minor in minors]
    assert before[0] != before[1]
    file = sources / "kubernetes" / name
    file.write_text(file.read_text() + "// changed\n")
    after = [binaries.cache_key("go1.26.6", sources, minor=minor) for minor in minors]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_what_only_kind_needs_is_built_apart(sources):
    local = binaries.cache_key("go1.26.6", sources)
    kind = binaries.cache_key("go1.26.6", sources, modules=binaries.KIND)
    (sources / "coredns").mkdir()
    (sources / "coredns" / "main.go").write_text("package main\n")
    assert binaries.cache_key("go1.26.6", sources) == local
    assert binaries.cache_key("go1.26.6", sources, modules=binaries.KIND) != kind


def test_every_module_of_go_is_built():
    folders = {path.name for path in binaries.SOURCES.iterdir() if path.is_dir()}
    assert {*binaries.LOCAL, *binaries.KIND} == folders


def test_the_cache_is_where_the_environment_points(monkeypatch, tmp_path):
    monkeypatch.delenv("DRAKIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert binaries.cache_folder() == tmp_path / "drakit"
    monkeypatch.setenv("DRAKIT_CACHE", "/elsewhere")
    assert str(binaries.cache_folder()) == "/elsewhere"


def test_go_that_is_missing_is_one_sentence(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(binaries.ClusterError, match=r"Go is missing: install Go 1\.\d+"):
        binaries._go_version()


def test_a_kubelet_has_its_own_cgroup_and_the_gates(tmp_path):
    names = Names(cluster="a", port_place=0, subnet_place=0)
    config = json.loads(configs.kubelet(names, 2, folder=tmp_path, gates={"Gate": False}))
    assert config["cgroupRoot"] == f"/drakit-{names.id}-node-2"
    assert config["featureGates"] == {"Gate": False}


def test_a_kubelet_without_dns_emits_no_event_about_it(tmp_path):
    names = Names(cluster="a", port_place=0, subnet_place=0)
    config = json.loads(configs.kubelet(names, 1, folder=tmp_path, gates={}))
    assert [ipaddress.ip_address(server).is_loopback for server in config["clusterDNS"]] == [True]


def test_switches_are_a_flag():
    assert configs.switches_flag({"B": False, "A": True}) == "A=true,B=false"
