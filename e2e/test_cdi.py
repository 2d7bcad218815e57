"""
The CDI linter and containerd agree, file by file, on the corpus in tests/data/cdi.

The tests use `ctr`, containerd's own client with the same CDI library. It reads the files in a
separate mount namespace, because a misplaced null ends the program that reads it, and the node's
containerd must not end.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drakit_formats.cdi import lint_spec
from drakit_formats.cdi.lint import Directories, read_directories
from e2e.cluster.api import Cluster
from e2e.cluster.local.binaries import containerd_version
from e2e.images.testimage import static_busybox

pytestmark = [pytest.mark.e2e, pytest.mark.feature("cdi")]

CORPUS = Path(__file__).parents[1] / "tests" / "data" / "cdi"
FOLDER = "/var/lib/kubelet/drakit-cdi-corpus"
"""The folder on a node. Programs cannot run from /run in a kind node."""
NAMESPACE = "drakit-cdi-corpus"
"""A namespace in containerd that the kubelet does not see."""

BEGIN = f"""
set -u
export CONTAINERD_NAMESPACE={NAMESPACE}
cd {FOLDER}
mkdir -p etc run answers root/bin
mount --bind etc /etc/cdi
mount --bind run /var/run/cdi
rm -rf etc/* run/*
ctr containers rm asked > /dev/null 2>&1  # of a run that was broken off
"""

ASK = f"""
{BEGIN}
for name in $(ls cases); do
    rm -rf etc/* run/*
    cp -r "cases/$name/etc" "cases/$name/run" .
    # A container that is only described: its devices are injected, and nothing is started.
    ctr containers create --rootfs $(sed 's/^/--device /' "cases/$name/devices") \\
        "$PWD/root" asked true 2> "answers/$name.error"
    code=$?
    echo $code > "answers/$name.code"
    if [ $code = 0 ]; then
        ctr containers info asked > "answers/$name.json"
        ctr containers rm asked
    fi
done
ctr namespaces rm {NAMESPACE}
"""

START = f"""
{BEGIN}
cp started/* run/
ctr run --rm --rootfs --cgroup "" $(sed 's/^/--device /' devices) \\
    "$PWD/root" started /bin/busybox sh -c "$(cat check)" > seen || exit
ctr namespaces rm {NAMESPACE}
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Files to read, and the devices to request."""

    etc: tuple[Path, ...] = ()
    run: tuple[Path, ...] = ()
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The result of a case in containerd."""

    code: int
    error: str
    oci: Mapping[str, Any] = field(default_factory=dict)
    """The container's spec. Empty if there is none."""

    @property
    def refused(self) -> bool:
        """Whether a file was rejected, or reading it ended the program."""
        return self.code != 0 and ("failed to load CDI Spec" in self.error or "panic" in self.error)

    @property
    def injected(self) -> bool:
        """Whether all files were read without warnings, and all devices found."""
        return self.code == 0 and "CDI" not in self.error

    @property
    def unresolved(self) -> set[str]:
        """The devices that containerd does not find in any file."""
        _, found, names = self.error.rpartition("unresolvable CDI devices ")
        return {name.strip() for name in names.split(",")} if found else set()


def read(*folders: Path) -> Directories:
    return read_directories(folders, check=lint_spec)


def devices_of(spec: object, path: Path) -> tuple[str, ...]:
    """Return all devices of a file. If the file is hardly a spec, return the device that its name
    stands for."""
    if path.parent.name != "bad" and isinstance(spec, dict):
        return tuple(f"{spec['kind']}={device['name']}" for device in spec["devices"])
    return (f"corpus.test/{path.stem}=one",)


def case_of(path: Path, spec: object) -> Case:
    return Case(run=(path,), devices=devices_of(spec, path))


FILES = {
    f"{folder}-{file.path.name}": (file.path, file.spec)
    for folder in ("good", "warned", "strict", "bad")
    for file in read(CORPUS / folder).files
}
CONFLICTS = {
    path.name: read(path / "etc", path / "run") for path in (CORPUS / "conflicts").iterdir()
}


def cases() -> Iterator[tuple[str, Case]]:
    for name, (path, spec) in FILES.items():
        yield name, case_of(path, spec)
    for name, found in CONFLICTS.items():
        etc = tuple(file.path for file in found.files if file.priority == 0)
        run = tuple(file.path for file in found.files if file.priority == 1)
        every = {d for file in found.files for d in devices_of(file.spec, file.path)}
        yield f"all-{name}", Case(etc=etc, run=run, devices=tuple(sorted(every)))
        yield f"found-{name}", Case(etc=etc, run=run, devices=tuple(found.devices))


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[Path]:
    """The folder of the corpus on a node, as seen from this machine."""
    version = containerd_version().removeprefix("v")
    if version not in cluster.exec_on_node(cluster.nodes[0], ["containerd", "--version"]).stdout:
        pytest.skip(f"the corpus is for containerd {version}, and the nodes have another one")
    folder = cluster.node_path(cluster.nodes[0], FOLDER)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def answers(cluster: Cluster, node: Path) -> dict[str, CaseResult]:
    """containerd's result for each case, all in one run."""
    asked = dict(cases())
    for name, case in asked.items():
        for directory, files in (("etc", case.etc), ("run", case.run)):
            (node / "cases" / name / directory).mkdir(parents=True)
            for path in files:
                shutil.copy(path, node / "cases" / name / directory)
        (node / "cases" / name / "devices").write_text("\n".join(case.devices) + "\n")
    on_node(cluster, ASK)
    return {name: answer_in(node / "answers", name) for name in asked}


def on_node(cluster: Cluster, script: str) -> None:
    argv = ["unshare", "--mount", "sh", "-c", script]
    cluster.exec_on_node(cluster.nodes[0], argv, timeout=120)


def answer_in(folder: Path, name: str) -> CaseResult:
    code = int((folder / f"{name}.code").read_text())
    error = (folder / f"{name}.error").read_text()
    if code != 0:
        return CaseResult(code=code, error=error)
    body = json.loads((folder / f"{name}.json").read_text())
    return CaseResult(code=code, error=error, oci=body["Spec"])


def test_containerd_refuses_what_the_linter_calls_bad(answers):
    taken = [name for name in FILES if name.startswith("bad-") and not answers[name].refused]
    assert taken == []


@pytest.mark.parametrize("folder", ["good", "warned", "strict"])
def test_containerd_injects_what_is_good_and_what_only_the_linter_minds(answers, folder):
    """For `strict` files, only the linter reports an error; the corpus explains why."""
    names = [name for name in FILES if name.startswith(f"{folder}-")]
    assert names
    assert {n: answers[n].error for n in names if not answers[n].injected} == {}


def test_every_edit_of_a_good_file_is_in_the_container(answers):
    absent: dict[str, list[str]] = {}
    for name, (_, spec) in FILES.items():
        if name.startswith("good-"):
            absent[name] = [
                word for edits in edits_of(spec) for word in not_in(answers[name].oci, edits)
            ]
    assert {name: words for name, words in absent.items() if words} == {}


@pytest.mark.parametrize("name", sorted(CONFLICTS))
def test_containerd_and_the_linter_lose_the_same_devices(answers, name):
    found = CONFLICTS[name]
    every = {d for file in found.files for d in devices_of(file.spec, file.path)}
    assert answers[f"all-{name}"].unresolved == every - set(found.devices)
    assert any(problem.severity == "error" for problem in found.problems) == bool(
        answers[f"all-{name}"].unresolved
    )


@pytest.mark.parametrize("name", sorted(name for name, found in CONFLICTS.items() if found.devices))
def test_containerd_takes_a_device_from_the_same_file(answers, name):
    env = answers[f"found-{name}"].oci["process"]["env"]
    for device, file in CONFLICTS[name].devices.items():
        variable = f"CORPUS_{device.partition('=')[2].upper()}"
        assert f"{variable}={file.path.parent.name}/{file.path.name}" in env


def test_a_container_starts_with_all_that_good_files_give(cluster, node):
    """Excludes features that this machine may lack: RDT, network interfaces, a runc that accepts
    `none`."""
    started = {path: spec for path, spec in FILES.values() if startable(path, spec)}
    (node / "started").mkdir()
    for path in started:
        shutil.copy(path, node / "started")
    devices = [name for path, spec in started.items() for name in devices_of(spec, path)]
    (node / "devices").write_text("\n".join(devices) + "\n")
    checks = [
        look for spec in started.values() for edits in edits_of(spec) for look in to_see(edits)
    ]
    (node / "check").write_text(
        "\n".join(f"{check} || echo {shlex.quote(check)}" for check in checks)
    )

    (node / "root/bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(static_busybox(), node / "root/bin/busybox")

    assert len(checks) > 50
    on_node(cluster, START)
    assert (node / "seen").read_text() == ""


# ------------------------------------------------------------ effects of edits


def edits_of(spec: Any) -> list[dict[str, Any]]:
    """Return the edits of a whole spec and of all its devices, without nulls."""
    every = [spec.get("containerEdits"), *(device["containerEdits"] for device in spec["devices"])]
    return [{k: v for k, v in edits.items() if v is not None} for edits in every if edits]


def startable(path: Path, spec: Any) -> bool:
    return path.parent.name == "good" and not any(
        {"intelRdt", "netDevices"} & set(edits)
        or any(node.get("permissions") == "none" for node in edits.get("deviceNodes", ()))
        for edits in edits_of(spec)
    )


def not_in(oci: Mapping[str, Any], edits: Mapping[str, Any]) -> Iterable[str]:
    """Return the edits that a container's OCI spec lacks."""
    linux, process = oci["linux"], oci["process"]
    yield from (entry for entry in edits.get("env", ()) if entry not in process["env"])
    for node in edits.get("deviceNodes", ()):
        wanted = {k: node[k] for k in ("path", "type", "major", "minor", "uid", "gid") if k in node}
        if not any(wanted.items() <= device.items() for device in linux["devices"]):
            yield str(node)
        access = {"none": None}.get(text := node.get("permissions", "rwm"), text)
        rules = [rule.get("access") for rule in linux["resources"]["devices"]]
        if node.get("type") != "p" and access not in rules:
            yield f"{node['path']}: {access}"
    for mount in edits.get("mounts", ()):
        wanted = {
            "source": mount["hostPath"],
            "destination": mount["containerPath"],
            "options": mount["options"],
        }
        wanted |= {"type": mount["type"]} if "type" in mount else {}
        if not any(
            wanted.items() <= found.items() for found in oci["mounts"] if "options" in found
        ):
            yield str(mount)
    for hook in edits.get("hooks", ()):
        if {k: v for k, v in hook.items() if k != "hookName"} not in oci["hooks"][hook["hookName"]]:
            yield str(hook)
    for device in edits.get("netDevices", ()):
        if linux["netDevices"].get(device["hostInterfaceName"]) != {"name": device["name"]}:
            yield str(device)
    yield from (
        str(gid)
        for gid in edits.get("additionalGids", ())
        if gid not in process["user"]["additionalGids"]
    )
    rdt = {k: v for k, v in edits.get("intelRdt", {}).items() if v}
    if rdt and linux["intelRdt"] != rdt:
        yield str(rdt)


def to_see(edits: Mapping[str, Any]) -> Iterable[str]:
    """Yield shell conditions that are true in a container with these edits."""
    kinds = {"b": "-b", "c": "-c", "u": "-c", "p": "-p", None: "-e"}
    for entry in edits.get("env", ()):
        name, _, value = entry.partition("=")
        yield f'[ "${name}" = {shlex.quote(value)} ]'
    for node in edits.get("deviceNodes", ()):
        yield f"[ {kinds[node.get('type')]} {node['path']} ]"
        if "fileMode" in node:
            yield f"[ $(stat -c %a {node['path']}) = {node['fileMode']:o} ]"
    for mount in edits.get("mounts", ()):
        yield f"grep -q ' {mount['containerPath']} ' /proc/mounts"
    for gid in edits.get("additionalGids", ()):
        yield f"id -G | grep -qw {gid}"
