"""Two nodes: each plugin can write only for its own node."""

from __future__ import annotations

import base64
import copy
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drakit_formats import crds
from drakit_nodeplugin.slices.plan import PoolIdentity, slice_name
from e2e.kit import (
    DRIVER,
    admin_config,
    holds_for,
    published,
    slices,
    token_of,
    wait_for,
    write_kubeconfig,
)
from tests.unit.chart.slice_writes import ALLOWED, DEVICES, REFUSED, tainted

pytestmark = [pytest.mark.e2e, pytest.mark.feature("devices")]

CONTROLLER = "drakit.dev/nodeplugin"
CRDS = Path(__file__).parents[1] / "charts/drakit/crds"


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


@pytest.fixture
def as_first_node(release, tmp_path):
    """Run kubectl with the token of the first node's plugin."""
    path = tmp_path / "kubeconfig"
    write_kubeconfig(release, path, token=token_of(release, release.nodes[0]))

    def kubectl(*arguments: str, **options) -> str:
        return release.kubectl("--kubeconfig", str(path), *arguments, **options).stdout

    return kubectl


def refused(call, *arguments, **options) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (whatever the rig raises)
        call(*arguments, **options)
    return str(caught.value)


def slice_of(node: str, *, pool: str, driver: str = DRIVER) -> dict[str, Any]:
    """Return a slice without devices, from which the scheduler cannot allocate."""
    identity = PoolIdentity(driver=driver, node=node, node_uid="", pool=pool)
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": slice_name(identity, 0x99)},
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
    body["spec"]["devices"] = DEVICES
    release.kubectl("create", "-f", "-", input=json.dumps(body))
    name = body["metadata"]["name"]
    yield name
    release.kubectl("delete", "resourceslice", name, "--ignore-not-found")


FORGED = f"drivers in the chart's values: {DRIVER}"


def test_a_token_of_a_plugin_cannot_publish_devices_of_drivers_that_it_does_not_host(
    release, as_first_node, foreign_slice
):
    node = release.nodes[0]
    body = slice_of(node, pool=node, driver="foreign.test")

    def replace(devices: list[dict[str, Any]]) -> str:
        body["spec"]["devices"] = devices
        return as_first_node("replace", "--dry-run=server", "-f", "-", input=json.dumps(body))

    for param in REFUSED:
        (devices,) = param.values
        message = refused(replace, devices)
        if "effect: Unsupported value" in message:
            # Kubernetes 1.34 does not have the effect None, and validates before policies do.
            assert param.id == "a-taint-without-an-effect"
            continue
        assert FORGED in message, param.id
        created = slice_of(node, pool=node, driver="other.test")
        created["spec"]["devices"] = devices
        assert FORGED in refused(try_create, as_first_node, created), param.id
    # A driver that was removed from the values, but that the plugin still hosts because of its
    # record.
    for param in ALLOWED:
        replace(*param.values)
    as_first_node("delete", "resourceslice", foreign_slice)


@pytest.mark.usefixtures("foreign_slice")
def test_admission_of_the_largest_slice_of_a_foreign_driver_is_within_the_cost_limit(
    release, as_first_node
):
    body = slice_of(release.nodes[0], pool=release.nodes[0], driver="foreign.test")
    attributes = {f"a{n}": {"string": "x" * 64} for n in range(32)}
    names = [f"{n:03}".rjust(63, "d") for n in range(128)]
    body["spec"]["devices"] = [{"name": name, "attributes": attributes} for name in names]
    release.kubectl("replace", "-f", "-", input=json.dumps(body))
    # A slice with taints has 64 devices at most.
    body["spec"]["devices"] = tainted(*body["spec"]["devices"][64:])
    as_first_node("replace", "-f", "-", input=json.dumps(body))
    body["spec"]["devices"][-1]["name"] = "invented"
    assert FORGED in refused(as_first_node, "replace", "-f", "-", input=json.dumps(body))


@pytest.fixture
def reports(release) -> None:
    """Ensure that the API server has NodeDeviceReports, which later tests also read."""
    release.apply((CRDS / "nodedevicereports.yaml").read_text())
    crd = "crd/nodedevicereports.drakit.dev"
    release.kubectl("wait", "--for=condition=Established", crd, "--timeout=30s")


