"""`kubectl drakit` as three users: an administrator, and two users of a namespace."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import pytest
import yaml

from e2e.images.go import cel_program
from e2e.kit import from_template, plugin_pod, pod, ready, template, wait_for
from e2e.release import CHART, Release, install, uninstall
from e2e.scripted.control import Rule
from e2e.scripted.stage import DEVICES, HORNS, LAMPS, number

pytestmark = [pytest.mark.e2e, pytest.mark.feature("explain")]

CLUSTER_WIDE = "drakit-e2e-devices"
"""A ClusterRole with the permissions that a user needs outside of a namespace. It excludes nodes,
and claims of other namespaces."""


def create_account(stage, name: str) -> None:
    """Create a user who may read pods and claims of the namespace."""
    claims = "resourceclaims.resource.k8s.io,resourceclaimtemplates.resource.k8s.io"
    stage.kubectl("create", "serviceaccount", name)
    stage.kubectl("create", "role", name, "--verb=get,list", f"--resource=pods,{claims}")
    account = f"--serviceaccount={stage.name}:{name}"
    stage.kubectl("create", "rolebinding", name, f"--role={name}", account)


class User:
    """The command, as one user runs it."""

    def __init__(self, stage, kubeconfig: Path) -> None:
        self._stage = stage
        # With Kubernetes' allocator, as in every documented installation.
        found = {"KUBECONFIG": str(kubeconfig), "DRAKIT_CEL": str(cel_program(stage.cluster.minor))}
        self._environment = {**os.environ, **found}

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        return self.run([sys.executable, "-m", "drakit_cli.kubectl.main", *arguments])

    @contextmanager
    def start(self, *arguments: str) -> Generator[subprocess.Popen[str]]:
        """Run a command that does not exit, and end it at the end of the block."""
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "drakit_cli.kubectl.main", *arguments),
                *("-n", self._stage.name),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
            # A process in the background of a script ignores SIGINT, and so would its children.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, argv: Sequence[str]) -> tuple[int, str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        result = subprocess.run(
            [*argv, "-n", self._stage.name],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**self._environment, "PATH": path},
        )
        return result.returncode, result.stdout, result.stderr

    def json(self, *arguments: str) -> tuple[int, dict]:
        code, out, error = self(*arguments, "-o", "json")
        assert out, error
        return code, json.loads(out)


@pytest.fixture
def user_of(stage, tmp_path):
    """Return a function that creates a user of an account in the namespace."""

    def make(name: str) -> User:
        config = yaml.safe_load(stage.cluster.kubeconfig.read_text())
        token = stage.kubectl("create", "token", name).strip()
        config["users"] = [{"name": name, "user": {"token": token}}]
        config["contexts"][0]["context"]["user"] = name
        path = tmp_path / name
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return User(stage, path)

    return make


@pytest.fixture
def admin(stage) -> User:
    return User(stage, stage.cluster.kubeconfig)


@pytest.fixture
def tenant(stage, user_of):
    """A user of the namespace who may list slices and classes, but not nodes."""
    create_account(stage, "tenant")
    name = f"{CLUSTER_WIDE}-{stage.name}"
    role = ["resourceslices.resource.k8s.io", "deviceclasses.resource.k8s.io"]
    stage.cluster.kubectl(
        *("create", "clusterrole", name, "--verb=get,list", f"--resource={','.join(role)}")
    )
    stage.cluster.kubectl(
        *("create", "clusterrolebinding", name, f"--clusterrole={name}"),
        f"--serviceaccount={stage.name}:tenant",
    )
    yield user_of("tenant")
    stage.cluster.kubectl("delete", f"clusterrole/{name}", f"clusterrolebinding/{name}")


@pytest.fixture
def stranger(stage, user_of) -> User:
    """A user of the namespace who may not list slices, classes or nodes."""
    create_account(stage, "stranger")
    return user_of("stranger")


@pytest.fixture
def stuck(stage):
    """A pod that requests the device of another pod."""
    stage.apply(template("lamp", ("lamp", "lamp.test", number(LAMPS, 0))))
    stage.apply(pod("holder", ("lamp", from_template("lamp"))))
    stage.wait_phase("holder", "Running")
    stage.apply(pod("waits", ("lamp", from_template("lamp"))))
    wait_for("the scheduler's message", lambda: _message(stage))
    return stage


def _message(stage) -> str:
    conditions = stage.get("pod", "waits")["status"].get("conditions") or [{}]
    return conditions[0].get("message", "")


def test_an_administrator_gets_the_whole_answer(stuck, admin):
    code, body = admin.json("explain", "pod/waits")
    assert (code, body["verdict"]) == (1, "blocked")
    assert [each["code"] for each in body["reasons"]] == ["DevicesAllocated"]
    assert f"claim {stuck.name}/holder-lamp-" in body["message"]
    assert body["notEvaluated"] == []
    assert body["schedulerMessage"] == _message(stuck)

    stuck.delete("pod", "holder")
    stuck.wait_phase("waits", "Running")
    code, body = admin.json("explain", "pod/waits")
    assert (code, body["verdict"]) == (0, "not pending")
    assert f"is scheduled to node {stuck.cluster.nodes[0]}" in body["message"]


def test_the_words_of_a_driver_that_cannot_prepare_arrive(stage, admin):
    stage.lamps.play(Rule(operation="prepare", fail="the lamp's wire is broken", times=1))
    stage.with_lamp("user", 0)
    stage.event("user", "the lamp's wire is broken")
    code, body = admin.json("explain", "pod/user")
    assert (code, body["verdict"]) == (1, "broken")
    assert [each["code"] for each in body["reasons"]] == ["ClaimsNotPrepared"]
    assert "the lamp's wire is broken" in body["message"]

    stage.nudge("user")
    stage.wait_phase("user", "Running")
    assert admin.json("explain", "pod/user")[0] == 0


def test_each_exit_code_has_its_case(stuck, admin, stranger, tmp_path):
    for arguments, code in (
        (["explain", "holder"], 0),
        (["explain", "waits"], 1),
        (["explain", "secret/waits"], 2),
        (["explain", "waits", "--kubeconfig", "/absent"], 2),
        (["explain", "waits", "--server", "https://127.0.0.1:1"], 3),
        (["explain", "waits", "--request-timeout", "1ms"], 3),
        (["explain", "absent"], 5),
        (["claims"], 0),
        (["claims", "--fail-on", "pending"], 1),
        (["devices"], 0),
        (["version"], 0),
    ):
        assert admin(*arguments)[0] == code, arguments
    assert stranger("explain", "waits")[0] == 4


def test_other_kinds_are_explained(stuck, admin):
    node = stuck.cluster.nodes[0]
    for target, code in (
        (["template", "lamp"], 1),
        (["deviceclass/lamp.test"], 0),
        (["deviceclass/horn.test"], 0),
        (["no", node], 0),
        (["resourceclaimtemplate/absent"], 5),
    ):
        assert admin("explain", *target)[0] == code, target
    _, body = admin.json("explain", "node", node)
    assert {each["driver"] for each in body["pools"]} >= {LAMPS, HORNS}
    name = stuck.cluster.get("resourceslices")["items"][0]["metadata"]["name"]
    assert admin("explain", "resourceslice", name)[0] == 0


def test_the_pods_of_a_job_have_one_answer(stage, admin, tmp_path):
    """There are four lamps, and sixteen pods that request one each."""
    stage.apply(template("lamp", ("lamp", "lamp.test")))
    body = pod("unused", ("lamp", from_template("lamp")))
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train"},
        "spec": {"parallelism": 16, "completions": 16, "template": {"spec": body["spec"]}},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    code, answers = admin.json("explain", "-f", str(path))
    (planned,) = answers["items"]
    assert (code, planned["verdict"]) == (1, "blocked")
    assert planned["message"].startswith(
        f"{DEVICES} of the 16 pods of Job {stage.name}/train fit; the next one would wait: "
    )
    stage.apply(job)

    def answer() -> dict | None:
        code, body = admin.json("explain", "job", "train")
        return body if code == 1 and body["pods"]["running"] == DEVICES else None

    found = wait_for("the pods", answer)
    assert found["message"] == (
        f"Job {stage.name}/train: {DEVICES} of 16 pods run; 12 wait for devices"
    )
    (group,) = found["groups"]
    assert len(group["pods"]) == 12
    assert [each["code"] for each in group["reasons"]] == ["DevicesAllocated"]

    code, out, _ = admin("explain")
    assert (code, len(out.splitlines())) == (1, 13)
    code, body = admin.json("explain", "-A")
    mine = [each for each in body["items"] if each["object"]["namespace"] == stage.name]
    assert {each["object"]["name"] for each in mine} == set(group["pods"])
    assert {each["verdict"] for each in mine} == {"blocked"}


def test_a_manifest_is_explained_before_it_is_applied(stuck, admin, tmp_path):
    free = template("free", ("lamp", "lamp.test", number(LAMPS, 1)))
    for name, source, code in (("would-fit", "free", 0), ("would-wait", "lamp", 1)):
        planned = pod(name, ("lamp", from_template(source)))
        path = tmp_path / name
        path.write_text(yaml.safe_dump_all([planned, free]))
        found, out, error = admin("explain", "-f", str(path))
        assert (found, error) == (code, "")
        assert name.replace("-", " ").removeprefix("would ") in out.splitlines()[0]
    stuck.apply(free, pod("would-fit", ("lamp", from_template("free"))))
    stuck.wait_phase("would-fit", "Running")


def test_the_api_server_judges_a_manifest(stuck, admin, tenant, tmp_path):
    def explained(user, *bodies: dict) -> tuple[int, list[dict]]:
        path = tmp_path / "manifest.yaml"
        path.write_text(yaml.safe_dump_all(bodies))
        code, answers = user.json("explain", "-f", str(path))
        return code, answers["items"]

    planned = pod("new", ("lamp", from_template("free")))
    free = template("free", ("horn", "horn.test"))
    _, (found,) = explained(tenant, planned, free)
    assert any("no permission to create pods" in each for each in found["notEvaluated"]), found
    misspelled = {**planned, "spec": {**planned["spec"], "resourceClaim": []}}
    code, (found,) = explained(admin, misspelled)
    assert (code, 'unknown field "spec.resourceClaim"' in found["message"]) == (1, True), found
    quota = {"count/resourceclaims.resource.k8s.io": "0"}
    stuck.apply(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "none"},
            "spec": {"hard": quota},
        }
    )
    refused = wait_for("the quota", lambda: _refused(explained(admin, planned, free)[1]))
    assert "exceeded quota: none" in refused["message"], refused
    assert stuck.get("pod", "new") is None


def _refused(items: list[dict]) -> dict | None:
    return next((each for each in items if "does not accept its claim" in each["message"]), None)


def test_an_answer_is_watched_and_waited_for(stuck, admin):
    with (
        admin.start("explain", "waits", "--watch", "-o", "json") as watching,
        admin.start("explain", "waits", "--wait", "--timeout", "2m", "-o", "json") as waiting,
    ):
        assert watching.stdout is not None
        assert _document(watching.stdout)["verdict"] == "blocked"
        stuck.delete("pod", "holder")
        # The pod that ends may be named before its device is free.
        while _document(watching.stdout)["verdict"] == "blocked":
            pass
        out, _ = waiting.communicate(timeout=60)
        assert (waiting.returncode, json.loads(out)["verdict"] != "blocked") == (0, True)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=10) == 130


def _document(stream: IO[str]) -> dict:
    """Read one of several JSON objects."""
    lines = []
    while not lines or lines[-1] != "}\n":
        line = stream.readline()
        assert line, lines
        lines.append(line)
    return json.loads("".join(lines))


def test_an_administrator_asks_as_another_user(stuck, admin, tenant, stranger):
    for name, user in (("tenant", tenant), ("stranger", stranger)):
        account = f"system:serviceaccount:{stuck.name}:{name}"
        groups = ("system:serviceaccounts", "system:authenticated")
        given = [f"--as={account}", *(f"--as-group={each}" for each in groups)]
        mine, theirs = admin.json("explain", "waits", *given), user.json("explain", "waits")
        differing = {key for key in mine[1] if mine[1][key] != theirs[1][key]}
        assert (mine[0], differing) == (theirs[0], set()), (mine, theirs)


def test_of_a_pod_of_another_scheduler_nothing_is_promised(stage, admin):
    stage.apply(template("lamp", ("lamp", "lamp.test")))
    waits = pod("waits", ("lamp", from_template("lamp")))
    waits["spec"]["schedulerName"] = "other"
    stage.apply(waits)
    code, body = admin.json("explain", "pod/waits")
    assert (code, body["verdict"]) == (4, "undecided")
    assert "scheduler other places the pod" in " ".join(body["notEvaluated"])


@pytest.mark.slow
def test_feature_gates_are_read_where_a_selector_depends_on_them(stuck, admin, tenant):
    selector = f"{number(LAMPS, 0)} && !device.allowMultipleAllocations"
    stuck.apply(template("alone", ("lamp", "lamp.test", selector)))
    stuck.apply(pod("picky", ("lamp", from_template("alone"))))
    unread = "no permission to read feature gates of the API server (/metrics)"
    code, body = admin.json("explain", "pod/picky")
    assert (code, body["verdict"], body["notEvaluated"]) == (1, "blocked", [])
    assert "DRAConsumableCapacity" in admin.json("doctor")[1]["featureGates"]
    for name, named in (("picky", True), ("waits", False)):
        _, body = tenant.json("explain", f"pod/{name}")
        assert any(each.startswith(unread) for each in body["notEvaluated"]) is named


def test_a_user_of_a_namespace_gets_reasons_and_the_names_of_what_is_not_checked(stuck, tenant):
    code, body = tenant.json("explain", "pod/waits")
    assert (code, body["verdict"]) == (1, "blocked")
    assert [each["code"] for each in body["reasons"]] == ["DevicesAllocated"]
    missing = " ".join(body["notEvaluated"])
    assert (
        "no permission to list nodes: node selectors, affinity, taints and resources of nodes "
        "are not checked" in missing
    )
    assert "no permission to list ResourceClaims of other namespaces" in missing

    _, body = tenant.json("devices")
    pools = [each for each in body["pools"] if each["driver"] == LAMPS]
    states = {device["state"]: device for each in pools for device in each["devices"]}
    (holder,) = states["allocated"]["claims"]
    assert holder.startswith(f"{stuck.name}/holder-lamp-")
    assert "no permission to list ResourceClaims of other namespaces" in " ".join(
        body["notEvaluated"]
    )

    _, body = tenant.json("doctor")
    notes = {each["finding"]: each for each in body["findings"] if each["severity"] == "note"}
    for missing, fix in (
        ("no permission to list nodes", "kubectl create clusterrole"),
        ("no permission to read feature gates of the API server", "--non-resource-url=/metrics"),
        ("no permission to list daemonsets", "kubectl create clusterrole"),
    ):
        (found,) = [each for each in notes if each.startswith(missing)]
        assert notes[found]["object"] == "Your permissions"
        assert fix in notes[found]["fix"]
    assert LAMPS in {each["name"] for each in body["drivers"]}


def test_a_user_without_slices_gets_no_guess(stuck, stranger):
    code, body = stranger.json("explain", "pod/waits")
    assert (code, body["verdict"], body["reasons"]) == (4, "undecided", [])
    assert body["schedulerMessage"] == _message(stuck)
    assert "no permission to list ResourceSlices: devices are unknown" in body["notEvaluated"]

    code, out, error = stranger("devices")
    assert (code, out, error) == (3, "", "error: no permission to list ResourceSlices\n")
    assert stranger.json("claims")[0] == 0
    code, body = stranger.json("doctor")
    assert code == 0, body["findings"]
    assert {each["severity"] for each in body["findings"]} == {"note"}
    named = " ".join(each["finding"] for each in body["findings"])
    assert "no permission to list ResourceSlices: devices are unknown" in named


ONE = Release(name="one", namespace="doctor-one")
TWO = Release(name="two", namespace="doctor-two")
SIMULATED = "doctor.test.drakit.dev"
RENAMED = "renamed.test.drakit.dev"


@pytest.fixture
def two_releases(stage):
    """Two releases with one driver on one node; the first has an operator."""
    node = stage.cluster.nodes[0]
    values = {
        "hostdev": {"enabled": False},
        "simulated": {
            "enabled": True,
            "deviceClasses": False,
            "config": {"driverName": SIMULATED, "nic": {"listAttributes": True}},
        },
        "nodeplugin": {"nodeSelector": {"kubernetes.io/hostname": node}},
    }
    try:
        install(stage.cluster, ONE, values=values)
        values["operator"] = {"enabled": False}
        install(stage.cluster, TWO, values=values, wait=False)
        wait_for("the second plugin", lambda: plugin_pod(stage.cluster, node, release=TWO))
        yield stage
    finally:
        for release in (TWO, ONE):
            uninstall(stage.cluster, release)
            stage.cluster.kubectl("delete", "namespace", release.namespace, "--ignore-not-found")
        for driver in (SIMULATED, RENAMED):  # the kubelet deletes them later
            field = f"--field-selector=spec.driver={driver}"
            stage.cluster.kubectl("delete", "resourceslices", field)


@pytest.mark.slow
def test_the_doctors_remedies_end_what_it_finds_about_releases(two_releases, admin):
    cluster = two_releases.cluster
    both_run = f"both run driver {SIMULATED}"
    denied = "doctor-one/one-drakit-operator of the operator is not allowed to"
    # By default, Helm 4 does not overwrite what another client has changed.
    remove = json.dumps([{"op": "remove", "path": "/rules/0"}])
    cluster.kubectl("patch", "clusterrole", "one-drakit-operator", "--type=json", "-p", remove)

    found = {}

    def complete() -> bool:
        found.update({each["finding"]: each for each in admin.json("doctor")[1]["findings"]})
        return any(denied in each for each in found)

    wait_for("the API server to forget the rule", complete)
    (twice,) = [each for each in found.values() if both_run in each["finding"]]
    roles, optional = sorted(
        (each for each in found.values() if denied in each["finding"]),
        key=lambda each: each["severity"] != "problem",
    )
    assert "list devicetaintrules.resource.k8s.io" in optional["finding"]
    (lists,) = [
        each
        for each in found.values()
        if "release one" in each["finding"]
        and "DRAListTypeAttributes, which is disabled" in each["finding"]
    ]
    assert (twice["severity"], twice["object"]) == ("problem", "Release doctor-two/two")
    assert (roles["severity"], lists["severity"]) == ("problem", "note")

    for each in (twice, roles, lists):
        _follow(cluster, each["fix"])
    node = cluster.nodes[0]
    wait_for("the second plugin", lambda: ready(plugin_pod(cluster, node, release=TWO)), seconds=90)
    left = [each["finding"] for each in admin.json("doctor")[1]["findings"]]
    assert not [each for each in left if both_run in each or denied in each]
    assert not [each for each in left if "release one" in each and "DRAList" in each]


def _follow(cluster, fix: str) -> None:
    """Run the helm command at the end of a remedy, from the folder of the repository."""
    words = shlex.split(fix[fix.index("helm ") :].replace("=NAME", f"={RENAMED}"))
    cluster.helm(*(str(CHART) if word == "charts/drakit" else word for word in words[1:]))
