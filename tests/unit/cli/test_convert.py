"""``drakit convert``: policies from configurations of other tools, and what they cannot express."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from drakit.cli.convert.regexes import UnsupportedRegexError, globs_of
from drakit.cli.convert.subsystems import subsystem_of
from drakit.cli.main import main
from drakit_drivers.hostdev import HostDevicePolicySpec

DATA = Path(__file__).parents[2] / "data" / "convert"


def convert(capsys, tool: str, file: Path, *options: str):
    """Run the command; return its exit code, the specs by name, and the remarks."""
    code = main(["convert", tool, str(file), *options])
    said = capsys.readouterr()
    policies = {}
    for body in yaml.safe_load_all(said.out):
        assert (body["apiVersion"], body["kind"]) == ("drakit.dev/v1alpha1", "HostDevicePolicy")
        HostDevicePolicySpec.model_validate(body["spec"])
        policies[body["metadata"]["name"]] = body["spec"]
    return code, policies, [line.removeprefix(f"{file}: ") for line in said.err.splitlines()]


def given(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "input.yaml"
    file.write_text(text)
    return file


def test_smarter_device_manager(capsys):
    file = DATA / "smarter-device-manager.yaml"
    code, policies, remarks = convert(capsys, "smarter-device-manager", file)
    assert code == 1
    assert list(policies) == ["fuse", "net-tun", "ttyacm", "snd"]
    assert policies["net-tun"] == {
        "match": [{"subsystem": "misc", "paths": ["/dev/net/tun"]}],
        "sharing": {"mode": "Users", "users": 5},
        "deviceClass": {"extendedResourceName": "smarter-devices/net_tun"},
    }
    (serial,) = policies["ttyacm"]["match"]
    assert serial["paths"][1:3] == ["/dev/ttyACM[0-9]", "/dev/ttyACM[0-9][0-9]"]
    # Neither timer nor seq, which belong to no card.
    (sound,) = policies["snd"]["match"]
    assert (policies["snd"]["group"], sound["paths"]) == ("Unit", ["/dev/snd/*C[0-9]*"])
    missing = [line.split(": ")[0] for line in remarks if "not converted" in line]
    assert missing == [
        "data.conf.yaml[4].devicematch",
        "data.conf.yaml[5].devicematch",
        "data.conf.yaml[6]",
    ]


def test_generic_device_plugin(capsys):
    file = DATA / "generic-device-plugin.yaml"
    code, policies, remarks = convert(capsys, "generic-device-plugin", file)
    assert code == 1
    assert list(policies) == ["serial", "fuse", "capture", "zigbee", "stick"]
    assert policies["serial"] == {
        "match": [{"subsystem": "tty", "paths": ["/dev/ttyUSB*", "/dev/ttyACM*"]}],
        "deviceClass": {"extendedResourceName": "devic.es/serial"},
    }
    assert policies["fuse"]["sharing"] == {"mode": "Users", "users": 10}
    assert policies["fuse"]["container"] == {"permissions": "rw"}
    assert policies["zigbee"]["container"] == {"path": "/dev/zigbee"}
    # YAML would read the vendor 0403 of the input as the number 259.
    assert policies["stick"]["match"][0]["usb"] == {
        "vendorID": "0403",
        "productID": "6001",
        "serial": "A50285BI",
    }
    assert sum("not converted" in line for line in remarks) == 2


@pytest.mark.parametrize(
    ("paths", "match"),
    [
        pytest.param(
            ("/dev/kvm", "/dev/net/tun"),
            [{"subsystem": "misc", "paths": ["/dev/kvm", "/dev/net/tun"]}],
            id="nodes-without-hardware",
        ),
        pytest.param(
            ("/dev/loop0", "/dev/loop1"),
            [{"subsystem": "block", "paths": ["/dev/loop0", "/dev/loop1"]}],
            id="loop-devices",
        ),
    ],
)
def test_paths_that_are_no_unit_become_devices_of_their_own(capsys, tmp_path, paths, match):
    """One of them under the name of the extended resource would be less than the pod had."""
    nodes = ", ".join(f"{{path: {path}}}" for path in paths)
    file = given(tmp_path, f"devices: [{{name: x, groups: [{{paths: [{nodes}]}}]}}]")
    code, policies, remarks = convert(capsys, "generic-device-plugin", file)
    assert (code, policies) == (1, {"x": {"match": match}})
    assert "claim separately, without the extended resource" in remarks[0]


DISKS = "not converted: hostdev publishes no disks; use a CSI driver"


def test_disks_are_left_out_and_the_other_devices_of_their_group_stay(capsys, tmp_path):
    nodes = ", ".join(f"{{path: /dev/{name}}}" for name in ("sda", "disk/by-id/x", "loop0", "kvm"))
    other = "{name: y, groups: [{paths: [{path: /dev/nvme0n1}]}]}"
    file = given(tmp_path, f"devices: [{{name: x, groups: [{{paths: [{nodes}]}}]}}, {other}]")
    code, policies, remarks = convert(capsys, "generic-device-plugin", file)
    assert code == 1
    assert [each["match"] for each in policies.values()] == [
        [
            {"subsystem": "block", "paths": ["/dev/loop0"]},
            {"subsystem": "misc", "paths": ["/dev/kvm"]},
        ]
    ]
    assert len([line for line in remarks if DISKS in line]) == 2


def test_akri_converts_no_disks(capsys, tmp_path):
    file = given(
        tmp_path,
        """