@pytest.mark.usefixtures("reports")
def test_a_report_of_a_plugin_is_named_after_its_node_and_driver(release, as_first_node):
    first, second = release.nodes[:2]

    def report_of(node: str, *, driver: str = DRIVER, name: str = "") -> dict[str, Any]:
        return {
            "apiVersion": crds.API_VERSION,
            "kind": "NodeDeviceReport",
            "metadata": {"name": name or f"{node}.{driver}"},
            "spec": {"nodeName": node, "driver": driver},
        }

    message = refused(try_create, as_first_node, report_of(second))
    assert "may only write NodeDeviceReports of that node" in message
    message = refused(try_create, as_first_node, report_of(first, name=f"{second}.{DRIVER}"))
    assert "the name must have the form <nodeName>.<driver>" in message
    message = refused(try_create, as_first_node, report_of(first, driver="test.drakit.dev"))
    assert f"may only create NodeDeviceReports of the {FORGED}" in message


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


# ------------------------------------------------------------ every verb in every served version


class ApiClient:
    """Requests to the API server with one token."""

    def __init__(self, release, token: str) -> None:
        cluster = admin_config(release)["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._server = cluster["server"]
        self._tls = ssl.create_default_context(cadata=authority)
        self._token = token

    def ask(
        self, method: str, path: str, body: Any = None, *, content: str = "application/json"
    ) -> tuple[int, str]:
        """Send a request, and return the status and the content of the response."""
        request = urllib.request.Request(
            self._server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": content},
        )
        try:
            with urllib.request.urlopen(request, context=self._tls, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@dataclass(frozen=True)
class Target:
    """An object of the other node, and the verbs that RBAC grants on objects of its kind."""

    collection: str
    """The path of its collection in one API version."""

    body: dict[str, Any]
    may_read: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        return f"{self.collection}/{self.body['metadata']['name']}"

    def attempts(self, client: ApiClient) -> Iterator[tuple[str, int, str]]:
        """Try every verb, and yield it with the status and the content of the response."""
        metadata = {**self.body["metadata"], "annotations": {"drakit.dev/stolen": "true"}}
        for key in ("resourceVersion", "uid", "managedFields", "creationTimestamp"):
            metadata.pop(key, None)
        body = {**self.body, "metadata": metadata}
        merge = {"metadata": {"annotations": metadata["annotations"]}}
        test = [{"op": "test", "path": "/kind", "value": body["kind"]}]
        patches: dict[str, Any] = {
            "application/merge-patch+json": merge,
            "application/json-patch+json": test,
            "application/apply-patch+yaml": body,
        }
        yield "get", *client.ask("GET", self.path)
        yield "list", *client.ask("GET", self.collection)
        yield "watch", *client.ask("GET", f"{self.collection}?watch=1&timeoutSeconds=1")
        new = copy.deepcopy(body)
        new["metadata"]["name"] += "0"
        if body["kind"] == "NodeDeviceReport":
            new["spec"]["driver"] += "0"  # the name of a report ends with its driver
        yield "create", *client.ask("POST", self.collection, new)
        yield "create", *client.ask("POST", self.collection, body)
        for path in (self.path, f"{self.path}/status"):
            yield "update", *client.ask("PUT", path, body)
            for content, patch in patches.items():
                query = "?fieldManager=test&force=true" if "apply" in content else ""
                yield "patch", *client.ask("PATCH", path + query, patch, content=content)
        yield "deletecollection", *client.ask("DELETE", self.collection)
        yield "delete", *client.ask("DELETE", self.path)


def served(release, group: str, resource: str) -> list[str]:
    """Return the versions of a group that have a resource."""
    versions = [each["groupVersion"] for each in raw(release, f"/apis/{group}")["versions"]]
    listed = {version: raw(release, f"/apis/{version}")["resources"] for version in versions}
    return [v for v in versions if any(each["name"] == resource for each in listed[v])]


def raw(release, path: str) -> dict[str, Any]:
    return json.loads(release.kubectl("get", "--raw", path).stdout)


@pytest.fixture
def other_nodes(release, reports) -> Iterator[dict[str, list[Target]]]:
    """The slices, a report and an Event of each node, in all versions, keyed by node."""
    found: dict[str, list[Target]] = {}
    made: list[tuple[str, str]] = []
    for node in release.nodes[:2]:
        report = f"{node}.tokens.test.drakit.dev"
        spec = {"nodeName": node, "driver": "tokens.test.drakit.dev"}
        kind = {"apiVersion": crds.API_VERSION, "kind": "NodeDeviceReport"}
        bodies = [
            {**kind, "metadata": {"name": report}, "spec": spec},
            event_of(node, name=f"tokens-{node}"),
        ]
        release.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies}))
        event = bodies[1]["metadata"]["name"]
        made += [("nodedevicereports", report), ("events.events.k8s.io", event)]
        (own,) = slices(release, node)
        objects = (
            ("resource.k8s.io", "resourceslices", "", own["metadata"]["name"], "get list watch"),
            ("drakit.dev", "nodedevicereports", "", report, "get"),
            ("events.k8s.io", "events", "namespaces/default/", event, "get"),
        )
        targets = found[node] = []
        for group, resource, prefix, name, verbs in objects:
            for version in served(release, group, resource):
                collection = f"/apis/{version}/{prefix}{resource}"
                body = raw(release, f"{collection}/{name}")
                targets.append(Target(collection, body, frozenset(verbs.split())))
        collection = "/api/v1/namespaces/default/events"
        targets.append(Target(collection, raw(release, f"{collection}/{event}")))
    yield found
    for resource, name in made:
        release.kubectl("delete", resource, name, "--ignore-not-found")


