"""The operator's token can write only what the operator writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from drakit_daemon.kube import ApiError, connect, resource_path
from drakit_formats import crds
from e2e.cluster.api import Cluster, CommandError
from e2e.kit import write_kubeconfig
from e2e.release import NAMESPACE
from tests.unit.chart.class_writes import WRITES, Write

pytestmark = [pytest.mark.e2e, pytest.mark.feature("operator")]

Object = dict[str, Any]
Kubectl = Callable[..., str]

POLICY = {
    "apiVersion": crds.API_VERSION,
    "kind": "HostDevicePolicy",
    "metadata": {"name": "admission", "finalizers": ["drakit.dev/test"]},
    "spec": {
        "match": [{"subsystem": "mem", "paths": ["/dev/absent"]}],
        "deviceClass": {"create": "Never"},
    },
}
CLASS = "admission.test"


@pytest.fixture(scope="module")
def operator_kubeconfig(release: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kubeconfig with the token of the operator."""
    token = release.kubectl("-n", NAMESPACE, "create", "token", "drakit-operator").stdout.strip()
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    write_kubeconfig(release, path, token=token)
    return path


@pytest.fixture(scope="module")
def as_operator(release: Cluster, operator_kubeconfig: Path) -> Kubectl:
    """Run kubectl with the token of the operator. Nothing that it writes is stored."""

    def kubectl(*arguments: str, **options: Any) -> str:
        flags = ("--kubeconfig", str(operator_kubeconfig), "--dry-run=server")
        return release.kubectl(*arguments, *flags, **options).stdout

    return kubectl


@pytest.fixture(scope="module")
def uids(release: Cluster) -> Iterator[dict[str, str]]:
    """The UIDs of owners that exist, so that the garbage collector does not delete the classes. The
    operator does not delete them either, because it ignores policies that are being deleted."""
    release.apply(json.dumps(POLICY))
    name = POLICY["metadata"]["name"]
    release.kubectl("delete", "hostdevicepolicy", name, "--wait=false")
    yield {
        "uid": release.get("hostdevicepolicy", name)["metadata"]["uid"],
        "namespace_uid": release.get("namespace", "default")["metadata"]["uid"],
    }
    free = json.dumps({"metadata": {"finalizers": None}})
    release.kubectl("patch", "hostdevicepolicy", name, "--type=merge", "-p", free)


def merge_patch(old: Object, new: Object) -> Object:
    """Return the merge patch from one object to another."""
    patch: Object = {}
    for key in old.keys() | new.keys():
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            patch[key] = merge_patch(before, after)
        elif before != after:
            patch[key] = after
    return patch


@pytest.mark.parametrize("write", [pytest.param(each, id=each.name) for each in WRITES])
def test_the_operators_token_can_write_only_classes_as_the_operator_makes_them(
    release: Cluster, as_operator: Kubectl, uids: dict[str, str], write: Write
):
    old, new = write.bodies(CLASS, policy=POLICY["metadata"]["name"], **uids)

    def try_write() -> None:
        if old is None:
            as_operator("create", "-f", "-", input=json.dumps(new))
        elif new is None:
            as_operator("delete", "deviceclass", CLASS)
        else:
            patch = json.dumps(merge_patch(old, new))
            as_operator("patch", "deviceclass", CLASS, "--type=merge", "-p", patch)

    if old is not None:
        release.kubectl("create", "-f", "-", input=json.dumps(old))
    try:
        if write.sentence:
            with pytest.raises(CommandError) as caught:
                try_write()
            assert "ValidatingAdmissionPolicy 'drakit-operator'" in caught.value.output
            assert write.sentence in caught.value.output
        else:
            try_write()
    finally:
        if old is not None:
            free = json.dumps({"metadata": {"finalizers": None}})
            release.kubectl("patch", "deviceclass", CLASS, "--type=merge", "-p", free)
            release.kubectl("delete", "deviceclass", CLASS)


@pytest.mark.parametrize(
    ("controller", "allowed"), [("drakit.dev/operator", True), ("kubelet", False)]
)
def test_the_operators_token_can_write_events_only_in_the_operators_name(
    as_operator: Kubectl, controller: str, allowed: bool
):
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "admission", "namespace": "default"},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "type": "Warning",
        "reason": "Forged",
        "action": "Allocating",
        "reportingController": controller,
        "reportingInstance": "admission",
        "regarding": {"apiVersion": "v1", "kind": "Pod", "name": "a", "namespace": "default"},
    }

    def try_write() -> None:
        as_operator("create", "-f", "-", input=json.dumps(event))

    if allowed:
        try_write()
    else:
        with pytest.raises(CommandError, match=r"reportingController 'drakit[.]dev/operator'"):
            try_write()


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        pytest.param({"status": "Unknown", "reason": "Outdated"}, "", id="outdated"),
        pytest.param({"status": "True", "reason": "Registered"}, "only to the status", id="fine"),
    ],
)
async def test_the_operators_token_can_only_mark_a_report_as_outdated(
    release: Cluster, operator_kubeconfig: Path, status: Object, sentence: str
):
    found = release.get(crds.REPORTS)["items"][0]
    # kubectl reads the status before it patches it, which the operator does not need.
    path = resource_path(crds.API_VERSION, crds.REPORTS, name=found["metadata"]["name"])
    condition = {"type": "Registered", "lastTransitionTime": "2026-01-01T00:00:00Z", "message": ""}
    patch = {"status": {"conditions": [condition | status]}}
    refused = pytest.raises(ApiError, match=sentence) if sentence else nullcontext()
    async with await connect(operator_kubeconfig, user_agent="test") as session:
        with refused:
            await session.patch(f"{path}/status?dryRun=All", patch)