apiVersion: akri.sh/v0
kind: Configuration
metadata: {name: disks}
spec:
  discoveryHandler:
    name: udev
    discoveryDetails: |
      groupRecursive: true
      udevRules: ['SUBSYSTEM=="block", KERNEL=="sd[a-z]"', 'SUBSYSTEM=="block", DRIVERS=="nvme"']
""",
    )
    code, policies, remarks = convert(capsys, "akri", file)
    assert (code, policies) == (1, {})
    assert any(DISKS in line for line in remarks)


def test_akri(capsys):
    code, policies, remarks = convert(capsys, "akri", DATA / "akri.yaml")
    assert code == 1
    camera, gpu = policies["akri-udev-video"], policies["akri-gpu"]
    # The rule that excludes a vendor is left out: without its condition it would match more.
    assert camera["match"] == [
        {
            "subsystem": "video4linux",
            "paths": ["/dev/video[0-9]*"],
            "udevProperties": {"ID_V4L_CAPABILITIES": "*:capture:*"},
        },
        {"subsystem": "video4linux", "usb": {"vendorID": "046d", "productID": "0825"}},
    ]
    assert (camera["group"], camera["sharing"]["users"]) == ("Unit", 2)
    assert camera["container"]["env"] == {"FRAMES_PER_SECOND": "15"}
    assert gpu["match"] == [
        {
            "subsystem": "drm",
            "paths": ["/dev/dri/renderD*"],
            "pci": {"vendorID": "8086"},
            "parent": {"driver": "i915"},
        }
    ]
    assert any("'onvif'" in line and "not converted" in line for line in remarks)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param('KERNEL=="video0", TAG=="x"', id="a-key-without-a-field"),
        pytest.param('KERNEL!="video0"', id="an-exclusion"),
        pytest.param('KERNEL=="1-2", SUBSYSTEM=="usb"', id="a-port-as-a-name"),
        pytest.param('ENV{ID_VENDOR}=="Acme"', id="no-subsystem"),
        pytest.param('KERNEL=="ttyUSB0", DRIVERS=="a|b"', id="a-pattern-as-a-driver"),
    ],
)
def test_a_rule_that_no_matcher_expresses_publishes_nothing(capsys, tmp_path, rule):
    details = yaml.safe_dump({"udevRules": [rule]})
    handler = {"name": "udev", "discoveryDetails": details}
    body = {
        "apiVersion": "akri.sh/v0",
        "kind": "Configuration",
        "metadata": {"name": "a"},
        "spec": {"discoveryHandler": handler},
    }
    code, policies, remarks = convert(capsys, "akri", given(tmp_path, yaml.safe_dump(body)))
    assert (code, policies, len(remarks)) == (1, {}, 1)
    assert "udevRules[0]: not converted: " in remarks[0]


def test_ids_are_quoted_as_parsers_disagree_on_numbers(capsys):
    main(["convert", "akri", str(DATA / "akri.yaml")])
    assert 'productID: "0825"' in capsys.readouterr().out


def test_values_are_the_policies_of_the_chart(capsys, tmp_path):
    file = given(tmp_path, "- devicematch: ^kvm$\n  nummaxdevices: 2\n")
    assert main(["convert", "smarter-device-manager", str(file), "-o", "values"]) == 0
    said = capsys.readouterr()
    assert list(yaml.safe_load(said.out)["hostdev"]["policies"]) == ["kvm"]
    assert said.err == ""


def test_groups_that_differ_in_their_settings_become_policies(capsys, tmp_path):
    file = given(
        tmp_path,
        "devices: [{name: x, groups: [{paths: [{path: /dev/kvm}]},"
        " {count: 3, paths: [{path: /dev/fuse}]}]}]",
    )
    code, policies, remarks = convert(capsys, "generic-device-plugin", file)
    assert code == 0
    assert list(policies) == ["x", "x-2"]
    assert "deviceClass" not in policies["x-2"]
    assert "became 2 policies" in remarks[0]


@pytest.mark.parametrize(
    ("regex", "globs"),
    [
        pytest.param("^fuse$", ("fuse",), id="a-name"),
        pytest.param("^video[0-9]$", ("video[0-9]",), id="a-class"),
        pytest.param("^(a|b)\\.c$", ("a.c", "b.c"), id="alternatives"),
        pytest.param("^i2c-\\d{2}$", ("i2c-[0-9][0-9]",), id="a-count"),
        pytest.param("^tty[^S]$", ("tty[!S]",), id="a-negated-class"),
        pytest.param("^rtc.*$", ("rtc*",), id="any-text"),
        pytest.param("gpiochip", ("*gpiochip*",), id="without-anchors"),
        pytest.param("^x\\*$", ("x[*]",), id="a-literal-star"),
    ],
)
def test_expressions_that_globs_can_express(regex, globs):
    assert globs_of(regex).texts == globs


@pytest.mark.parametrize(
    "regex",
    [
        pytest.param("^a(?!b)", id="lookahead"),
        pytest.param("^(a", id="open-group"),
        pytest.param("^a)$", id="closed-group"),
        pytest.param("^[a", id="open-class"),
        pytest.param("^a|b$", id="anchors-of-alternatives"),
        pytest.param("^\\bx$", id="word-boundary"),
        pytest.param("^(a|b)(c|d|e|f|g){8}$", id="too-many-globs"),
        pytest.param("^a{9}$", id="long-repetition"),
        pytest.param("(" * 200, id="deep"),
        pytest.param("x" * 300, id="long"),
        pytest.param("^a**$", id="two-repetitions"),
    ],
)
def test_expressions_that_no_glob_can_express(regex):
    with pytest.raises(UnsupportedRegexError):
        globs_of(regex)


@pytest.mark.parametrize(
    ("path", "subsystem"),
    [
        pytest.param("/dev/ttyUSB*", "tty", id="serial"),
        pytest.param("/dev/serial/by-id/usb-x", "tty", id="a-link"),
        pytest.param("/dev/snd/pcmC0D0c", "sound", id="sound"),
        pytest.param("/dev/tpm0", "tpm", id="tpm"),
        pytest.param("/dev/tpmrm0", "tpmrm", id="tpm-with-resource-manager"),
        pytest.param("/dev/unheard-of", None, id="unknown"),
    ],
)
def test_subsystems_of_paths(path, subsystem):
    assert subsystem_of(path) == subsystem


@pytest.mark.parametrize(
    ("tool", "text", "problem"),
    [
        pytest.param("akri", "]", "is not YAML", id="no-yaml"),
        pytest.param("akri", "kind: Pod\n", "has no configuration of akri", id="another-object"),
        pytest.param("akri", "- 1", "must be a Kubernetes object", id="a-list"),
        pytest.param("smarter-device-manager", "just text", "the document: must be a", id="text"),
        pytest.param("smarter-device-manager", "- [x]", "[0]: must be a mapping", id="no-mapping"),
        pytest.param(
            "smarter-device-manager", "- nummaxdevices: 1", "[0]: has no devicematch", id="no-match"
        ),
        pytest.param(
            "smarter-device-manager",
            "- {devicematch: ^kvm$, nummaxdevices: -1}",
            "[0].nummaxdevices: '-1' must be a whole number",
            id="a-negative-number",
        ),
        pytest.param(
            "generic-device-plugin",
            "devices: [{name: x, groups: [{usb: [{vendor: xyz, product: 1}]}]}]",
            "devices[0].groups[0].usb[0].vendor: 'xyz' must be up to four",
            id="no-usb-id",
        ),
        pytest.param(
            "generic-device-plugin", "devices: &a [*a]", "is not YAML", id="an-anchor-of-itself"
        ),
        pytest.param(
            "akri",
            "{apiVersion: akri.sh/v0, kind: Configuration, metadata: {name: a}, spec:"
            " {discoveryHandler: {name: udev, discoveryDetails: 'udevRules: [nonsense]'}}}",
            "udevRules[0]: 'nonsense' must be a condition",
            id="no-rule",
        ),
        pytest.param("akri", "[" * 5000, "YAML", id="deep"),
    ],
)
def test_unusable_input_is_exit_code_2_with_the_place(capsys, tmp_path, tool, text, problem):
    file = given(tmp_path, text)
    assert main(["convert", tool, str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert str(file) in said.err
    assert problem in said.err


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff\xfe", id="no-utf-8"),
        pytest.param(b"#" * (1024 * 1024 + 1), id="too-large"),
    ],
)
def test_unreadable_files_are_exit_code_2(capsys, tmp_path, data):
    file = tmp_path / "input.yaml"
    file.write_bytes(data)
    assert main(["convert", "akri", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
    assert main(["convert", "akri", str(tmp_path / "missing")]) == 2
