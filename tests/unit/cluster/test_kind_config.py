"""kind's configuration: what nodes mount, and what kubelet and kubeadm are given."""

import re
from pathlib import Path

import pytest
import yaml

from e2e.cluster.api import Options
from e2e.cluster.kind.config import (
    AUDIT_LOG,
    CUT_CHAINS,
    FIRST_PORT,
    PORTS,
    Facts,
    api_server_port,
    cut_rules,
    kind_config,
    write_files,
)

FOLDER = Path("/cache/kind/a")


def config(options: Options | None = None, **facts):
    return kind_config(options or Options(), name="a", folder=FOLDER, facts=Facts(**facts))


def kubelet(found) -> dict:
    (patch,) = found["kubeadmConfigPatches"]
    return yaml.safe_load(patch)


def operations(found, version: str) -> list[tuple[str, object]]:
    (patch,) = [p for p in found["kubeadmConfigPatchesJSON6902"] if p["version"] == version]
    return [(entry["path"], entry["value"]) for entry in yaml.safe_load(patch["patch"])]


def test_one_node_is_the_control_planes_own():
    assert [node["role"] for node in config(Options(nodes=1))["nodes"]] == ["control-plane"]


def test_several_nodes_are_workers_beside_the_control_plane():
    roles = [node["role"] for node in config(Options(nodes=2))["nodes"]]
    assert roles == ["control-plane", "worker", "worker"]


def test_every_node_mounts_dev_and_its_unit():
    for node in config(Options(nodes=2))["nodes"]:
        mounts = {mount["containerPath"]: mount["hostPath"] for mount in node["extraMounts"]}
        assert mounts["/dev"] == "/dev"
        assert mounts["/etc/systemd/system/containerd.service.d/10-drakit.conf"] == str(
            FOLDER / "node.conf"
        )
        assert "/run/udev" not in mounts


def test_nodes_share_udevs_database_where_there_is_one():
    (node,) = config(udev=True)["nodes"]
    assert "/run/udev" in {mount["containerPath"] for mount in node["extraMounts"]}


@pytest.mark.parametrize(("v1", "value"), [(True, False), (False, None)])
def test_cgroup_v1_is_accepted_only_where_it_is(v1, value):
    assert kubelet(config(cgroup_v1=v1)).get("failCgroupV1") is value


def test_a_kubelet_of_unknown_version_gets_no_field_that_it_may_refuse():
    assert "crashLoopBackOff" in kubelet(config(own_image=True))
    assert "crashLoopBackOff" not in kubelet(config(own_image=False))


def test_a_private_engine_fixes_address_and_port_and_has_no_lower_scores():
    found = config(address="10.127.0.2")
    assert found["networking"] == {
        "apiServerAddress": "10.127.0.2",
        "apiServerPort": api_server_port("a"),
    }
    assert "restrict_oom_score_adj" in "".join(found["containerdConfigPatches"])


def test_another_engine_chooses_the_port_itself():
    found = config()
    assert "networking" not in found
    assert "restrict_oom_score_adj" not in "".join(found["containerdConfigPatches"])


def test_the_port_follows_from_the_name():
    ports = {api_server_port(name) for name in ("a", "b", "c")}
    assert len(ports) == 3
    assert all(FIRST_PORT <= port < FIRST_PORT + PORTS for port in ports)


def test_audit_is_switched_on_for_both_versions_of_kubeadms_configuration():
    new = operations(config(), "v1beta4")
    assert ("/apiServer/extraArgs/-", {"name": "audit-log-path", "value": AUDIT_LOG}) in new
    old = operations(config(), "v1beta3")
    assert ("/apiServer/extraArgs/audit-log-path", AUDIT_LOG) in old
    for found in (new, old):
        (volumes,) = [value for path, value in found if path == "/apiServer/extraVolumes"]
        assert {volume["name"] for volume in volumes} == {"drakit-audit", "drakit-audit-policy"}


@pytest.mark.parametrize(
    ("options", "path"),
    [
        pytest.param(Options(), "/scheduler/extraArgs/-", id="beside-the-gates"),
        pytest.param(Options(gates={}), "/scheduler/extraArgs", id="alone"),
    ],
)
def test_the_scheduler_elects_no_leader(options, path):
    assert path in dict(operations(config(options), "v1beta4"))


def test_gates_and_api_versions_are_those_of_the_options():
    found = config(Options(gates={"A": False}, runtime_config={"resource.k8s.io/v1beta1": True}))
    assert found["featureGates"] == {"A": False}
    assert found["runtimeConfig"] == {"resource.k8s.io/v1beta1": "true"}


def test_the_files_that_nodes_mount_are_written(tmp_path):
    write_files(tmp_path, audit_policy="{}")
    found = kind_config(Options(), name="a", folder=tmp_path, facts=Facts())
    for mount in found["nodes"][0]["extraMounts"]:
        assert Path(mount["hostPath"]).exists()
    unit = (tmp_path / "node.conf").read_text()
    assert re.search(r"^ExecStartPre=.*\[ -s /run/boot_id \] \|\|", unit, re.MULTILINE)


# ------------------------------------------------------------ cuts


SERVERS = ("172.18.0.2", "fc00::2")
OWN = ("172.18.0.3", "fc00::3")


def ends(address: str | None) -> list[str]:
    found = cut_rules(servers=SERVERS, own=OWN, address=address)
    return [f"{program[0]} {' '.join(rule)}".split(" -m ")[0] for program, rule in found]


def test_a_node_is_cut_off_in_both_directions_and_both_families():
    assert ends(None) == [
        "iptables POSTROUTING -d 172.18.0.2",
        "iptables PREROUTING -s 172.18.0.2",
        "ip6tables POSTROUTING -d fc00::2",
        "ip6tables PREROUTING -s fc00::2",
    ]


def test_a_pods_cut_leaves_the_nodes_own_processes_alone():
    assert ends("10.244.1.2") == [
        "iptables FORWARD -s 10.244.1.2 -d 172.18.0.2",
        "iptables FORWARD -s 172.18.0.2 -d 10.244.1.2",
    ]


def test_a_kubelets_cut_leaves_pods_alone_and_covers_both_families():
    assert ends(OWN[0]) == [
        "iptables POSTROUTING -s 172.18.0.3 -d 172.18.0.2",
        "iptables INPUT -s 172.18.0.2",
        "ip6tables POSTROUTING -s fc00::3 -d fc00::2",
        "ip6tables INPUT -s fc00::2",
    ]


def test_every_chain_of_a_cut_is_one_that_is_flushed_to_heal():
    rules = [
        rule
        for address in (None, OWN[0], "10.244.1.2")
        for _, rule in cut_rules(servers=SERVERS, own=OWN, address=address)
    ]
    assert {rule[0] for rule in rules} == set(CUT_CHAINS)
