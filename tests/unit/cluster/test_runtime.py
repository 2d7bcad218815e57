"""RUNTIME selects the programs that run a node's containers."""

import pytest

from e2e.cluster.api import ClusterError
from e2e.cluster.local import binaries, runtime


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """Programs of modules need not be built, and Debian has runc but no crun."""
    monkeypatch.setattr(binaries, "programs", lambda modules: tmp_path / "-".join(modules))
    monkeypatch.setattr(runtime, "PATH", str(tmp_path))
    (tmp_path / "runc").write_text("")
    (tmp_path / "runc").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "containerd", "oci"),
    [
        ("", None, "runc"),
        ("containerd-1.7", "containerd-1.7", "runc"),
        ("runc-1.4", None, "runc-1.4/runc"),
        (" runc-1.4 , containerd-1.7", "containerd-1.7", "runc-1.4/runc"),
    ],
)
def test_names_select_containerd_and_the_oci_runtime(programs, text, containerd, oci):
    chosen = runtime.runtime(text)
    assert chosen.containerd == (programs / containerd if containerd else None)
    assert chosen.oci == str(programs / oci)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crio", "no node runs crio; RUNTIME can have: containerd-1.7, runc-1.4, runc, crun"),
        ("crun,runc-1.4", "names more than one OCI runtime"),
        ("crun", "crun is missing: `apt-get install crun`"),
    ],
)
def test_other_names_are_refused(text, message):
    with pytest.raises(ClusterError, match=message):
        runtime.runtime(text)


@pytest.mark.parametrize("name", [*runtime.CONTAINERD_MODULES, *runtime.OCI_MODULES])
def test_each_module_exists(name):
    assert (binaries.SOURCES / name / "go.mod").is_file()
