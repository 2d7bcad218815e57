"""Two nodes: each plugin speaks for its own node, and can speak for no other."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.kit import DRIVER, NAMESPACE, holds_for, plugin_pod, published, slices, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.feature("devices")]

CONTROLLER = "drakit.dev/nodeplugin"
CRDS = Path(__file__).parents[1] / "crds"


def test_each_plugin_publishes_the_slices_of_its_own_node(release, zram):
    for node, own, foreign in zip(
        release.nodes[:2], (zram.first, zram.second), (zram.second, zram.first), strict=True
    ):
        names = published(release, node)
        assert all(any(name.endswith(disk) for name in names) for disk in own)
        assert not any(name.endswith(disk) for name in names for disk in foreign)
        (body,) = slices(release, node)
        (owner,) = body["metadata"]["ownerReferences"]
        uid = release.kubectl("get", "node", node, "-o", "jsonpath={.metadata.uid}").stdout
        assert (owner["kind"], owner["uid"]) == ("Node", uid)
        assert body["spec"]["pool"]["name"] == node


def test_a_deleted_slice_is_restored_and_an_untouched_one_is_not_written(release):
    first, second = release.nodes[:2]
    (gone,), (kept,) = slices(release, first), slices(release, second)
    release.kubectl("delete", "resourceslice", gone["metadata"]["name"])
    wait_for(
        "the slice to be back",
        lambda: {b["metadata"]["uid"] for b in slices(release, first)} - {gone["metadata"]["uid"]},
        seconds=5,
    )

    def untouched() -> bool:
        (body,) = slices(release, second)
        return body["metadata"]["resourceVersion"] == kept["metadata"]["resourceVersion"]

    # Longer than a rescan: without a change nothing is written.
    holds_for("the other slice stays as it is", untouched, seconds=12)


def token_of(release, node: str) -> str:
    """A token that is bound to the plugin's pod on a node, as the kubelet mounts one."""
    body = plugin_pod(release, node)
    assert body is not None
    return release.kubectl(
        "-n",
        NAMESPACE,
        "create",
        "token",
        "drakit-nodeplugin",
        "--bound-object-kind=Pod",
        f"--bound-object-name={body['metadata']['name']}",
        f"--bound-object-uid={body['metadata']['uid']}",
    ).stdout.strip()


@pytest.fixture
def as_first_node(release, tmp_path):
    """kubectl with the token of the first node's plugin."""
    config = json.loads(
        release.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json").stdout
    )
    config["users"] = [{"name": "plugin", "user": {"token": token_of(release, release.nodes[0])}}]
    config["contexts"][0]["context"]["user"] = "plugin"
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    path.chmod(0o600)

    def kubectl(*arguments: str, **options) -> str:
        return release.kubectl("--kubeconfig", str(path), *arguments, **options).stdout

    return kubectl


def refused(call, *arguments, **options) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (whatever the rig raises)
        call(*arguments, **options)
    return str(caught.value)


def test_a_token_of_one_nodes_plugin_cannot_write_the_others_slice(release, as_first_node):
    (own,), (foreign,) = (slices(release, node) for node in release.nodes[:2])

    # The plugin itself may write its slice meanwhile: no resourceVersion, no conflict.
    for body in (own, foreign):
        body["metadata"].pop("resourceVersion")
        body["metadata"]["annotations"] = {"drakit.dev/test": "written"}
    as_first_node("replace", "-f", "-", input=json.dumps(own))
    message = refused(as_first_node, "replace", "-f", "-", input=json.dumps(foreign))
    assert "of that node" in message
    name = foreign["metadata"]["name"]
    assert "of that node" in refused(as_first_node, "delete", "resourceslice", name)
    copied = copy.deepcopy(foreign)
    copied["metadata"] = {"name": f"00099-{DRIVER}-stolen"}
    message = refused(as_first_node, "create", "-f", "-", input=json.dumps(copied))
    assert "of that node" in message
    assert slices(release, release.nodes[1])


