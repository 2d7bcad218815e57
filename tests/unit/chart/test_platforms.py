"""The values files of platforms: each can be installed, and the page has what it sets."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.unit.chart.conftest import CHART, IMAGE
from tests.unit.chart.reading import pod_spec
from tests.unit.docs.listings import ROOT, listing

PAGE = "docs/admin/platforms.md"
FILES = sorted((CHART / "platforms").glob("*.yaml"))
PLATFORMS = [pytest.param(file, id=file.stem) for file in FILES]


def test_each_platform_has_a_file():
    names = {file.stem for file in FILES}
    assert names == {"kubeadm", "k3s", "microk8s", "talos", "openshift", "gke", "eks", "aks"}


def given(file) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


@pytest.mark.parametrize("file", PLATFORMS)
def test_the_values_of_a_platform_have_no_lint(helm, file):
    done = helm("lint", "--strict", str(CHART), "--set", IMAGE, values=given(file))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", PLATFORMS)
def test_the_node_plugin_uses_the_directories_of_the_platform(render, file):
    values = given(file)["nodeplugin"]
    spec = pod_spec(render(given(file)), "DaemonSet", "drakit-nodeplugin")
    paths = {each["name"]: each.get("hostPath", {}).get("path", "") for each in spec["volumes"]}
    assert paths["cdi"] == values["cdiDirectory"]
    for name in ("drakit", "registry", "pod-resources"):
        assert paths[name].startswith(f"{values['kubeletRoot']}/")
    (container,) = spec["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    # The plugin sends these paths to the kubelet and the container runtime.
    for name in ("cdi", "drakit", "registry", "pod-resources"):
        assert mounts[name] == paths[name]


@pytest.mark.parametrize("file", PLATFORMS)
def test_the_page_has_the_directories_of_the_platform_and_the_file_links_its_section(file):
    text = (ROOT / PAGE).read_text()
    anchor = re.match(r"# drakit on .*/admin/platforms/#([\w-]+)\.\n", file.read_text())
    assert anchor, f"the first line of {file.name} names the page"
    (row,) = re.findall(rf"^\| \[[^]]+\]\(#{anchor[1]}\) \|(.*)$", text, re.M)
    root, directory = [cell.strip() for cell in row.split("|")][:2]
    values = given(file)["nodeplugin"]
    assert (root, directory) == (f"`{values['kubeletRoot']}`", f"`{values['cdiDirectory']}`")
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert anchor[1] in {re.sub(r"\W+", "-", heading.lower()) for heading in headings}


def test_the_container_runtime_of_talos_reads_the_directory_of_the_values():
    (file,) = yaml.safe_load(listing(PAGE, "machine.yaml"))["machine"]["files"]
    directories = re.findall(r'"(/[^"]+)"', file["content"])
    assert given(CHART / "platforms/talos.yaml")["nodeplugin"]["cdiDirectory"] in directories


def test_the_quota_of_gke_admits_the_priority_class_of_the_node_plugin(render):
    quota = yaml.safe_load(listing(PAGE, "quota.yaml"))
    (scope,) = quota["spec"]["scopeSelector"]["matchExpressions"]
    spec = pod_spec(render(given(CHART / "platforms/gke.yaml")), "DaemonSet", "drakit-nodeplugin")
    assert scope["values"] == [spec["priorityClassName"]]
    assert quota["metadata"]["namespace"] == "drakit-system"


def test_the_constraints_of_openshift_are_those_of_the_page(render):
    scc = yaml.safe_load(listing(PAGE, "scc.yaml"))["metadata"]["name"]
    objects = render(given(CHART / "platforms/openshift.yaml"))
    named = {
        body["metadata"]["name"]: body["rules"][0]["resourceNames"]
        for body in objects
        if body["kind"] == "Role" and "securitycontextconstraints" in str(body)
    }
    assert named == {
        "drakit-nodeplugin-scc": [scc],
        "drakit-operator-scc": ["nonroot-v2"],
        "drakit-setup-scc": ["nonroot-v2"],
    }