@pytest.mark.parametrize(("own", "other"), [(0, 1), (1, 0)], ids=["first", "second"])
def test_no_verb_changes_an_object_of_the_other_node_in_any_version(
    release, other_nodes, own: int, other: int
):
    client = ApiClient(release, token_of(release, release.nodes[own]))
    targets = other_nodes[release.nodes[other]]
    versions = {target.collection.split("/")[3] for target in targets}
    assert {"v1", "v1beta1", "v1beta2"} <= versions, "more than one version is served"
    for target in targets:
        for verb, status, answer in target.attempts(client):
            expected = 200 if verb in target.may_read else 403
            assert status == expected, f"{verb} {target.path}: {status} {answer[:1000]}"
        after = raw(release, target.path)
        assert after["metadata"]["uid"] == target.body["metadata"]["uid"]
        assert "drakit.dev/stolen" not in after["metadata"].get("annotations", {})


@pytest.mark.parametrize("own", [0, 1], ids=["first", "second"])
def test_a_token_of_one_nodes_plugin_writes_the_status_of_its_own_reports(
    release, other_nodes, own: int
):
    client = ApiClient(release, token_of(release, release.nodes[own]))
    for number, node in enumerate(release.nodes[:2]):
        (target,) = (each for each in other_nodes[node] if each.body["kind"] == "NodeDeviceReport")
        body = {
            "apiVersion": crds.API_VERSION,
            "kind": "NodeDeviceReport",
            "metadata": {"name": target.body["metadata"]["name"]},
            "status": {"lastUpdateTime": "2026-01-01T00:00:00Z", "devices": {"free": 5}},
        }
        path = f"{target.path}/status?fieldManager=test&force=true"
        status, answer = client.ask("PATCH", path, body, content="application/apply-patch+yaml")
        after = raw(release, target.path)
        if number == own:
            assert status == 200, answer
            assert after["status"]["devices"] == {"free": 5}
            assert after["spec"] == target.body["spec"]
        else:
            assert status == 403, answer
            assert "may only write NodeDeviceReports of that node" in answer
            assert "status" not in after


def names_of_slices(node: str, *pools: str) -> list[str]:
    """Return names that a node's plugin uses for its pools, including random names."""
    identities = [
        PoolIdentity(driver=DRIVER, node=node, node_uid="", pool=pool, secret=secret)
        for pool in pools
        for secret in (b"", b"random")
    ]
    return [slice_name(identity, index) for identity in identities for index in (0, 1)]


