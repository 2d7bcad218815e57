"""
`drakit setup` and the chart's ClusterRole of viewers on a real API server.

A control plane without nodes is sufficient. The definitions of an earlier version are the current
ones with its name, and with the map of labels that it used as a node selector.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from drakit_cli.setup import read_definitions
from drakit_formats import crds
from e2e.cluster.api import Capability, Cluster, Options
from e2e.cluster.choice import REPOSITORY, cluster_of_tests
from e2e.kit import claim, device_class, from_claim, pod, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.feature("release"),
    pytest.mark.needs(Capability.CONTROL_PLANE_ALONE),
]

OLD, NEW = "v1alpha1", crds.API_VERSION.partition("/")[2]
MATCH = [{"subsystem": "tty", "paths": ["/dev/ttyUSB*"]}]
PLURALS = (crds.POLICIES, crds.REPORTS)
NODES, DRIVERS = ("node-1", "node-2"), ("lamps.test", "horns.test")


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    chosen = cluster_of_tests("setup")
    chosen.start(Options(nodes=0))
    yield chosen
    chosen.stop()
    assert chosen.leftovers() == []


# ------------------------------------------------------------ definitions


def installed(*versions: str, storage: str) -> list[dict[str, Any]]:
    """Return the definitions in a cluster that has these versions."""
    bodies: list[dict[str, Any]] = []
    for body in read_definitions():
        (current,) = body["spec"]["versions"]
        written: list[dict[str, Any]] = []
        for version in versions:
            each = json.loads(json.dumps(current))
            each |= {"name": version, "storage": version == storage}
            spec = each["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
            if version == OLD:
                each["schema"]["openAPIV3Schema"]["description"] = "An earlier form."
                if NEW in versions:
                    # The API server rejects equal fields in versions with different schemas.
                    each.pop("selectableFields", None)
            if version == OLD and "nodeSelector" in spec:
                spec["nodeSelector"] = {
                    "type": "object",
                    "additionalProperties": {"type": "string"},
                }
            written.append(each)
        bodies.append({**body, "spec": {**body["spec"], "versions": written}})
    return bodies


def policy(name: str, version: str, selector: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": f"{crds.GROUP}/{version}",
        "kind": "HostDevicePolicy",
        "metadata": {"name": name},
        "spec": {"match": MATCH, "nodeSelector": selector},
    }


def report(node: str, version: str = NEW) -> dict[str, Any]:
    return {
        "apiVersion": f"{crds.GROUP}/{version}",
        "kind": "NodeDeviceReport",
        "metadata": {"name": f"{node}.lamps.test"},
        "spec": {"nodeName": node, "driver": "lamps.test"},
    }


class Definitions:
    """The definitions in a cluster, and `drakit setup` for them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def install(self, *versions: str, storage: str) -> None:
        """Install versions as a client of an earlier release, and wait until they are served."""
        self.apply(*installed(*versions, storage=storage))
        names = [f"crd/{plural}.{crds.GROUP}" for plural in PLURALS]
        self.cluster.kubectl("wait", "--for=condition=Established", *names, "--timeout=30s")
        for plural in PLURALS:
            wait_for(plural, lambda each=plural: self.list(each, storage, check=False) is not None)

    def apply(self, *bodies: dict[str, Any]) -> None:
        self.cluster.kubectl(
            *("apply", "--server-side", "--force-conflicts", "-f", "-"),
            input="\n---\n".join(map(json.dumps, bodies)),
        )

    def store(self, version: str) -> None:
        """Store two objects of each kind."""
        labels = {"zone": "a"}
        selector = labels if version == OLD else {"matchLabels": labels}
        self.apply(*(policy(name, version, selector) for name in ("kvm", "serial")))
        self.apply(*(report(node, version) for node in NODES))

    def list(self, plural: str, version: str = NEW, *, check: bool = True) -> list[Any] | None:
        done = self.cluster.kubectl(
            "get", f"{plural}.{version}.{crds.GROUP}", "-o", "json", check=check
        )
        return json.loads(done.stdout)["items"] if done.returncode == 0 else None

    def contents(self) -> str:
        """Return all definitions and objects as the API server has them."""
        bodies = [self.cluster.get("crd", f"{plural}.{crds.GROUP}") for plural in PLURALS]
        for body in tuple(bodies):
            storage = next(each["name"] for each in body["spec"]["versions"] if each["storage"])
            bodies += self.list(body["spec"]["names"]["plural"], storage) or []
        return json.dumps(bodies)

    def stored_versions(self) -> list[list[str]]:
        names = [f"{plural}.{crds.GROUP}" for plural in PLURALS]
        return [self.cluster.get("crd", name)["status"]["storedVersions"] for name in names]

    def setup(self, command: str) -> subprocess.CompletedProcess[str]:
        release = ("--release", "drakit-system/drakit") if command == "crds" else ()
        argv = [sys.executable, "-m", "drakit_cli.main", "setup", command, *release]
        return self.cluster.run(argv, timeout_seconds=90, check=False)


