"""A cluster in memory, and the command as a user runs it against it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from drakit.testing.cluster import StatusError, merge
from drakit_cli.kubectl.main import main
from drakit_explain.cel.gates import DEFAULT_GATES
from drakit_formats import crds
from e2e.images.go import CEL_MINORS, cel_programs
from tests.fakes.objects import Objects
from tests.programs import WITHOUT_GO

DRIVER = Objects.driver


class Site(Objects):
    """A cluster as a user sees it."""

    denied: tuple[str, ...] = ()
    """Accounts, verbs and resources or paths that reviews deny, as in ``NAME list nodes``; the user
    is ``me``."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """Also answer reviews, which store nothing."""
        if "accessreviews" not in request.path:
            return await super()._handle(request)
        try:
            await self._stumble(request)
        except StatusError as error:
            return web.json_response(error.body, status=error.code)
        spec = (await request.json())["spec"]
        asked = spec.get("resourceAttributes") or spec["nonResourceAttributes"]
        account = spec.get("user", "me").rpartition(":")[2]
        of = asked.get("path") or "/".join(filter(None, (asked["resource"], asked["subresource"])))
        allowed = f"{account} {asked['verb']} {of}" not in self.denied
        return web.json_response({"spec": spec, "status": {"allowed": allowed}}, status=201)

    def runs(self, kubernetes: str = "v1.36.3", **gates: bool) -> None:
        """Set what the API server reports about itself."""
        minor = ".".join(kubernetes.removeprefix("v").split(".")[:2])
        defaults = dict.fromkeys(DEFAULT_GATES.get(minor, ()), True)
        self.texts["/version"] = json.dumps({"gitVersion": kubernetes})
        self.texts["/metrics"] = _metrics(defaults | gates)

    def kubelet(self, node: str, **gates: bool) -> None:
        """Set what a kubelet reports about itself."""
        self.texts[f"/api/v1/nodes/{node}/proxy/metrics"] = _metrics(gates)

    def control_plane(self, component: str, *flags: str, version: str = "1.36.3") -> None:
        """A pod of the control plane, as kubeadm makes one."""
        image = f"registry.k8s.io/{component}:v{version}"
        container = {"name": component, "image": image, "command": [component, *flags]}
        self.store(
            f"/api/v1/namespaces/kube-system/pods/{component}-cp",
            {
                "metadata": {"labels": {"component": component, "tier": "control-plane"}},
                "spec": {"containers": [container]},
            },
        )

    def serve(self, version: str) -> None:
        self.version = version
        self.served = {"resource.k8s.io": [version], "drakit.dev": ["v1beta1"]}

    def change(self, path: str, change: dict) -> None:
        """Change an object, status included, by a merge patch."""
        self.store(path, merge(self.object(path), change))

    def report(
        self, node: str, *, state: str = "Registered", driver: str = "", **said: str
    ) -> None:
        """The report of a driver on a node; `said` has its words about unhealthy devices."""
        driver = driver or self.driver
        unhealthy = [{"pool": node, "device": name, "message": text} for name, text in said.items()]
        registered = "True" if state == "Registered" else "False"
        condition = {"type": "Registered", "status": registered, "reason": state}
        status = {"conditions": [condition], "unhealthyDevices": unhealthy}
        self.store(
            f"/apis/{crds.API_VERSION}/nodedevicereports/{node}.{driver}",
            {"spec": {"nodeName": node, "driver": driver}, "status": status},
        )

    def policy(self, name: str, device_class: str = "", **status: object) -> None:
        """A HostDevicePolicy, with its name as UID; it owns a class."""
        path = f"/apis/{crds.API_VERSION}/hostdevicepolicies/{name}"
        self.store(path, {"metadata": {"uid": name}, "spec": {}, "status": status})
        if device_class:
            owner = {"kind": "HostDevicePolicy", "name": name, "uid": name, "controller": True}
            path = f"/apis/resource.k8s.io/v1/deviceclasses/{device_class}"
            self.change(path, {"metadata": {"ownerReferences": [owner]}})

    def forbid(self, path: str) -> None:
        self.fail("*", path, status=403, reason="Forbidden", message="no", times=1000)

    def release(
        self,
        name: str = "drakit",
        *nodes: str,
        ready: bool = True,
        version: str = "0.1.0",
        root: str = "/var/lib/kubelet",
        operator: int = 1,
        driver_taints: bool = False,
        **nodeplugin: object,
    ) -> None:
        """
        Install a release, with its node plugin on these nodes.

        :param operator: replicas of the operator; with 0, there is none.
        :param nodeplugin: what its configuration has, such as `drivers`.
        """
        space = f"/namespaces/{name}-system"
        registry = {"name": "registry", "hostPath": {"path": f"{root}/plugins_registry"}}
        spec = {"serviceAccountName": f"{name}-nodeplugin", "volumes": [registry]}
        status = {"desiredNumberScheduled": len(nodes), "numberReady": len(nodes) * ready}
        self.store(
            f"/apis/apps/v1{space}/daemonsets/{name}-nodeplugin",
            {
                "metadata": labels(name, "nodeplugin", version),
                "spec": {"template": {"spec": spec}},
                "status": status,
            },
        )
        self.store(
            f"/api/v1{space}/configmaps/{name}-nodeplugin",
            {
                "metadata": labels(name, "nodeplugin", version),
                "data": {"nodeplugin.yaml": yaml.safe_dump(nodeplugin)},
            },
        )
        for node in nodes:
            condition = {"type": "Ready", "status": str(ready)}
            self.store(
                f"/api/v1{space}/pods/{name}-{node}",
                {
                    "metadata": labels(name, "nodeplugin", version),
                    "spec": {"nodeName": node},
                    "status": {"conditions": [condition]},
                },
            )
        if operator:
            spec = {"serviceAccountName": f"{name}-operator"}
            self.store(
                f"/apis/apps/v1{space}/deployments/{name}-operator",
                {
                    "metadata": labels(name, "operator", version),
                    "spec": {"replicas": operator, "template": {"spec": spec}},
                    "status": {"readyReplicas": operator},
                },
            )
            settings = {
                "election": {"leaseName": f"{name}-operator"},
                "driverTaints": driver_taints,
            }
            self.store(
                f"/api/v1{space}/configmaps/{name}-operator",
                {
                    "metadata": labels(name, "operator", version),
                    "data": {"operator.yaml": yaml.safe_dump(settings)},
                },
            )


def _metrics(gates: dict[str, bool]) -> str:
    name = "kubernetes_feature_enabled"
    return "".join(
        f'{name}{{name="{gate}",stage="BETA"}} {on:d}\n'
        for gate, on in {"APIServerTracing": True, **gates}.items()
    )


def labels(release: str, component: str, version: str) -> dict:
    return {
        "labels": {
            "app.kubernetes.io/part-of": "drakit",
            "app.kubernetes.io/instance": release,
            "app.kubernetes.io/component": component,
            "app.kubernetes.io/version": version,
        },
        "annotations": {"meta.helm.sh/release-name": release},
    }


class Run:
    """The command, which runs in a thread while the server runs."""

    def __init__(self, site: Site, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._site = site
        self._capsys = capsys
        self._folder = folder
        self._out = ""

    async def until_said(self, words: str) -> None:
        """Wait until a command that goes on has written these words."""
        async with asyncio.timeout(60):
            while words not in self._out:
                await asyncio.sleep(0.02)
                self._out += self._capsys.readouterr().out

    async def __call__(self, *arguments: str) -> tuple[int, str, str]:
        kubeconfig = self._site.write_kubeconfig(self._folder)
        given = ["--kubeconfig", str(kubeconfig), "-n", "lab"]
        code = await asyncio.to_thread(main, [arguments[0], *given, *arguments[1:]])
        out, error = self._capsys.readouterr()
        said, self._out = self._out, ""
        return code, said + out, error

    async def json(self, *arguments: str) -> tuple[int, dict]:
        code, out, error = await self(*arguments, "-o", "json")
        assert error == ""
        return code, json.loads(out)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test builds the programs, if no earlier run has."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def programs() -> Path | None:
    """The folder with the allocator of each release of Kubernetes; None without Go."""
    return None if WITHOUT_GO else cel_programs()


@pytest.fixture(autouse=True)
def plugin(
    request: pytest.FixtureRequest, programs: Path | None, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether the plugin has the programs, as each documented installation; with the parameter
    False, selectors are evaluated by the Python library, and nothing decides whether claims fit."""
    installed = bool(getattr(request, "param", True))
    if not installed:
        monkeypatch.delenv("DRAKIT_CEL", raising=False)
        monkeypatch.setattr("drakit_explain.cel.find_helper", lambda *_: None)
    elif programs is None:
        pytest.skip(WITHOUT_GO)
    else:
        monkeypatch.setenv("DRAKIT_CEL", str(programs / f"drakit-cel-{CEL_MINORS[-1]}"))
    return installed


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site() as server:
        assert isinstance(server, Site)
        server.serve("v1")
        server.runs()
        yield server


@pytest.fixture
def two(site: Site) -> Site:
    """Two nodes with a device each; a claim has the one of n1, and n2 is cordoned."""
    for name, spec in (("n1", {}), ("n2", {"unschedulable": True})):
        site.node(name, **spec)
        site.slice(f"s-{name}", "gpu-0", node=name)
    site.device_class("gpu")
    site.claim("other", device="gpu-0", pod="holder", namespace="elsewhere")
    site.template("gpus")
    return site


@pytest.fixture
def run(site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    return Run(site, capsys, tmp_path)