@pytest.mark.parametrize(("own", "other"), [(0, 1), (1, 0)], ids=["first", "second"])
def test_a_token_of_one_nodes_plugin_cannot_take_names_of_the_others_slices(
    release, own: int, other: int
):
    node, victim = release.nodes[own], release.nodes[other]
    client = ApiClient(release, token_of(release, node))

    # The names of its slices truncate it.
    long = "/".join([node, *["p" * 60] * 4])[:253].rstrip("/")
    for version in served(release, "resource.k8s.io", "resourceslices"):

        def create(name: dict[str, str], *, pool: str = node) -> tuple[int, str]:
            body = {**slice_of(node, pool=pool), "apiVersion": version, "metadata": name}  # noqa: B023
            return client.ask("POST", f"/apis/{version}/resourceslices?dryRun=All", body)  # noqa: B023

        for name in names_of_slices(victim, victim, f"{victim}/cpus"):
            status, answer = create({"name": name})
            assert status == 403, f"{name}: {answer}"
            assert "must contain its driver and pool" in answer
        assert create({"generateName": f"00001-{DRIVER}-{victim}-"})[0] == 403
        for pool in (node, f"{node}/cpus", long):
            for name in names_of_slices(node, pool):
                status, answer = create({"name": name}, pool=pool)
                # Admission allowed the request, but the name already exists.
                assert status in {201, 409}, f"{name}: {answer}"


@pytest.fixture
def squatter(release) -> Iterator[str]:
    """A slice of the first node with the name of the second node's slice, which is deleted."""
    first, second = release.nodes[:2]
    identity = PoolIdentity(driver=DRIVER, node=second, node_uid="", pool=second)
    name = slice_name(identity, 0)
    body = slice_of(first, pool=first, driver="squatter.test")
    body["metadata"] = {"name": name}
    text = json.dumps(body)
    for _ in range(5):  # the plugin restores its slice within 0.3 s
        release.kubectl("replace", "--force", "-f", "-", input=text, check=False)
        if (
            raw(release, f"/apis/resource.k8s.io/v1/resourceslices/{name}")["spec"]["driver"]
            != DRIVER
        ):
            break
    yield name
    release.kubectl("delete", "resourceslice", name, "--ignore-not-found")


def test_a_slice_whose_name_is_taken_is_published_under_another_name(release, zram, squatter):
    first, second = release.nodes[:2]
    assert raw(release, f"/apis/resource.k8s.io/v1/resourceslices/{squatter}")["spec"][
        "driver"
    ] == ("squatter.test"), "an administrator's client bypasses the policy"
    (body,) = wait_for("the slice to be published", lambda: slices(release, second), seconds=10)
    index, random, rest = body["metadata"]["name"].split("-", 2)
    assert f"{index}-{rest}" == squatter
    assert len(random) == 16
    assert body["spec"]["pool"]["name"] == second
    names = published(release, second)
    assert all(any(name.endswith(disk) for name in names) for disk in zram.second)

    def note() -> str | None:
        selector = f"involvedObject.name={second},reason=SliceNameTaken"
        items = release.get("events", "-n", "default", f"--field-selector={selector}")["items"]
        return next((item["message"] for item in items if squatter in item["message"]), None)

    message = wait_for("an Event that names the squatter", note, seconds=10)
    assert f"already exists (driver squatter.test, pool {first}, node {first})" in message
    token = ApiClient(release, token_of(release, first))
    for path in (squatter, body["metadata"]["name"]):
        status, _ = token.ask("DELETE", f"/apis/resource.k8s.io/v1/resourceslices/{path}")
        assert status == (200 if path == squatter else 403)
    release.kubectl("delete", "resourceslice", squatter, "--ignore-not-found")

    def untouched() -> bool:
        return [each["metadata"]["uid"] for each in slices(release, second)] == [
            body["metadata"]["uid"]
        ]

    holds_for("the slice keeps its name", untouched, seconds=5)