@pytest.fixture
def definitions(server: Cluster) -> Iterator[Definitions]:
    yield Definitions(server)
    names = [each["metadata"]["name"] for each in read_definitions()]
    # The API server lists remaining objects every 5 s, and after a minute it tries again.
    server.kubectl("delete", "crd", *names, "--ignore-not-found", timeout=150)


def test_definitions_of_a_lost_version_without_objects_are_replaced(definitions):
    definitions.install(OLD, storage=OLD)
    done = definitions.setup("crds")
    assert done.returncode == 0, done.stderr
    assert definitions.stored_versions() == [[NEW], [NEW]]
    for name in PLURALS:
        (version,) = definitions.cluster.get("crd", f"{name}.{crds.GROUP}")["spec"]["versions"]
        assert (version["name"], version["served"], version["storage"]) == (NEW, True, True)
    definitions.store(NEW)
    assert definitions.setup("crds").returncode == 0
    assert [len(definitions.list(plural) or []) for plural in PLURALS] == [2, 2]


def test_objects_of_a_lost_version_are_kept_until_they_are_rewritten_as_the_sentence_says(
    definitions, tmp_path
):
    definitions.install(OLD, storage=OLD)
    definitions.store(OLD)
    before = definitions.contents()
    done = definitions.setup("crds")
    assert done.returncode == 1
    assert definitions.contents() == before

    def run(command: str) -> subprocess.CompletedProcess[str]:
        folder = Path(definitions.cluster.program("kubectl")).parent
        environment = {
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "KUBECONFIG": str(definitions.cluster.kubeconfig),
        }
        return subprocess.run(
            *(["sh", "-c", command],),
            cwd=tmp_path, env=environment, timeout=60, capture_output=True, text=True, check=False,
        )  # fmt: skip

    save, delete, restore, delete_reports = re.findall(r"'(kubectl [^']+)'", done.stderr)
    assert run(save).returncode == 0
    saved = tmp_path / shlex.split(save)[-1]
    for command in (delete, delete_reports):
        assert run(command).returncode == 0
    done = definitions.setup("crds")
    assert done.returncode == 0, done.stderr

    # A map of labels is rejected in the new version, because it must not become a policy for all
    # nodes.
    text = saved.read_text().replace(f"{crds.GROUP}/{OLD}", crds.API_VERSION)
    saved.write_text(text)
    refused = run(restore)
    assert refused.returncode == 1
    assert "write labels of nodes below matchLabels" in refused.stderr
    assert definitions.list(crds.POLICIES) == []

    body = yaml.safe_load(text)
    for each in body["items"]:
        each["spec"]["nodeSelector"] = {"matchLabels": each["spec"]["nodeSelector"]}
    saved.write_text(yaml.safe_dump(body))
    done = run(restore)
    assert done.returncode == 0, done.stderr
    restored = definitions.list(crds.POLICIES) or []
    selectors = {each["metadata"]["name"]: each["spec"]["nodeSelector"] for each in restored}
    assert selectors == {name: {"matchLabels": {"zone": "a"}} for name in ("kvm", "serial")}


def test_objects_are_migrated_before_their_version_is_dropped(definitions):
    definitions.install(OLD, NEW, storage=OLD)
    definitions.apply(*(report(node, OLD) for node in NODES))
    selector = {"matchLabels": {"zone": "a"}}
    definitions.apply(*(policy(name, NEW, selector) for name in ("kvm", "serial")))

    def hashes() -> list[str]:
        text = definitions.cluster.kubectl("get", "--raw", f"/apis/{crds.API_VERSION}").stdout
        return [each.get("storageVersionHash", "") for each in json.loads(text)["resources"]]

    before = hashes()
    definitions.install(OLD, NEW, storage=NEW)
    wait_for("the storage version", lambda: hashes() != before)
    assert definitions.stored_versions() == [[OLD, NEW], [OLD, NEW]]

    done = definitions.setup("crds")
    assert done.returncode == 1
    assert done.stderr.count("run 'drakit setup migrate' before you upgrade") == 2

    def versions() -> dict[str, tuple[str, int, Any]]:
        items = [each for plural in PLURALS for each in definitions.list(plural) or []]
        return {
            each["metadata"]["name"]: (
                each["metadata"]["resourceVersion"],
                each["metadata"]["generation"],
                each["spec"],
            )
            for each in items
        }

    old = versions()
    done = definitions.setup("migrate")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"rewrote 2 objects in version {NEW}") == 2
    assert definitions.stored_versions() == [[NEW], [NEW]]
    new = versions()
    assert len(new) == 4
    for name, (version, *content) in new.items():
        assert (list(old[name][1:]), old[name][0] != version) == (content, True)
    # Objects that are stored in the current version are not written again.
    assert definitions.setup("migrate").returncode == 0
    assert versions() == new

    done = definitions.setup("crds")
    assert done.returncode == 0, done.stderr
    assert versions() == new


