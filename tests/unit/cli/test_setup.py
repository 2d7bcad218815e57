"""Definitions and policies are applied for one release, and never taken from another owner."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from drakit.testing.apiserver import FakeApiServer
from drakit_cli import setup
from drakit_cli.answers import CommandError, UsageError
from drakit_cli.main import main
from drakit_cli.setup import (
    Owner,
    apply_crds,
    apply_policies,
    migrate_objects,
)
from drakit_daemon.kube import ConflictError, connect
from drakit_formats import crds

DEFINITIONS = tuple(setup.read_definitions())
OURS = Owner(namespace="drakit-system", name="drakit")
OTHER = Owner(namespace="lab", name="second")
POLICIES = f"/apis/{crds.API_VERSION}/hostdevicepolicies"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = f"{CRDS}/hostdevicepolicies.drakit.dev"
SPEC = {"match": [{"subsystem": "misc", "paths": ["/dev/kvm"]}]}
ESTABLISHED = {"conditions": [{"type": "Established", "status": "True"}]}


@pytest.fixture
async def server():
    async with FakeApiServer() as server:
        yield server


@pytest.fixture
async def session(server, tmp_path):
    async with await connect(server.write_kubeconfig(tmp_path), user_agent="test") as session:
        yield session


def owned(owner: Owner | None, spec: object = SPEC) -> dict[str, object]:
    labels = {} if owner is None else owner.labels
    return {"metadata": {"labels": labels}, "spec": spec, "status": ESTABLISHED}


async def names(session) -> set[str]:
    return {body["metadata"]["name"] for body in (await session.list(POLICIES)).items}


async def test_the_policies_of_a_release_become_those_of_its_values(server, session):
    server.store(f"{POLICIES}/old", owned(OURS))
    server.store(f"{POLICIES}/by-hand", owned(None))
    server.store(f"{POLICIES}/of-the-second", owned(OTHER))
    assert await apply_policies(session, OURS, {"kvm": SPEC}) == 0
    assert await names(session) == {"kvm", "by-hand", "of-the-second"}
    body = await session.get(f"{POLICIES}/kvm")
    assert (body["spec"], Owner.of(body)) == (SPEC, OURS)


@pytest.mark.parametrize(
    ("holder", "whose"),
    [
        pytest.param(OTHER, "release lab/second owns it", id="another-release"),
        pytest.param(None, "another owner owns it", id="a-person"),
    ],
)
async def test_a_policy_of_somebody_else_is_refused_and_costs_itself_only(
    server, session, capsys, holder, whose
):
    theirs = {"match": [{"subsystem": "tty"}]}
    server.store(f"{POLICIES}/kvm", owned(holder, theirs))
    assert await apply_policies(session, OURS, {"kvm": SPEC, "tun": SPEC}) == 1
    assert (await session.get(f"{POLICIES}/kvm"))["spec"] == theirs
    assert "tun" in await names(session)
    assert f"hostdev.policies.kvm: it exists, and {whose}" in capsys.readouterr().err


async def test_a_policy_that_the_api_server_rejects_costs_itself_only(server, session, capsys):
    server.fail("PATCH", f"{POLICIES}/kvm", status=422, reason="Invalid", message="match: required")
    assert await apply_policies(session, OURS, {"kvm": {}, "tun": SPEC}) == 1
    assert await names(session) == {"tun"}
    assert "match: required" in capsys.readouterr().err


async def test_the_last_policies_of_a_release_are_deleted_with_it(server, session):
    server.store(f"{POLICIES}/kvm", owned(OURS))
    assert await apply_policies(session, OURS, {}) == 0
    assert await names(session) == set()


async def test_without_the_definition_there_is_nothing_to_delete(server, session):
    server.fail("GET", POLICIES, status=404, reason="NotFound", message="no such resource")
    assert await apply_policies(session, OURS, {}) == 0


async def test_a_new_definition_is_waited_for(server, session, monkeypatch):
    monkeypatch.setattr(setup, "POLL_SECONDS", 0.01)
    server.fail("GET", POLICIES, status=404, reason="NotFound", message="not yet", times=3)
    assert await apply_policies(session, OURS, {"kvm": SPEC}) == 0
    assert await names(session) == {"kvm"}


async def test_definitions_are_applied_and_belong_to_the_release(server, session, monkeypatch):
    monkeypatch.setattr(setup, "POLL_SECONDS", 0.01)
    server.store(CRD, owned(OURS, {"group": "old"}))
    for body in DEFINITIONS:
        server.store(f"{CRDS}/{body['metadata']['name']}", owned(OURS, {"group": "old"}))
    assert await apply_crds(session, OURS, DEFINITIONS) == 0
    body = await session.get(CRD)
    assert (body["spec"]["group"], Owner.of(body)) == ("drakit.dev", OURS)


async def test_a_definition_of_another_release_stays_as_it_is(server, session, capsys):
    for body in DEFINITIONS:
        server.store(f"{CRDS}/{body['metadata']['name']}", owned(OTHER, {"group": "theirs"}))
    assert await apply_crds(session, OURS, DEFINITIONS) == 0
    assert (await session.get(CRD))["spec"]["group"] == "theirs"
    assert "release lab/second owns it, unchanged" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["drakit", "/drakit", "lab/", "a/b/c", ""])
def test_a_malformed_release_is_wrong_usage(text):
    with pytest.raises(UsageError, match="NAMESPACE/NAME"):
        setup.policies(argparse.Namespace(release=text, file=None))


@pytest.mark.parametrize("text", ["- kvm", "kvm: [", ""])
def test_a_malformed_file_is_wrong_usage(tmp_path, text):
    file = tmp_path / "policies.yaml"
    file.write_text(text)
    with pytest.raises(UsageError):
        setup.policies(argparse.Namespace(release="lab/drakit", file=file))


# ------------------------------------------------------------ versions

REPORTS = f"/apis/{crds.API_VERSION}/nodedevicereports"
OLD = "v1alpha1"


def installed(server, *versions: str, stored: list[str]) -> None:
    """Store drakit's definitions with these versions, of which the last one is the storage."""
    for body in DEFINITIONS:
        listed = [
            {"name": name, "served": True, "storage": name == versions[-1]} for name in versions
        ]
        status = {**ESTABLISHED, "storedVersions": stored}
        spec = {**body["spec"], "versions": listed}
        server.store(f"{CRDS}/{body['metadata']['name']}", {"spec": spec, "status": status})


