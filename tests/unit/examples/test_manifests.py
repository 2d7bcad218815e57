"""The charts and pods of examples/sensor and examples/nvidia fit the drivers and drakit's chart."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from drakit.layout import backends_directory
from drakit_cli.main import main
from drakit_driver.__main__ import parser
from drakit_explain.cel.library import Library
from drakit_formats import crds
from tests.unit.chart.conftest import Helm, helm
from tests.unit.docs.listings import ROOT

__all__ = ("helm",)

EXAMPLES = {"sensor": ("sensors", "sensors:Sensors"), "nvidia": ("gpus", "gpus:Gpus")}


@pytest.fixture(params=sorted(EXAMPLES))
def example(request: pytest.FixtureRequest) -> Path:
    return ROOT / "examples" / request.param


def rendered(helm: Helm, example: Path, kind: str, **values: Any) -> list[dict[str, Any]]:
    """The objects of a kind in the example's chart."""
    done = helm("template", EXAMPLES[example.name][0], str(example / "chart"), values=values)
    assert done.returncode == 0, done.stderr
    return [body for body in yaml.safe_load_all(done.stdout) if body["kind"] == kind]


def of_kind(example: Path, kind: str) -> list[dict[str, Any]]:
    """Return the objects of a kind in the manifests next to the chart."""
    paths = [path for path in example.glob("*.yaml") if path.name != "values.yaml"]
    bodies = [body for path in sorted(paths) for body in yaml.safe_load_all(path.read_text())]
    return [body for body in bodies if body["kind"] == kind]


def driver_name(example: Path) -> str:
    (module,) = [path for path in example.glob("*.py") if "Driver[" in path.read_text()]
    return re.findall(r'^    name = "(.*)"', module.read_text(), re.M)[0]


def entry_of(example: Path) -> tuple[str, dict[str, Any]]:
    values = yaml.safe_load((example / "values.yaml").read_text())
    ((name, entry),) = values["backends"]["allowed"].items()
    return name, entry


def test_the_chart_has_the_schemas_of_the_driver(example, helm, monkeypatch, capsys):
    release, reference = EXAMPLES[example.name]
    monkeypatch.syspath_prepend(example)
    monkeypatch.delitem(sys.modules, reference.partition(":")[0], raising=False)
    assert main(["schema", reference]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    served = ("--api-versions", f"{crds.API_VERSION}/DeviceDriver")
    done = helm("template", release, str(example / "chart"), *served, values={})
    bodies = yaml.safe_load_all(done.stdout)
    assert [body for body in bodies if body["kind"] == "DeviceDriver"] == [printed]
    # A cluster without drakit's definitions.
    assert rendered(helm, example, "DeviceDriver") == []


def test_the_values_allow_the_driver(example):
    name, entry = entry_of(example)
    assert name == EXAMPLES[example.name][0]
    assert entry["driver"] == driver_name(example)


def test_the_container_serves_the_driver_in_the_directory_of_its_entry(example, helm):
    name, _ = entry_of(example)
    (daemon_set,) = rendered(helm, example, "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    dockerfile = (example / "Dockerfile").read_text()
    program, *flags = json.loads(re.findall(r"^ENTRYPOINT (.*)", dockerfile, re.M)[0])
    assert program == "/opt/drakit/bin/drakit-driver"
    arguments = parser().parse_args([*flags, *container.get("args", [])])
    assert arguments.driver == EXAMPLES[example.name][1]
    paths = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    mounts = {each["mountPath"]: paths[each["name"]] for each in container["volumeMounts"]}
    kubelet = Path("/var/lib/kubelet")
    assert mounts[str(arguments.directory)] == str(backends_directory(kubelet) / name)
    assert "NODE_NAME" in {each["name"] for each in container["env"]}
    assert container["securityContext"]["privileged"]


def test_the_values_set_the_image_the_nodes_and_the_security_context(example, helm):
    values = {
        "image": {"repository": "registry.example.org/own", "tag": "2.0.0"},
        "nodeSelector": {"example.com/rack": "r1"},
        "securityContext": {"privileged": False, "capabilities": {"add": ["SYS_RAWIO"]}},
    }
    (daemon_set,) = rendered(helm, example, "DaemonSet", **values)
    pod = daemon_set["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry.example.org/own:2.0.0"
    assert pod["nodeSelector"]["example.com/rack"] == "r1"
    assert not container["securityContext"]["privileged"]
    assert container["securityContext"]["capabilities"] == {"add": ["SYS_RAWIO"]}


def test_another_config_reaches_the_driver_of_gpus_and_replaces_its_pods(helm):
    example = ROOT / "examples" / "nvidia"
    templates = []
    for slices in (2, 3):
        values = {"config": {"timeSlices": slices}}
        (config,) = rendered(helm, example, "ConfigMap", **values)
        assert yaml.safe_load(config["data"]["gpus.yaml"]) == values["config"]
        (daemon_set,) = rendered(helm, example, "DaemonSet", **values)
        templates.append(daemon_set["spec"]["template"])
    assert templates[0] != templates[1]


def test_pods_claim_devices_of_classes_that_exist(example, helm):
    classes = {body["metadata"]["name"] for body in rendered(helm, example, "DeviceClass")}
    templates = {}
    for body in of_kind(example, "ResourceClaimTemplate"):
        (request,) = body["spec"]["spec"]["devices"]["requests"]
        templates[body["metadata"]["name"]] = request["exactly"]["deviceClassName"]
    assert set(templates.values()) == classes
    used = {
        claim["resourceClaimTemplateName"]
        for body in of_kind(example, "Pod")
        for claim in body["spec"]["resourceClaims"]
    }
    assert used == set(templates)


def test_the_classes_of_gpus_select_by_type(helm):
    devices = [
        {
            "driver": "gpu.nvidia.com",
            "attributes": {"type": {"string": kind}},
            "capacity": {},
            "allowMultipleAllocations": False,
        }
        for kind in ("gpu", "mig-gpu", "mig")
    ]
    selected = {}
    for body in rendered(helm, ROOT / "examples" / "nvidia", "DeviceClass"):
        (selector,) = body["spec"]["selectors"]
        outcomes = Library().select(selector["cel"]["expression"], devices)
        selected[body["metadata"]["name"]] = [outcome.selected for outcome in outcomes]
    assert selected == {
        "gpu.nvidia.com": [True, False, False],
        "mig.nvidia.com": [False, False, True],
    }


def test_the_page_has_the_drivers_lines():
    page = (ROOT / "docs" / "vendors" / "examples.md").read_text()
    lines = [
        len((ROOT / "examples" / path).read_text().splitlines())
        for path in ("sensor/sensors.py", "nvidia/gpus.py")
    ]
    assert f"| Python | {lines[0]} lines | {lines[1]} lines" in page


def test_the_image_has_the_binding_with_hashes_and_drakit_does_not_need_it():
    example = ROOT / "examples" / "nvidia"
    (line,) = re.findall(r"^\w.*==.*", (example / "requirements.txt").read_text(), re.M)
    assert line.startswith("nvidia-ml-py==13.")
    assert "--hash=sha256:" in (example / "requirements.txt").read_text()
    assert "--require-hashes" in (example / "Dockerfile").read_text()
    for path in (ROOT / "requirements").glob("*.txt"):
        # The development environment has it for the test of the fake, in the same version.
        assert ("nvidia" in path.read_text()) == (line in path.read_text()) == (path.stem == "dev")
