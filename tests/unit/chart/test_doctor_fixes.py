"""The commands of Helm that `kubectl drakit doctor` prints end what it finds."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from tests.unit.chart.conftest import CHART
from tests.unit.kubectl.conftest import Run, Site

COLLECTIONS = {
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
}
NAMED = "renamed.example.com"


class Installed(Site):
    """A cluster whose releases Helm renders."""

    def install(self, helm, name, values, *options):
        """Install or upgrade a release; on node n1, its node plugin is ready."""
        space = f"{name}-system"
        done = helm(
            *("template", name, str(CHART), "--namespace", space, "--kube-version", "1.36.3"),
            *("--set", "image.repository=registry.example.com/drakit", *options),
            values=values,
        )
        assert done.returncode == 0, done.stderr
        self.uninstall(name)
        for body in yaml.safe_load_all(done.stdout):
            if body is None or body["kind"] not in COLLECTIONS:
                continue
            metadata = body["metadata"]
            metadata.setdefault("annotations", {})["meta.helm.sh/release-name"] = name
            body["status"] = {"desiredNumberScheduled": 1, "numberReady": 1, "readyReplicas": 1}
            self.store(f"{COLLECTIONS[body['kind']].format(space)}/{metadata['name']}", body)
            if body["kind"] == "DaemonSet":
                template = body["spec"]["template"]["metadata"]
                of_pod = {
                    "metadata": {**template, "labels": metadata["labels"]},
                    "spec": {"nodeName": "n1"},
                    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
                }
                self.store(f"/api/v1/namespaces/{space}/pods/{name}-n1", of_pod)

    def uninstall(self, name):
        for collection, namespace, of in [*self.cluster.objects]:
            if namespace == f"{name}-system":
                self.remove(f"{collection.replace('v1/', f'v1/namespaces/{namespace}/', 1)}/{of}")


@pytest.fixture
async def cluster():
    async with Installed() as server:
        assert isinstance(server, Installed)
        server.serve("v1")
        server.runs()
        server.node("n1")
        yield server


HOSTDEV = {"hostdev": {"enabled": True}}
NO_HOSTDEV = {"hostdev": {"enabled": False}}
NO_OPERATOR = {"operator": {"enabled": False}}
SIMULATED = {"simulated": {"enabled": True}} | NO_HOSTDEV
PLUGINS = {
    "devicePlugins": {"enabled": True, "driverName": "plugins.example.com", "directory": "/ONE"}
}
BACKENDS = {
    "backends": {
        "enabled": True,
        "directory": "/ONE",
        "allowed": {"gpu": {"driver": "gpu.example.com"}},
    }
}


def elsewhere(values):
    """The values with another directory."""
    return json.loads(json.dumps(values).replace("/ONE", "/two"))


def without_nulls(options, values):
    """Remove from the values what options set to null, as an upgrade that reuses values does."""
    left = []
    for option, setting in zip(options[::2], options[1::2], strict=True):
        key, _, value = setting.partition("=")
        if value != "null":
            left += [option, setting]
            continue
        *path, last = key.split(".")
        for part in path:
            values = values[part]
        del values[last]
    return left


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        pytest.param(HOSTDEV, HOSTDEV | NO_OPERATOR, "both run driver hostdev", id="hostdev-alone"),
        pytest.param(
            HOSTDEV | NO_OPERATOR, HOSTDEV, "both run driver hostdev", id="the-other-operates"
        ),
        pytest.param(
            HOSTDEV,
            SIMULATED | HOSTDEV | NO_OPERATOR,
            "both run driver hostdev",
            id="hostdev-beside-others",
        ),
        pytest.param(
            SIMULATED, SIMULATED | NO_OPERATOR, "both run driver simulated", id="simulated"
        ),
        pytest.param(
            PLUGINS | HOSTDEV,
            elsewhere(PLUGINS) | NO_HOSTDEV | NO_OPERATOR,
            "both run driver plugins.example.com",
            id="device-plugins",
        ),
        pytest.param(
            BACKENDS,
            elsewhere(BACKENDS) | NO_HOSTDEV | NO_OPERATOR,
            "both run driver gpu.example.com",
            id="backends",
        ),
        pytest.param(
            PLUGINS,
            PLUGINS | NO_HOSTDEV | NO_OPERATOR,
            "both use the directory /ONE",
            id="directory",
        ),
        pytest.param(HOSTDEV, SIMULATED, "both run an operator", id="operators"),
        pytest.param(
            SIMULATED, None, "uses the feature gate DRAConsumableCapacity", id="shared-devices"
        ),
        pytest.param(
            SIMULATED, None, "uses the feature gate DRAPartitionableDevices", id="partitions"
        ),
        pytest.param(
            SIMULATED
            | {"simulated": {"enabled": True, "config": {"nic": {"listAttributes": True}}}},
            None,
            "uses the feature gate DRAListTypeAttributes",
            id="lists",
        ),
        pytest.param(HOSTDEV, None, "uses the kubelet directory", id="kubelet-directory"),
    ],
)
async def test_the_printed_command_ends_the_finding(
    cluster, helm, capsys, tmp_path, first, second, text
):
    values = {"drakit": first} | ({"other": second} if second else {})
    for name, of in values.items():
        cluster.install(helm, name, of)
    if text.startswith("uses the feature gate"):
        cluster.runs(**{text.rpartition(" ")[2]: False})
    if text == "uses the kubelet directory":
        path = {"path": "/var/snap/kubelet/plugins_registry/"}
        spec = {"template": {"spec": {"volumes": [{"name": "r", "hostPath": path}]}}}
        cluster.store("/apis/apps/v1/namespaces/storage/daemonsets/csi", {"spec": spec})
    run = Run(cluster, capsys, tmp_path)

    async def found():
        _, body = await run.json("doctor")
        return [each for each in body["findings"] if text in each["finding"]]

    (finding,) = await found()
    fix = finding["fix"]
    for old, new in (("=NAME", f"={NAMED}"), ("=DIRECTORY", "=/three")):
        fix = fix.replace(old, new)
    words = shlex.split(fix[fix.index("helm ") :])
    verb, name = words[1:3]
    if verb == "uninstall":
        assert words[3:] == ["-n", f"{name}-system"]
        cluster.uninstall(name)
    else:
        assert words[3:7] == ["charts/drakit", "-n", f"{name}-system", "--reset-then-reuse-values"]
        options = without_nulls(words[7:], of := json.loads(json.dumps(values[name])))
        cluster.install(helm, name, of, *options)
    assert await found() == []
    _, body = await run.json("version")
    assert any(each["component"] == "operator" for each in body["releases"]), "one operates"
