"""The addresses and the version of the project are the same everywhere, and README is true."""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import Any

import yaml

from drakit_drivers.hostdev import HostDevicePolicySpec
from tests.unit.docs.listings import ROOT, listings
from tools.krew.__main__ import render
from tools.site.source import config

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URLS = PROJECT["urls"]
CHART = yaml.safe_load((ROOT / "charts/drakit/Chart.yaml").read_text())


def test_the_site_and_the_chart_have_the_addresses_of_the_package():
    site = config()
    assert site["site_url"] == CHART["home"] == URLS["Documentation"]
    assert [site["repo_url"]] == CHART["sources"] == [URLS["Source"]]
    assert URLS["Issues"] == URLS["Source"] + "/issues"
    assert URLS["Source"].endswith("/" + site["repo_name"])


def test_the_krew_manifest_has_the_address_of_the_site():
    manifest = yaml.safe_load(render("0.1.0", "https://x.example", {}))
    assert manifest["spec"]["homepage"] == URLS["Documentation"]


def test_no_file_has_another_address_of_the_repository_or_the_site():
    listed = subprocess.run(
        ["git", "grep", "-I", "-h", "-o", "-E", r"https://[a-z.]*github\.[a-z]+/[A-Za-z0-9./_-]+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    ours = {found for found in listed.stdout.split() if "drakit" in found}
    assert URLS["Source"] in ours
    allowed = tuple(re.escape(url.rstrip("/")) for url in (URLS["Source"], URLS["Documentation"]))
    pattern = re.compile(rf"({'|'.join(allowed)})(/|\.git|$|[.])")
    assert [found for found in sorted(ours) if not pattern.match(found)] == []


def test_the_issue_forms_that_pages_open_exist():
    page = (ROOT / "docs/report-a-problem.md").read_text()
    forms = re.findall(r"issues/new\?template=(\S+?)\)", page)
    assert len(forms) == 2
    for form in forms:
        assert yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / form).read_text())["body"]


def test_the_policy_the_claim_and_the_pod_of_the_readme_belong_together():
    (text,) = listings("README.md", "yaml")
    policy, template, pod = yaml.safe_load_all(text)
    assert HostDevicePolicySpec.model_validate(policy["spec"])
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": f"{policy['metadata']['name']}.drakit.dev"}
    (claim,) = pod["spec"]["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["claims"] == [{"name": claim["name"]}]
    assert f"$HOSTDEV_{request['name'].upper()}" in container["command"][-1]


def test_the_output_in_the_readme_is_that_of_its_manifests():
    (text,) = listings("README.md", "yaml")
    (shown,) = listings("README.md", "console")
    objects = yaml.safe_load_all(text)
    created = [f"{resource(body)}/{body['metadata']['name']} created" for body in objects]
    assert shown.splitlines() == ["$ kubectl apply -f serial.yaml", *created]


def resource(body: dict[str, Any]) -> str:
    """The resource of an object as kubectl prints it."""
    group, _, _ = body["apiVersion"].rpartition("/")
    return ".".join(filter(None, (body["kind"].lower(), group)))


def test_the_first_screen_of_the_readme_has_the_site_and_the_time_of_the_demo():
    lines = (ROOT / "README.md").read_text().splitlines()
    start = " ".join(lines[:40])
    page = " ".join((ROOT / "docs/start/from-nothing.md").read_text().split())
    (duration,) = re.findall(r"The first run takes .*?, because it compiles Kubernetes\.", page)
    assert duration in start
    assert f"({URLS['Documentation']})" in start


def test_the_versions_that_pages_require_are_those_of_the_project():
    def required(file: str, pattern: str) -> str:
        (found,) = re.findall(pattern, (ROOT / file).read_text(), re.M)
        return found

    expected = {
        ("Go", required("e2e/cluster/binaries/kubernetes/go.mod", r"^go (\S+)$")),
        ("Go", required("proto/go/go.mod", r"^go (\d+\.\d+)")),
        ("Python", PROJECT["requires-python"].removeprefix(">=")),
        ("Kubernetes", re.findall(r">=(\d+\.\d+)", CHART["kubeVersion"])[0]),
    }
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = " ".join(" ".join(path.read_text().split()) for path in pages)
    shown = set(re.findall(r"\b(Go|Python|Kubernetes) ([\d.]+\d) or newer", text))
    assert shown == expected


def test_the_contracts_of_imports_have_all_packages_and_ignore_nothing():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    linter, build = tools["importlinter"], tools["hatch"]["build"]
    packages = {name.rpartition("/")[2] for name in build["targets"]["wheel"]["packages"]}
    assert set(linter["root_packages"]) == packages
    across, *others = linter["contracts"]
    layers = [name.strip() for layer in across["layers"] for name in re.split("[|:]", layer)]
    assert {name.partition(".")[0] for name in layers} == packages
    modules = [*(ROOT / "drakit").glob("[a-z]*.py"), *(ROOT / "drakit").glob("[a-z]*/__init__.py")]
    sdk = {path.parent.name if path.stem == "__init__" else path.stem for path in modules}
    assert {f"drakit.{name}" for name in sdk} == {
        name for name in layers if name.startswith("drakit.")
    }
    containers = {name for each in others if each.get("exhaustive") for name in each["containers"]}
    assert containers >= packages - {"drakit_proto"}
    assert not [each["name"] for each in linter["contracts"] if "ignore_imports" in each]
