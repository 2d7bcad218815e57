"""``drakit node devices`` and ``drakit node report`` on a node with recorded devices."""

from __future__ import annotations

import asyncio
import json
import tarfile

import pytest
import yaml

from drakit.layout import driver_directory
from drakit_cli import report
from drakit_cli.host_devices import policies_text
from drakit_cli.main import main
from drakit_drivers.hostdev import HostDevicePolicySpec
from drakit_nodeplugin.host.policies import FILE, StoredPolicy, write_policies
from tests.fakes.checkpoints import DRIVER, stored_claim, stored_device
from tests.fakes.recordings import plug
from tests.fakes.sysfs import VOLUMES, FakeHost

HOSTDEV = "hostdev.drakit.dev"
SECRET = "hunter2"
FTDI = {"vendorID": "0403", "productID": "6001"}


class Node:
    """A node with devices and policies, on which commands run."""

    def __init__(self, host: FakeHost, root, capsys) -> None:
        self.host = host
        self.root = root
        self.data = driver_directory(root / "kubelet", HOSTDEV)
        self._capsys = capsys
        self.data.mkdir(parents=True)
        (root / "cdi").mkdir()
        self.configure({})

    def configure(self, policies: dict[str, dict]) -> None:
        config = json.loads(self.host.config(policies).model_dump_json(by_alias=True))
        body = {
            "kubeletRoot": str(self.root / "kubelet"),
            "cdiDirectory": str(self.root / "cdi"),
            "drivers": [
                {"driver": "hostdev", "config": config},
                {"driver": "acme:Driver", "config": {"password": SECRET}},
            ],
        }
        (self.root / "plugin.yaml").write_text(yaml.safe_dump(body))

    def store(self, **specs: dict) -> None:
        stored = [
            StoredPolicy(name=name, uid=name, created="2026-01-01T00:00:00Z", generation=1, spec=s)
            for name, s in specs.items()
        ]
        write_policies(self.data / FILE, stored)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = main(["node", *arguments, "--config", str(self.root / "plugin.yaml")])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def states(self, *arguments: str) -> dict[str, str]:
        _, out, _ = self.run("devices", "--json", *arguments)
        return {each["path"]: each["state"] for each in json.loads(out)["devices"]}


@pytest.fixture
def node(tmp_path, capsys) -> Node:
    host = FakeHost(tmp_path / "host")
    plug(host, "ftdi")
    return Node(host, tmp_path, capsys)


def adapters(**fields) -> dict:
    return {"match": [{"subsystem": "tty", "usb": FTDI}], **fields}


def test_policies_of_the_cluster_and_of_the_file_are_in_force(node):
    assert node.states() == {"/dev/ttyUSB0": "no policy matches it"}
    node.store(serial=adapters())
    assert node.states() == {"/dev/ttyUSB0": "published"}
    node.configure({"own": adapters()})
    assert node.states() == {"/dev/ttyUSB0": "published; also matched by serial"}


def test_a_policy_with_a_node_selector_needs_the_labels(node):
    node.store(serial=adapters(nodeSelector={"matchLabels": {"room": "lab"}}))
    code, _, error = node.run("devices")
    assert code == 0
    assert "not considered: serial; pass the labels" in error
    assert node.states("--labels", "room=lab") == {"/dev/ttyUSB0": "published"}
    assert node.states("--labels", "room=hall") == {"/dev/ttyUSB0": "no policy matches it"}


def test_the_printed_policy_publishes_the_device(node):
    link = "/dev/serial/by-id/usb-FTDI_FT232R_USB_UART_A50285BI-if00-port0"
    code, out, _ = node.run("devices", "--policy", link)
    assert code == 0
    body = yaml.safe_load(out)
    HostDevicePolicySpec.model_validate(body["spec"])
    assert body["spec"]["match"][0]["usb"] == {**FTDI, "serial": "A50285BI"}
    node.store(**{body["metadata"]["name"]: body["spec"]})
    assert node.states() == {"/dev/ttyUSB0": "published"}