def of_version(path: str, version: str) -> str:
    return path.replace(f"/{crds.VERSION}/", f"/{version}/")


def definition_changes(server, path: str = CRD) -> list[tuple[list[str], list[str]]]:
    """The versions and stored versions after each change to a definition."""
    return [
        (
            [each["name"] for each in change.new["spec"]["versions"]],
            change.new["status"]["storedVersions"],
        )
        for change in server.cluster.history
        if path == f"{change.key[0]}/{change.key[2]}"
    ][1:]


async def test_stored_objects_of_a_lost_version_are_refused_and_nothing_changes(server, session):
    installed(server, OLD, stored=[OLD])
    for name in ("kvm", "tun"):
        server.store(f"{of_version(POLICIES, OLD)}/{name}", owned(OURS))
        server.store(f"{of_version(REPORTS, OLD)}/{name}", {"spec": {"nodeName": name}})
    with pytest.raises(CommandError) as raised:
        await apply_crds(session, OURS, DEFINITIONS)
    policies, reports = str(raised.value).split("\n")
    assert "objects are stored in version v1alpha1, which this release does not have" in policies
    assert "kubectl get hostdevicepolicies.v1alpha1.drakit.dev -o yaml" in policies
    assert "kubectl delete crd nodedevicereports.drakit.dev" in reports
    assert server.writes() == []


async def test_objects_that_the_definition_can_still_read_need_a_migration_first(server, session):
    installed(server, OLD, crds.VERSION, stored=[OLD, crds.VERSION])
    server.store(f"{POLICIES}/kvm", owned(OURS))
    with pytest.raises(CommandError, match="run 'drakit setup migrate' before you upgrade"):
        await apply_crds(session, OURS, DEFINITIONS)
    assert server.writes() == []


async def test_a_lost_version_without_objects_is_dropped(server, session):
    installed(server, OLD, stored=[OLD])
    assert await apply_crds(session, OURS, DEFINITIONS) == 0
    new = [crds.VERSION]
    assert definition_changes(server) == [
        ([crds.VERSION, OLD], [OLD]),
        ([crds.VERSION, OLD], new),
        (new, new),
    ]
    between = [each.new for each in server.cluster.history if CRD.endswith(each.key[2])][1]
    assert "annotations" not in between["metadata"], "the chart would take it for complete"
    assert [each["served"] for each in between["spec"]["versions"]] == [True, False]


async def test_an_object_that_is_created_meanwhile_restores_the_old_definition(server, session):
    installed(server, OLD, stored=[OLD])
    server.store(f"{POLICIES}/kvm", owned(None))
    with pytest.raises(CommandError, match="objects were created in the meantime"):
        await apply_crds(session, OURS, DEFINITIONS)
    assert definition_changes(server)[-1] == ([OLD], [OLD])