def slice_of(node: str, *, pool: str, driver: str = DRIVER) -> dict[str, Any]:
    """A slice without devices, from which the scheduler allocates nothing."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"00099-{driver}-test"},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
            "devices": [],
        },
    }


def try_create(call, body: dict[str, Any]) -> str:
    """Pass an object through admission without storing it."""
    return call("create", "--dry-run=server", "-f", "-", input=json.dumps(body))


def test_a_token_of_one_nodes_plugin_cannot_write_pools_of_other_nodes(release, as_first_node):
    first, second = release.nodes[:2]
    for pool in (first, f"{first}/cpus"):
        try_create(as_first_node, slice_of(first, pool=pool))
    for pool in (second, f"{second}/cpus", f"{first}0", "shared"):
        message = refused(try_create, as_first_node, slice_of(first, pool=pool))
        assert f"may only write ResourceSlices of pools '{first}' and '{first}/...'" in message


@pytest.fixture
def foreign_slice(release) -> Iterator[str]:
    """A slice of the first node that another driver has published."""
    node = release.nodes[0]
    body = slice_of(node, pool=node, driver="foreign.test")
    release.kubectl("create", "-f", "-", input=json.dumps(body))
    name = body["metadata"]["name"]
    yield name
    release.kubectl("delete", "resourceslice", name, "--ignore-not-found")


def tainted_device(name: str, *keys: str) -> dict[str, Any]:
    return {"name": name, "taints": [{"key": key, "effect": "NoSchedule"} for key in keys]}


def test_a_token_of_a_plugin_cannot_publish_devices_of_drivers_that_it_does_not_host(
    release, as_first_node, foreign_slice
):
    node = release.nodes[0]
    stopped = tainted_device("a", "foreign.test/a", "drakit.dev/stopped")
    created = slice_of(node, pool=node, driver="other.test")
    for created["spec"]["devices"] in ([], [stopped]):
        message = refused(try_create, as_first_node, created)
        assert f"drivers in the chart's values: {DRIVER}" in message
    body = slice_of(node, pool=node, driver="foreign.test")

    def replace(*devices: dict[str, Any]) -> str:
        body["spec"]["devices"] = [*devices]
        return as_first_node("replace", "-f", "-", input=json.dumps(body))

    for device in ({"name": "b"}, tainted_device("b", "foreign.test/drakit.dev")):
        assert "drivers in the chart's values" in refused(replace, stopped, device)
    # A driver that was removed from the values, which the plugin still hosts from its record.
    replace(stopped, tainted_device("b", "drakit.dev/unhealthy"))
    replace()
    as_first_node("delete", "resourceslice", foreign_slice)


@pytest.fixture
def reports(release) -> Iterator[None]:
    """The API server has NodeDeviceReports."""
    release.apply((CRDS / "nodedevicereports.yaml").read_text())
    crd = "crd/nodedevicereports.drakit.dev"
    release.kubectl("wait", "--for=condition=Established", crd, "--timeout=30s")
    yield
    release.kubectl("delete", crd)


@pytest.mark.usefixtures("reports")
def test_a_token_of_one_nodes_plugin_cannot_write_reports_of_others(release, as_first_node):
    first, second = release.nodes[:2]

    def report_of(node: str, name: str = "") -> str:
        return json.dumps(
            {
                "apiVersion": "drakit.dev/v1alpha1",
                "kind": "NodeDeviceReport",
                "metadata": {"name": name or f"{node}.test.drakit.dev"},
                "spec": {"nodeName": node, "driver": "test.drakit.dev"},
            }
        )

    own, foreign = (f"{node}.test.drakit.dev" for node in (first, second))
    as_first_node("create", "-f", "-", input=report_of(first))
    as_first_node("delete", "nodedevicereport", own)
    message = refused(as_first_node, "create", "-f", "-", input=report_of(second))
    assert "may only write NodeDeviceReports of that node" in message
    message = refused(as_first_node, "create", "-f", "-", input=report_of(first, foreign))
    assert "the name must have the form <nodeName>.<driver>" in message
    release.kubectl("create", "-f", "-", input=report_of(second))
    message = refused(as_first_node, "delete", "nodedevicereport", foreign)
    assert "may only write NodeDeviceReports of that node" in message


def event_of(node: str, *, controller: str = CONTROLLER, name: str = "admission") -> dict[str, Any]:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.test", "namespace": "default"},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "type": "Warning",
        "reason": "Test",
        "action": "Test",
        "note": "a test of the admission policy",
        "regarding": {"apiVersion": "v1", "kind": "Node", "name": node},
        "reportingController": controller,
        "reportingInstance": node,
    }


@pytest.fixture
def foreign_event(release) -> Iterator[str]:
    """An Event that the plugin of the second node has written."""
    body = event_of(release.nodes[1], name="foreign")
    release.kubectl("create", "-f", "-", input=json.dumps(body))
    yield body["metadata"]["name"]
    release.kubectl("delete", "events.events.k8s.io", body["metadata"]["name"])


def test_a_token_of_one_nodes_plugin_cannot_write_events_in_the_name_of_others(
    release, as_first_node, foreign_event
):
    first, second = release.nodes[:2]
    try_create(as_first_node, event_of(first))
    for body in (event_of(second), event_of(first, controller="kubelet")):
        message = refused(try_create, as_first_node, body)
        assert f"reportingController '{CONTROLLER}' and reportingInstance '{first}'" in message
    series = {"series": {"count": 9, "lastObservedTime": "2026-01-01T00:00:01.000000Z"}}
    patch = ("patch", "events.events.k8s.io", foreign_event, "--type=merge", "-p")
    message = refused(as_first_node, *patch, json.dumps(series))
    assert "may only write Events" in message


def test_the_plugin_may_do_no_more_than_it_needs(as_first_node):
    for verb, resource in (
        ("list", "secrets"),
        ("patch", "resourceclaims"),
        ("update", "resourceclaims/status"),
        ("create", "pods"),
        ("update", "nodes"),
    ):
        message = refused(as_first_node, "auth", "can-i", verb, resource, "-A")
        assert "no" in message.lower()
