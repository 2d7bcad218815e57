"""Definitions and policies are applied for one release, and never taken from another owner."""

from __future__ import annotations

import argparse

import pytest

from drakit.testing.apiserver import FakeApiServer
from drakit_cli import setup
from drakit_cli.answers import UsageError
from drakit_cli.setup import Owner, apply_crds, apply_policies
from drakit_daemon.kube import connect
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