def test_ids_are_quoted_as_parsers_disagree_on_numbers():
    assert 'productID: "0825"' in policies_text({"camera": {"usb": {"productID": "0825"}}})


def test_the_table_shows_the_device(node):
    node.store(serial=adapters())
    _, out, _ = node.run("devices", "--subsystem", "tty")
    assert "/dev/ttyUSB0  tty        serial-0403-6001-a50285bi-i0  serial" in out
    _, out, _ = node.run("devices", "--subsystem", "sound")
    assert out == "no devices found\n"


def test_damaged_policies_are_reported_and_left_in_place(node):
    (node.data / FILE).write_text("{")
    code, _, error = node.run("devices")
    assert code == 1
    assert "the policies of the cluster are not known" in error
    assert (node.data / FILE).read_text() == "{"


def test_an_invalid_policy_costs_itself_only(node):
    node.store(serial=adapters(), broken={"match": []})
    code, out, error = node.run("devices")
    assert code == 1
    assert "published" in out
    assert "policy broken is invalid" in error


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        pytest.param(["/dev/none"], 1, "/dev/none is not a device", id="no-such-device"),
        pytest.param(["--subsystem", "../x"], 2, "is not a subsystem", id="no-subsystem"),
        pytest.param(["--labels", "x"], 2, "must have the form KEY=VALUE", id="no-labels"),
    ],
)
def test_wrong_arguments_have_their_exit_codes(node, arguments, code, problem):
    found, _, error = node.run("devices", *arguments)
    assert found == code
    assert problem in error


def test_a_report_has_the_parts_and_no_secrets(node, site, tmp_path, monkeypatch):
    monkeypatch.delenv("NODE_NAME", raising=False)
    node.store(serial=adapters(container={"env": {"TOKEN": SECRET}}))
    (tmp_path / "cdi" / "x.json").write_text(SECRET)
    config = json.dumps({"password": SECRET})
    claim = stored_claim("1", devices=(stored_device("cam-0"),), configs=(config,))
    monkeypatch.setattr(site, "root", tmp_path)  # the checkpoint is on the same node
    asyncio.run(site.store(claim))
    code, out, error = node.run("report")
    assert (code, error) == (0, "")
    for part in ("drakit 0", "serial-0403-6001", "uid-1", "x.json", "TOKEN", "acme:Driver"):
        assert part in out
    assert DRIVER in out
    assert SECRET not in out


def test_a_report_names_neither_volumes_nor_subpaths_of_pods(node, monkeypatch):
    monkeypatch.delenv("NODE_NAME", raising=False)
    node.host.mount("8:1", "/boot", source="/dev/sda1")
    for path in VOLUMES:
        source = "/dev/mapper/vg-pvc--secret"
        node.host.mount("253:0", f"/data/kubelet/{path}", source=source, root="/secret")
    _, out, _ = node.run("report")
    assert "8:1 ext4 mounted at /boot /dev/sda1\n" in out
    assert "253:0 ext4 mounted as a volume of a pod\n" in out
    assert "secret" not in out


def test_a_report_is_an_archive_if_the_name_says_so(node, monkeypatch, tmp_path):
    monkeypatch.delenv("NODE_NAME", raising=False)
    target = tmp_path / "report.tar.gz"
    code, out, _ = node.run("report", "--output", str(target))
    assert code == 0
    assert str(target) in out
    with tarfile.open(target) as archive:
        names = archive.getnames()
        file = archive.extractfile("drakit-report/devices.json")
        assert file is not None
        assert json.loads(file.read())["path"] == "/dev/ttyUSB0"
    assert len(names) == 9


def test_a_part_that_fails_costs_itself_only_and_parts_are_bounded(node, monkeypatch):
    monkeypatch.delenv("NODE_NAME", raising=False)
    monkeypatch.setattr(report, "MAX_PART_BYTES", 20)
    node.host.mountinfo.unlink()
    code, out, _ = node.run("report")
    assert code == 1
    assert "problems.txt\nmounts.txt: FileNotFoundError" in out
    assert "(cut off at 20 bytes)" in out
