"""
kubeconform checks the chart, the examples and the pages' manifests against Kubernetes' schemas.

The schemas are made from the OpenAPI documents in Kubernetes' Go module, of the oldest and of the
default minor release that the test clusters have. A field that a release does not know is an error.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from drakit_cli.new import CONTAINER, PLUGIN, project_of
from drakit_cli.new import render as render_project
from e2e.cluster.local import binaries
from tests.programs import needs_go
from tests.unit.chart.conftest import CHART
from tests.unit.chart.test_hardening import EGRESS, switched_on
from tests.unit.chart.test_platforms import FILES
from tests.unit.cli.projects import DEVICE_DRIVER, write
from tests.unit.docs.listings import (
    PAGES,
    ROOT,
    blocks,
    documents,
    is_manifest,
    is_values,
    merged,
)
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

Manifests = list[tuple[str, dict[str, Any]]]
"""Objects, each with the name of its source."""

Check = Callable[[Manifests], list[str]]


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

    def checked(manifests: Manifests) -> list[str]:
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


def manifests_of(path: Path) -> Manifests:
    bodies = yaml.safe_load_all(path.read_text())
    return [(str(path.relative_to(ROOT)), body) for body in bodies if is_manifest(body)]


def test_the_definitions_and_the_examples(check):
    files = [*(CHART / "crds").iterdir(), *(ROOT / "examples").rglob("*.yaml")]
    plain = [file for file in sorted(files) if "templates" not in file.parts]
    manifests = [each for file in plain for each in manifests_of(file)]
    assert {"CustomResourceDefinition", "Pod"} <= {body["kind"] for _, body in manifests}
    assert check(manifests) == []


# ------------------------------------------------------------ pages


def test_the_manifests_of_the_pages(check):
    manifests = [(name, body) for name, body in documents() if is_manifest(body)]
    assert len(manifests) > 50
    assert check(manifests) == []


def test_each_yaml_document_of_the_pages_is_checked():
    """A values block with a misspelt key at its top is neither a manifest nor values."""
    others = {name for name, body in documents() if not is_manifest(body) and not is_values(body)}
    assert others == OTHERS.keys()


OTHERS = {
    "docs/admin/device-plugins.md-the volume in daemonset.yaml": "test_the_volume_of_a_page",
    "docs/admin/migrate.md": "the configuration of another project",
    "docs/admin/migrate.md-one-node.yaml": "test_the_patch_of_a_page",
    "docs/admin/monitor.md-scrape.yaml": "test_admin_pages.py",
    "docs/admin/platforms.md-machine.yaml": "test_platforms.py",
    "docs/reference/device-health.md": "test_health_page.py",
    "docs/vendors/backend.md-entry.yaml": "test_backends_page.py",
    "docs/vendors/conformance.md-blinkers.yaml": "test_conformance_page.py",
    "docs/vendors/conformance.md-lamps.yaml": "test_conformance_page.py",
    "docs/vendors/conformance.md-sample.yaml": "test_conformance_page.py",
    "docs/vendors/driver-contract.md-capacity.yaml": "test_docs.py",
    "docs/vendors/packaging.md-lamps-chart/Chart.yaml": "test_the_chart_of_the_page",
    "docs/vendors/packaging.md-lamps-chart/values.yaml": "test_the_chart_of_the_page",
}
"""The documents that are neither manifests nor values of drakit's chart, and what checks them."""


def test_the_volume_of_a_page(check):
    (volumes,) = [body for name, body in documents() if name.endswith("volume in daemonset.yaml")]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}
    spec = {"containers": [{"name": "a", "image": "b"}], "volumes": volumes}
    assert check([("volume", {**pod, "spec": spec})]) == []


def test_the_patch_of_a_page(check):
    (patch,) = [body for name, body in documents() if name.endswith("-one-node.yaml")]
    (policy,) = [
        body
        for name, body in documents()
        if name.startswith("docs/admin/migrate.md")
        and is_manifest(body)
        and (body["kind"], body["metadata"]["name"]) == ("HostDevicePolicy", "net-tun")
    ]
    assert check([("patch", {**policy, "spec": {**policy["spec"], **patch["spec"]}})]) == []


# ------------------------------------------------------------ charts


@pytest.fixture(scope="session")
def rendered(helm) -> Callable[..., Manifests]:
    """Render a chart with values; return the objects, each with the name of the values' source."""

    def render_chart(
        chart: Path, values: dict[str, Any], *arguments: str, source: str
    ) -> Manifests:
        # A page may leave out the image, because another page has it.
        image = {"repository": "registry.example.com/example"} | values.get("image", {})
        given = ("template", "example", str(chart), "--kube-version", "1.36.3", *arguments)
        done = helm(*given, values={**values, "image": image})
        assert done.returncode == 0, f"{source}: {done.stderr}"
        objects = [body for body in yaml.safe_load_all(done.stdout) if body]
        assert objects
        return [(f"{source}: {body['metadata']['name']}", body) for body in objects]

    return render_chart


