"""The cache of programs: what its key hangs on, and the configurations that go with them."""

import pytest

from e2e.cluster.api import ClusterError
from e2e.cluster.local import binaries
from tests.programs import needs_go
from tools.go_proxy import write_proxy


@pytest.fixture
def sources(tmp_path):
    module = tmp_path / "kubernetes"
    module.mkdir()
    (module / "go.mod").write_text("go 1.26.6\nrequire (\n\tk8s.io/kubernetes v1.37.2\n)\n")
    (module / "go.sum").write_text("")
    (module / "go-1.36.mod").write_text("go 1.26.6\nrequire (\n\tk8s.io/kubernetes v1.36.3\n)\n")
    (module / "go-1.36.sum").write_text("")
    (module / "main.go").write_text("package main\n")
    return tmp_path


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


@pytest.mark.parametrize("name", ["go-1.36.mod", "go-1.36.sum"])
def test_the_files_of_a_minor_release_change_its_key_alone(sources, name):
    minors = ("1.37", "1.36")
    before = [binaries.cache_key("go1.26.6", sources, minor=minor) for minor in minors]
    assert before[0] != before[1]
    file = sources / "kubernetes" / name
    file.write_text(file.read_text() + "// changed\n")
    after = [binaries.cache_key("go1.26.6", sources, minor=minor) for minor in minors]
    assert after[0] == before[0]
    assert after[1] != before[1]


@needs_go
def test_a_module_is_downloaded_before_its_folder_is_named(tmp_path, monkeypatch):
    write_proxy(tmp_path / "proxy", version="v0.3.0")
    monkeypatch.setenv("GOPROXY", (tmp_path / "proxy").as_uri())
    monkeypatch.setenv("GONOSUMDB", "drakit.dev/backend")
    monkeypatch.setenv("GOMODCACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("GOFLAGS", "-modcacherw")
    own = tmp_path / "own"
    own.mkdir()
    (own / "go.mod").write_text("module example.com/own\n\ngo 1.26\n")
    file = own / "go-1.37.mod"
    file.write_text((own / "go.mod").read_text() + "\nrequire drakit.dev/backend v0.3.0\n")
    folder = binaries.module_folder(file, "drakit.dev/backend")
    assert (folder / "backend.go").is_file()
    assert folder.is_relative_to(tmp_path / "modules")