# ------------------------------------------------------------ viewers


def slice_of(node: str, driver: str) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{driver}"},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "first"}, {"name": "second"}],
        },
    }


@pytest.fixture(scope="module")
def viewed(server: Cluster) -> Iterator[Cluster]:
    """Devices of two drivers on two nodes, two waiting pods, and the role bound to a group."""
    rendered = server.helm(
        *("template", "drakit", str(REPOSITORY / "charts/drakit")),
        "--show-only=templates/viewer-rbac.yaml",
        *("--set", "image.repository=none.test/drakit", "--set", "viewer.groups.lab-users=true"),
    ).stdout
    nodes = [{"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}} for node in NODES]
    bodies = [
        *installed(NEW, storage=NEW),
        *nodes,
        *(device_class(driver.partition(".")[0], driver) for driver in DRIVERS),
        *(slice_of(node, driver) for node in NODES for driver in DRIVERS),
        *(claim(name, ("device", name)) for name in ("lamps", "horns")),
        *(pod(f"with-{name}", ("device", from_claim(name))) for name in ("lamps", "horns")),
    ]
    manifest = "\n---\n".join([rendered, *map(json.dumps, bodies)])
    wait_for("the account of pods", lambda: server.kubectl("get", "sa", "default", check=False))
    server.apply(manifest)
    wait_for("the reports", lambda: server.kubectl("get", "ndr", check=False).returncode == 0)
    server.apply("\n---\n".join(json.dumps(report(node)) for node in NODES))
    yield server
    server.kubectl("delete", "--ignore-not-found", "--force", "-f", "-", input=manifest)


def ask(server: Cluster, *arguments: str) -> tuple[int, str, str]:
    argv = (sys.executable, "-m", "drakit_cli.kubectl.main", *arguments)
    done = server.run(argv, check=False)
    return done.returncode, done.stdout, done.stderr


VIEWER = ("--as", "alice", "--as-group", "lab-users")
VIEWS = (
    ("explain", "with-lamps"),
    ("explain", "--all-namespaces"),
    ("devices",),
    ("devices", f"{NODES[0]}/first"),
    ("claims",),
)


@pytest.mark.parametrize("view", VIEWS, ids=" ".join)
def test_a_viewer_gets_the_answers_of_an_administrator(viewed, view):
    code, out, error = ask(viewed, *view, "--as", "alice")
    assert (code, out) == (3, ""), error
    wait_for("the same answer", lambda: ask(viewed, *view, *VIEWER) == ask(viewed, *view))


def test_the_command_of_the_doctor_makes_a_user_a_viewer(viewed):
    bob = ("--as", "bob")
    viewed.kubectl("create", "rolebinding", "bob", "--clusterrole=view", "--user=bob")

    def fix_of_nodes() -> str:
        _, out, error = ask(viewed, "doctor", *bob, "-o", "json")
        assert out, error
        findings = json.loads(out)["findings"]
        fixes = [each["fix"] for each in findings if "to list nodes" in each["finding"]]
        return fixes[0] if fixes else ""

    question, command = fix_of_nodes().replace("USER", "bob").split(": ", 1)
    assert question == "ask an administrator"
    programs = Path(viewed.program("kubectl")).parent
    viewed.run(["bash", "-c", f'PATH="{programs}:$PATH"; {command}'])
    wait_for("the permission", lambda: not fix_of_nodes())
    assert ask(viewed, "devices", *bob) == ask(viewed, "devices")


def test_a_doctor_of_a_viewer_lacks_only_what_the_role_leaves_out(viewed):
    def findings(*options: str) -> dict[str, str]:
        _, out, error = ask(viewed, "doctor", *options, "-o", "json")
        assert out, error
        return {each["finding"]: each["object"] for each in json.loads(out)["findings"]}

    of_admin = {what: who for what, who in findings().items() if "no release" not in what}
    found = findings(*VIEWER)
    assert of_admin.items() <= found.items()
    lacking = sorted(what for what, who in found.items() if who == "Your permissions")
    assert [what.partition(":")[0] for what in lacking] == [
        "no permission to list configmaps",
        "no permission to read feature gates of the API server (/metrics)",
    ]