@pytest.fixture(scope="session")
def objects_of_values(rendered) -> Manifests:
    """The chart with each values block of the pages, and with the examples' values."""
    files = sorted((ROOT / "examples").glob("*/values.yaml"))
    given = [
        *((name, body) for name, body in documents() if is_values(body)),
        *((str(path.relative_to(ROOT)), yaml.safe_load(path.read_text())) for path in files),
        *examples_of_values(),
    ]
    assert len(given) > 20
    return [each for name, values in given for each in rendered(CHART, values, source=name)]


def examples_of_values() -> Iterator[tuple[str, dict[str, Any]]]:
    """The examples in the comments of the values, such as an entry of `backends.allowed`."""
    text = (CHART / "values.yaml").read_text()
    found = list(re.finditer(r"^((?:  #   +\S.*\n)+)(?:  # .*\n)*  (\w+): \{\}", text, re.M))
    assert found
    for example in found:
        *_, section = re.findall(r"^(\w+):", text[: example.start()], re.M)
        body = yaml.safe_load(re.sub(r"^  # ", "", example[1], flags=re.M))
        yield f"{section}.{example[2]}", {section: {"enabled": True, example[2]: body}}


@pytest.mark.timeout(180)  # many charts are rendered
def test_the_chart_with_the_values_of_the_pages(check, objects_of_values):
    assert check(objects_of_values) == []


def installations() -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Yield each command of the pages that installs or upgrades drakit's chart: where it is, the
    values in its files, and its arguments with values."""
    project = project_of("lamps", driver=None, image=None, drakit="0.1.0")
    written = {**render_project(project, CONTAINER), **render_project(project, PLUGIN)}
    for page in PAGES:
        titled = {
            title[1]: text
            for _, options, text in blocks(page)
            if (title := re.search(r'title="([^"]+)"', options))
        }
        # Also those of indented blocks, and those that run and are not shown.
        text = re.sub(r" *\\\n *", " ", (ROOT / page).read_text())
        for command in re.findall(
            r"^ *(helm (?:install|upgrade|template) .*charts/drakit\b.*)", text, re.M
        ):
            # The shell's variables hold names, such as that of an image.
            words = shlex.split(re.sub(r"\$(?!DRAKIT\b)\w+", "x", command))
            values: dict[str, Any] = {}
            arguments: list[str] = []
            for option, value in pairwise(words):
                # Only an upgrade of a release with a value can remove it.
                if option.startswith("--set") and not value.endswith("=null"):
                    arguments += [option, value]
                elif option in ("-f", "--values"):
                    file = ROOT / value.removeprefix("$DRAKIT/")
                    text = titled.get(value) or written.get(value) or file.read_text()
                    values = merged(values, yaml.safe_load(text))
            yield f"{page}: {command}", values, arguments


@pytest.fixture(scope="session")
def objects_of_commands(rendered) -> Manifests:
    given = list(installations())
    assert len(given) > 40
    assert sum(bool(values) for _, values, _ in given) > 10
    return [
        each
        for command, values, arguments in given
        for each in rendered(CHART, values, *arguments, source=command)
    ]


@pytest.mark.timeout(180)
def test_the_chart_with_the_commands_of_the_pages(check, objects_of_commands):
    assert check(objects_of_commands) == []


@pytest.mark.parametrize("name", ["nvidia", "sensor"])
def test_the_chart_of_an_example(check, rendered, name):
    objects = rendered(ROOT / "examples" / name / "chart", {}, source=name)
    assert "DaemonSet" in {body["kind"] for _, body in objects}
    assert check(objects) == []


def test_the_chart_of_the_page(check, rendered, tmp_path):
    page = "docs/vendors/packaging.md"
    files = {
        title[1]: text
        for _, options, text in blocks(page)
        if (title := re.search(r'title="lamps-chart/([^"]+)"', options))
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copytree(CHART, tmp_path / "charts" / "drakit")
    objects = rendered(tmp_path, {}, source=page)
    assert {"DaemonSet", "DeviceClass", "DeviceDriver"} <= {body["kind"] for _, body in objects}
    assert check(objects) == []


@pytest.mark.parametrize("arguments", [["--container"], ["--language", "go"]])
def test_the_chart_and_the_manifests_of_a_new_project(check, rendered, tmp_path, arguments):
    project = write(tmp_path / "lamps", *arguments)
    objects = rendered(
        *(project / "chart", {}, "--api-versions", DEVICE_DRIVER), source="drakit new"
    )
    assert {"DaemonSet", "DeviceDriver"} <= {body["kind"] for _, body in objects}
    allowed = yaml.safe_load((project / "drakit-values.yaml").read_text())
    objects += rendered(CHART, allowed, source="drakit-values.yaml")
    for file in project.glob("*.yaml"):
        bodies = yaml.safe_load_all(file.read_text())
        objects += [(file.name, body) for body in bodies if is_manifest(body)]
    assert {"DeviceClass", "Pod"} <= {body["kind"] for _, body in objects}
    assert check(objects) == []