def with_objects(server) -> None:
    for name in ("kvm", "tun"):
        server.store(f"{POLICIES}/{name}", owned(OURS))
        server.store(f"{REPORTS}/{name}", {"spec": {"nodeName": name}})


NAMES = [body["metadata"]["name"] for body in DEFINITIONS]


async def test_a_migration_rewrites_every_object_and_can_be_repeated(server, session, monkeypatch):
    monkeypatch.setattr(setup, "PAGE_SIZE", 1)
    installed(server, OLD, crds.VERSION, stored=[OLD, crds.VERSION])
    with_objects(server)
    server.fail("PUT", f"{POLICIES}/tun", status=409, reason="Conflict", message="no", times=2)
    server.fail("PUT", f"{REPORTS}/kvm", status=404, reason="NotFound", message="no", times=1)
    for _ in range(2):
        assert await migrate_objects(session, NAMES) == 0
        paths = [f"{POLICIES}/kvm", f"{POLICIES}/tun", f"{REPORTS}/kvm", f"{REPORTS}/tun"]
        assert {path for verb, path in server.writes() if verb == "PUT"} == set(paths)
        server.requests.clear()
        for name in NAMES:
            body = await session.get(f"{CRDS}/{name}")
            assert body["status"]["storedVersions"] == [crds.VERSION]


async def test_a_migration_that_cannot_finish_keeps_the_stored_versions(server, session):
    installed(server, OLD, crds.VERSION, stored=[OLD, crds.VERSION])
    with_objects(server)
    server.fail("PUT", f"{POLICIES}/tun", status=409, reason="Conflict", message="no", times=100)
    with pytest.raises(ConflictError):
        await migrate_objects(session, NAMES)
    body = await session.get(CRD)
    assert body["status"]["storedVersions"] == [OLD, crds.VERSION]


async def test_without_definitions_there_is_nothing_to_migrate(server, session, capsys):
    assert await migrate_objects(session, NAMES) == 0
    assert capsys.readouterr().out.count("not installed") == len(NAMES)


async def test_a_user_can_be_impersonated(server, tmp_path, capsys):
    given = ["--kubeconfig", str(server.write_kubeconfig(tmp_path)), "--as", "alice"]
    file = tmp_path / "policies.yaml"
    file.write_text("{}")
    for command in (["migrate"], ["policies", "--release", str(OURS), "--file", str(file)]):
        assert await asyncio.to_thread(main, ["setup", *command, *given]) == 0
        assert {each["Impersonate-User"] for each in server.headers} == {"alice"}
    assert await asyncio.to_thread(main, ["setup", "migrate", *given[:2], "--as-uid", "7"]) == 2
    assert "--as-uid need --as" in capsys.readouterr().err


async def test_an_upgrade_with_a_new_storage_version_migrates(server, session, monkeypatch):
    monkeypatch.setattr(setup, "STORAGE_SECONDS", 0)
    installed(server, OLD, crds.VERSION, stored=[OLD, crds.VERSION])
    with_objects(server)
    kept = {"name": OLD, "served": True, "storage": False}
    definitions = [
        {**body, "spec": {**body["spec"], "versions": [*body["spec"]["versions"], kept]}}
        for body in DEFINITIONS
    ]
    assert await apply_crds(session, OURS, definitions) == 0
    assert definition_changes(server)[-1] == ([crds.VERSION, OLD], [crds.VERSION])
    assert [verb for verb, _ in server.writes()].count("PUT") == 4


# ------------------------------------------------------------ the pod of `helm test`


@pytest.mark.parametrize(
    ("arguments", "environment", "problem"),
    [
        pytest.param([], {}, "", id="a-driver-without-variables"),
        pytest.param(["--variable=LAMP"], {"LAMP": "lamp-0"}, "", id="a-name"),
        pytest.param(["--variable=LAMP"], {"LAMP": "/dev/null:/dev/zero"}, "", id="paths"),
        pytest.param(["--variable=LAMP"], {}, "no variable LAMP", id="no-cdi"),
        pytest.param(
            *(["--variable=LAMP"], {"LAMP": "/dev/null:/dev/lamp7"}),
            *("LAMP has /dev/lamp7, which the container does not have",),
            id="a-path-that-does-not-exist",
        ),
    ],
)
def test_a_container_has_its_device(monkeypatch, capsys, arguments, environment, problem):
    monkeypatch.delenv("LAMP", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["setup", "test", *arguments]) == (1 if problem else 0)
    out, error = capsys.readouterr()
    assert problem in error
    assert bool(out) is not bool(problem)
