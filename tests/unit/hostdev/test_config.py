"""What an admin may write, and what is refused with key and reason."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.globs import check_glob, matches


def policy(**fields) -> dict:
    return {"name": "kvm", "subsystem": "misc", "paths": ["/dev/kvm"]} | fields


def config(*policies: dict, **options) -> HostDevicesConfig:
    return HostDevicesConfig.model_validate({"policies": policies, **options})


def test_defaults():
    made = config(policy())
    assert made.model_dump(mode="json") == {
        "policies": [
            {
                "name": "kvm",
                "subsystem": "misc",
                "paths": ["/dev/kvm"],
                "count": None,
                "permissions": "rw",
                "node_selector": {},
                "uid": None,
                "gid": None,
                "mode": None,
            }
        ],
        "allow_disks": False,
        "rescan_interval": "10s",
        "sys_root": "/sys",
        "udev_root": "/run/udev",
        "dev_root": "/dev",
        "mountinfo": "/proc/1/mountinfo",
        "swaps": "/proc/swaps",
    }


def test_all_that_can_be_said_in_camel_case():
    made = config(
        policy(count=8, nodeSelector={"a.b/c": "d"}, permissions="rwm", uid=0, gid=44, mode="0660"),
        allowDisks=True,
        rescanInterval="1m30s",
        devRoot="/host/dev",
    )
    assert made.rescan_interval == timedelta(seconds=90)
    assert made.policies[0].mode == 0o660
    assert made.policies[0].node_selector == {"a.b/c": "d"}


def test_what_is_written_out_can_be_read_again():
    made = config(policy(mode="0660"), rescanInterval="1m30s")
    written = made.model_dump_json(by_alias=True)
    assert '"rescanInterval":"90s"' in written
    assert HostDevicesConfig.model_validate_json(written) == made


@pytest.mark.parametrize(
    ("bad", "where", "reason"),
    [
        pytest.param({"nam": "x"}, ("policies", 0, "nam"), "Extra inputs", id="unknown-key"),
        pytest.param({"name": "Kvm"}, ("policies", 0, "name"), "pattern", id="name-upper-case"),
        pytest.param({"name": "k" * 41}, ("policies", 0, "name"), "40", id="name-too-long"),
        pytest.param({"subsystem": "a/b"}, ("policies", 0, "subsystem"), "pattern", id="slash"),
        pytest.param({"subsystem": ".."}, ("policies", 0, "subsystem"), "pattern", id="upwards"),
        pytest.param(
            {"subsystem": "scsi_generic"},
            ("policies", 0, "subsystem"),
            "publish the block device",
            id="raw-access-to-disks",
        ),
        pytest.param({"paths": []}, ("policies", 0, "paths"), "at least 1", id="no-path"),
        pytest.param({"count": 0}, ("policies", 0, "count"), "greater", id="count-0"),
        pytest.param({"count": 1025}, ("policies", 0, "count"), "1024", id="count-1025"),
        pytest.param(
            {"count": 2, "paths": ["/dev/kvm*"]},
            ("policies", 0),
            "one path without wildcards",
            id="count-with-wildcard",
        ),
        pytest.param(
            {"count": 2, "paths": ["/dev/a", "/dev/b"]},
            ("policies", 0),
            "one path without wildcards",
            id="count-with-two-paths",
        ),
        pytest.param(
            {"count": 2, "subsystem": "block"}, ("policies", 0), "one disk", id="count-of-disk"
        ),
        pytest.param({"permissions": "rx"}, ("policies", 0, "permissions"), "rwm", id="letters"),
        pytest.param({"permissions": "rr"}, ("policies", 0, "permissions"), "twice", id="twice"),
        pytest.param({"mode": 660}, ("policies", 0, "mode"), "in quotes", id="mode-as-number"),
        pytest.param({"mode": "0888"}, ("policies", 0, "mode"), "octal", id="mode-not-octal"),
        pytest.param({"gid": -1}, ("policies", 0, "gid"), "greater", id="gid"),
    ],
)
def test_a_bad_policy_is_refused_with_key_and_reason(bad, where, reason):
    with pytest.raises(ValidationError) as caught:
        config(policy(**bad))
    (error,) = caught.value.errors()
    assert error["loc"] == where
    assert reason in error["msg"]


@pytest.mark.parametrize(
    ("bad", "where", "reason"),
    [
        pytest.param({"allowDisk": True}, "allowDisk", "Extra inputs", id="unknown-key"),
        pytest.param({"rescanInterval": "10"}, "rescanInterval", "10s", id="without-unit"),
        pytest.param({"rescanInterval": 10}, "rescanInterval", "with its unit", id="number"),
        pytest.param({"rescanInterval": ""}, "rescanInterval", "no duration", id="empty"),
        pytest.param({"rescanInterval": "0s"}, "rescanInterval", "greater", id="no-pause"),
        pytest.param({"rescanInterval": "2h"}, "rescanInterval", "less", id="too-seldom"),
        pytest.param({"sysRoot": "sys"}, "sysRoot", "absolute", id="relative-root"),
    ],
)
def test_a_bad_option_is_refused_with_key_and_reason(bad, where, reason):
    with pytest.raises(ValidationError) as caught:
        config(policy(), **bad)
    (error,) = caught.value.errors()
    assert error["loc"] == (where,)
    assert reason in error["msg"]


def test_two_policies_of_one_name_are_both_named():
    with pytest.raises(ValidationError, match=r"policies\[0\] and policies\[2\] .* 'kvm'"):
        config(policy(), policy(name="tun"), policy())


@pytest.mark.parametrize(
    ("glob", "reason"),
    [
        ("kvm", "absolute path below /dev"),
        ("/etc/passwd", "absolute path below /dev"),
        ("/dev/", "empty part"),
        ("/dev//kvm", "empty part"),
        ("/dev/../etc", "'..'"),
        ("/dev/./kvm", "'.'"),
        ("/dev/**/kvm", "'**'"),
        ("/dev/tty[", "bracket"),
        ("/dev/tty[]", "bracket"),
        ("/dev/tty]", "bracket"),
        ("/dev/tty[a/b]", "bracket"),
        ("/dev/tty[!]", "bracket"),
        ("/dev/tty[^S]", "'[!'"),
        ("/dev/tty[9-0]", "9-0"),
        ("/dev/a\nb", "control character"),
    ],
)
def test_a_bad_glob_is_refused_with_key_and_reason(glob, reason):
    with pytest.raises(ValidationError) as caught:
        config(policy(paths=["/dev/kvm", glob]))
    (error,) = caught.value.errors()
    assert error["loc"] == ("policies", 0, "paths", 1)
    assert reason in error["msg"]


@pytest.mark.parametrize(
    ("glob", "path", "meant"),
    [
        ("/dev/kvm", "/dev/kvm", True),
        ("/dev/kvm", "/dev/kvm2", False),
        ("/dev/KVM", "/dev/kvm", False),
        ("/dev/tty*", "/dev/ttyUSB0", True),
        ("/dev/*", "/dev/net/tun", False),
        ("/dev/*/tun", "/dev/net/tun", True),
        ("/dev/ttyS?", "/dev/ttyS10", False),
        ("/dev/tty[!S]*", "/dev/ttyS0", False),
        ("/dev/tty[]S]0", "/dev/tty]0", True),
        ("/dev/ttyS[0-3]", "/dev/ttyS2", True),
        ("/dev/a.b", "/dev/axb", False),
    ],
)
def test_globs_match_within_a_part(glob, path, meant):
    assert matches(check_glob(glob), path) is meant


@given(st.from_regex(r"/dev/[a-zA-Z0-9_.+-]{1,8}(/[a-zA-Z0-9_+-]{1,8})?", fullmatch=True))
def test_a_path_without_wildcards_means_itself(path):
    try:
        check_glob(path)
    except ValueError:
        assert path.split("/")[2] in {".", ".."}
        return
    assert matches(path, path)
    assert not matches(path, path + "x")
