"""
kubeconform checks the chart, the examples and the pages' manifests against Kubernetes' schemas.

The schemas are made from the OpenAPI documents in Kubernetes' Go module, of the oldest and of the
default minor release that the test clusters have. A field that a release does not know is an error.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.local import binaries
from tests.programs import needs_go
from tests.unit.chart.conftest import CHART
from tests.unit.chart.test_hardening import EGRESS, switched_on
from tests.unit.chart.test_platforms import FILES
from tests.unit.docs.listings import ROOT, documents
from tools.programs import go_programs

pytestmark = needs_go

MINORS = sorted({min(binaries.minors()), binaries.DEFAULT_MINOR})

FOREIGN = (
    "akri.sh/v0/Configuration",
    "argoproj.io/v1alpha1/Application",
    "cert-manager.io/v1/Certificate",
    "helm.toolkit.fluxcd.io/v2/HelmRelease",
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "security.openshift.io/v1/SecurityContextConstraints",
    "source.toolkit.fluxcd.io/v1/GitRepository",
)
"""Kinds of other projects, whose schemas are not in Kubernetes' module."""

Check = Callable[[list[tuple[str, dict[str, Any]]]], list[str]]


# ------------------------------------------------------------ schemas


def strict(schema: Any, found: set[str]) -> Any:
    """Return a schema of OpenAPI as a JSON schema that refuses unknown fields; `found` gets the
    names of the schemas to which it refers."""
    if isinstance(schema, list):
        return [strict(each, found) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            changed[key] = {name: strict(each, found) for name, each in value.items()}
        elif key == "$ref":
            name = value.rpartition("/")[2]
            found.add(name)
            changed[key] = f"#/definitions/{name}"
        else:
            changed[key] = value if key == "default" else strict(value, found)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        changed.setdefault("additionalProperties", False)
    return changed


def write_schema(folder: Path, gvk: dict[str, str], schema: dict[str, Any]) -> None:
    path = folder / (gvk["group"] or gvk["version"])
    path.mkdir(exist_ok=True)
    (path / f"{gvk['kind'].lower()}_{gvk['version']}.json").write_text(json.dumps(schema))


def write_schemas(module: Path, folder: Path) -> None:
    """Write the schemas of Kubernetes' kinds, and of drakit's."""
    for document in sorted((module / "api/openapi-spec/v3").glob("api*__v*_openapi.json")):
        known = json.loads(document.read_text())["components"]["schemas"]
        for name, body in known.items():
            kinds = body.get("x-kubernetes-group-version-kind", [])
            if len(kinds) != 1 or "properties" not in body:
                continue
            definitions: dict[str, Any] = {}
            found = {name}
            while missing := found - definitions.keys():
                for each in missing:
                    definitions[each] = strict(known[each], found)
            body = {**definitions[name], "definitions": definitions}
            write_schema(folder, kinds[0], body)
    for file in sorted((CHART / "crds").iterdir()):
        spec = yaml.safe_load(file.read_text())["spec"]
        for version in spec["versions"]:
            gvk = {
                "group": spec["group"],
                "version": version["name"],
                "kind": spec["names"]["kind"],
            }
            write_schema(folder, gvk, strict(version["schema"]["openAPIV3Schema"], set()))


@pytest.fixture(scope="session", params=MINORS)
def check(request, tmp_path_factory) -> Check:
    """Return the problems of manifests, each with the name of its source."""
    module = binaries.module_folder(binaries.module_file(request.param), "k8s.io/kubernetes")
    folder = tmp_path_factory.mktemp("schemas")
    write_schemas(module, folder)
    program = go_programs("kubeconform") / "kubeconform"

    def checked(manifests: list[tuple[str, dict[str, Any]]]) -> list[str]:
        files = tmp_path_factory.mktemp("manifests")
        for number, (_, body) in enumerate(manifests):
            (files / f"{number}.json").write_text(json.dumps(body))
        location = "{{.Group}}/{{.ResourceKind}}_{{.ResourceAPIVersion}}.json"
        options = ["-strict", "-output", "json", "-summary", "-skip", ",".join(FOREIGN)]
        done = subprocess.run(
            [program, *options, "-schema-location", f"{folder}/{location}", str(files)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        result = json.loads(done.stdout)
        assert sum(result["summary"].values()) == len(manifests), done.stderr
        return [
            f"{manifests[int(Path(each['filename']).stem)][0]}: {each['kind']}: {each['msg']}"
            for each in result["resources"] or []
        ]

    return checked


# ------------------------------------------------------------ manifests


def test_the_check_finds_what_an_api_server_would_drop_or_refuse(check):
    spec = {"containers": [{"name": "a", "image": "b", "ports": [{"containerPort": "http"}]}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}
    policy = {"apiVersion": "drakit.dev/v1beta1", "kind": "HostDevicePolicy", "metadata": {}}
    match = [{"subsystem": "tty"}]
    good = {"containers": [{"name": "a", "image": "b"}], "resourceClaims": [{"name": "c"}]}
    problems = check(
        [
            ("good", {**pod, "spec": good}),
            ("type", {**pod, "spec": spec}),
            ("field", {**pod, "spec": {**good, "hostDevices": []}}),
            ("kind", {**pod, "kind": "Container"}),
            ("ours", {**policy, "spec": {"match": match, "matches": match}}),
        ]
    )
    assert sorted(each.split(":")[0] for each in problems) == ["field", "kind", "ours", "type"]


@pytest.mark.parametrize("upgrade", [False, True], ids=["install", "upgrade"])
def test_the_chart_with_every_switch_on(check, render, values, upgrade):
    everything = switched_on(values)
    everything["nodeplugin"] |= {"kubeletStateDirectory": "/srv/kubelet", "bootIDFile": "/srv/id"}
    everything["networkPolicy"]["egress"]["apiServer"] = EGRESS["apiServer"]
    everything["operator"]["hostUsers"] = False
    everything["image"]["repository"] = "registry.example.com/drakit"
    for component in ("nodeplugin", "operator"):
        everything[component]["appArmorProfile"] = {"type": "RuntimeDefault"}
    everything["devicePlugins"]["plugins"] = {"things": {"resources": ["vendor.example/thing"]}}
    everything["backends"]["allowed"] = {"gpu": {"driver": "gpu.example.com"}}
    objects = render(everything, upgrade=upgrade)
    assert check([(body["metadata"]["name"], body) for body in objects]) == []


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in FILES])
def test_the_chart_with_the_values_of_a_platform(check, render, file):
    objects = render(yaml.safe_load(file.read_text()))
    assert check([(body["metadata"]["name"], body) for body in objects]) == []


def manifests_of(path: Path) -> list[tuple[str, dict[str, Any]]]:
    bodies = yaml.safe_load_all(path.read_text())
    return [(str(path.relative_to(ROOT)), body) for body in bodies if is_manifest(body)]


def is_manifest(body: Any) -> bool:
    return isinstance(body, dict) and {"apiVersion", "kind"} <= body.keys()


def test_the_definitions_and_the_examples(check):
    files = [*(CHART / "crds").iterdir(), *(ROOT / "examples").rglob("*.yaml")]
    plain = [file for file in sorted(files) if "templates" not in file.parts]
    manifests = [each for file in plain for each in manifests_of(file)]
    assert {"CustomResourceDefinition", "Pod"} <= {body["kind"] for _, body in manifests}
    assert check(manifests) == []


@pytest.mark.parametrize("name", ["nvidia", "sensor"])
def test_the_chart_of_an_example(check, helm, name):
    values = {"image": {"repository": "registry.example.com/example"}}
    done = helm("template", name, str(ROOT / "examples" / name / "chart"), values=values)
    assert done.returncode == 0, done.stderr
    objects = [body for body in yaml.safe_load_all(done.stdout) if body]
    assert "DaemonSet" in {body["kind"] for body in objects}
    assert check([(body["metadata"]["name"], body) for body in objects]) == []


def test_the_manifests_of_the_pages(check):
    manifests = [(name, body) for name, body in documents() if is_manifest(body)]
    assert len(manifests) > 50
    assert check(manifests) == []
