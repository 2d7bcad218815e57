"""The pages for admins agree with the chart: scraped pods, host paths, permissions of tokens."""

from __future__ import annotations

import re
import textwrap

import pytest
import yaml

from tests.unit.chart.reading import the
from tests.unit.docs.listings import ROOT

MONITOR = (ROOT / "docs/admin/monitor.md").read_text()
SECURITY = (ROOT / "docs/admin/security.md").read_text()

ALL = {
    "backends": {"enabled": True, "directory": "/srv/backends"},
    "devicePlugins": {"enabled": True, "directory": "/srv/device-plugins"},
    "nodeplugin": {"kubeletStateDirectory": "/var/lib/kubelet", "bootIDFile": "/etc/boot"},
}
"""Values with which the chart mounts every host path that it can."""


def listing(title: str) -> dict:
    (text,) = re.findall(rf'^ *```yaml title="{title}"\n(.*?)^ *```', MONITOR, re.M | re.S)
    return yaml.safe_load(textwrap.dedent(text))


WORKLOADS = [
    pytest.param("DaemonSet", "drakit-nodeplugin", id="node-plugin"),
    pytest.param("Deployment", "drakit-operator", id="operator"),
]


@pytest.mark.parametrize(("kind", "name"), WORKLOADS)
def test_the_scrape_configuration_of_the_page_keeps_one_port_of_each_component(render, kind, name):
    (job,) = listing("scrape.yaml")["scrape_configs"]
    assert job["job_name"] == "drakit"
    keep, *added = job["relabel_configs"]
    template = the(render(), kind, name)["spec"]["template"]
    sources = {
        "__meta_kubernetes_pod_label_app_kubernetes_io_part_of": template["metadata"]["labels"][
            "app.kubernetes.io/part-of"
        ]
    }
    kept = []
    for port in template["spec"]["containers"][0]["ports"]:
        sources["__meta_kubernetes_pod_container_port_name"] = port["name"]
        joined = ";".join(sources[name] for name in keep["source_labels"])
        kept += [port["name"]] if re.fullmatch(keep["regex"], joined) else []
    assert kept == ["metrics"]
    assert {rule["target_label"] for rule in added} == {"node", "namespace", "pod"}


def test_the_values_of_the_page_install_everything_that_the_page_says(render):
    kinds = [body["kind"] for body in render(listing("monitoring.yaml"))]
    assert [kinds.count(each) for each in ("PodMonitor", "PrometheusRule")] == [1, 1]
    assert kinds.count("ConfigMap") == [body["kind"] for body in render()].count("ConfigMap") + 1


def test_the_table_of_host_paths_is_what_the_chart_mounts(render):
    """With the sockets in each, because a read-only mount does not prevent connections."""
    mounted = set()
    for body in render(ALL, upgrade=True):
        spec = body.get("spec", {}).get("template", {}).get("spec", {"containers": []})
        for container in spec["containers"]:
            writable = {m["name"]: not m.get("readOnly", False) for m in container["volumeMounts"]}
            mounted |= {
                (volume["hostPath"]["path"], "write" if writable[volume["name"]] else "read")
                for volume in spec["volumes"]
                if "hostPath" in volume
            }
    paths = {
        "<kubeletRoot>": "/var/lib/kubelet",
        "nodeplugin.cdiDirectory": "/var/run/cdi",
        "nodeplugin.kubeletStateDirectory": "/var/lib/kubelet",
        "nodeplugin.bootIDFile": "/etc/boot",
        "backends.directory": "/srv/backends",
        "devicePlugins.directory": "/srv/device-plugins",
    }
    head = "| Path | Access | Purpose | Sockets of others in it |\n|---|---|---|---|\n"
    table = SECURITY.partition(head)[2].partition("\n\n")[0]
    shown = set()
    for cell, access, _, sockets in (re.split(r" ?\| ?", row)[1:-1] for row in table.splitlines()):
        assert sockets
        for name in re.findall(r"`([^`]+)`", re.sub(r"\(.*?\)|, at .*", "", cell)):
            for word, path in paths.items():
                name = name.replace(word, path)
            shown.add((name, access))
    assert shown == mounted
    # `control`, next to the database, accepts commands from user 0.
    assert "/run/udev/data" in {path for path, _ in mounted}


@pytest.mark.parametrize(
    ("component", "first"),
    [
        pytest.param("nodeplugin", "node plugin", id="node-plugin"),
        pytest.param("operator", "operator", id="operator"),
    ],
)
def test_the_table_of_tokens_names_all_rights(render, component, first):
    policies = {"group": "lamps.example.com", "version": "v1", "plural": "policies"}
    backends = {"lamps": {"driver": "lamps.example.com", "policies": policies}}
    objects = render(
        {
            "nodeplugin": {"claimStatus": {"enabled": True}},
            "backends": {"enabled": True, "allowed": backends},
            "maintenance": {"enabled": True},
        }
    )
    rules = the(objects, "ClusterRole", f"drakit-{component}")["rules"]
    table = SECURITY.partition("| Token | API objects | Verbs |\n")[2].partition("\n\n")[0]
    shown, token = set(), ""
    for cells in (line.split("|")[1:4] for line in table.splitlines()[1:]):
        token = cells[0].strip() or token
        resources = re.findall(r"`(/?[\w/]+)(?: of backends)?`", cells[1])
        if token == first and resources != ["leases"]:
            shown |= {(one, cells[2].strip()) for one in resources}
    assert shown == {
        (one, ", ".join(rule["verbs"]))
        for rule in rules
        for one in rule.get("resources") or rule["nonResourceURLs"]
    }


def test_the_page_lists_the_admission_policies_of_the_chart(render):
    rows = re.findall(r"^(drakit-[a-z-]+) +(\d+) +<unset> ", SECURITY, re.M)
    policies = [each for each in render() if each["kind"] == "ValidatingAdmissionPolicy"]
    assert rows == sorted(
        (each["metadata"]["name"], str(len(each["spec"]["validations"]))) for each in policies
    )
