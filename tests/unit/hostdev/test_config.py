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
    return {"subsystem": "misc", "paths": ["/dev/kvm"]} | fields


def config(kvm: dict, **options) -> HostDevicesConfig:
    return HostDevicesConfig.model_validate({"policies": {"kvm": kvm}, **options})


def test_defaults():
    made = config(policy())
    assert made.model_dump(mode="json") == {
        "policies": {
            "kvm": {
                "enabled": True,
                "subsystem": "misc",
                "paths": ["/dev/kvm"],
                "count": None,
                "permissions": "rw",
                "node_selector": {},
                "uid": None,
                "gid": None,
                "mode": None,
                "allow_formatted": False,
                "allow_unstable_names": False,
                "allow_dangerous": False,
            }
        },
        "allow_disks": False,
        "rescan_interval": "10s",
        "sys_root": "/sys",
        "udev_root": "/run/udev",
        "dev_root": "/dev",
        "mountinfo": "/proc/1/mountinfo",
        "swaps": "/proc/swaps",
    }


def test_all_fields_in_camel_case():
    made = config(
        policy(count=8, nodeSelector={"a.b/c": "d"}, permissions="rwm", uid=0, gid=44, mode="0660"),
        allowDisks=True,
        rescanInterval="1m30s",
        devRoot="/host/dev",
    )
    assert made.rescan_interval == timedelta(seconds=90)
    assert made.policies["kvm"].mode == 0o660
    assert made.policies["kvm"].node_selector == {"a.b/c": "d"}


def test_what_is_written_out_can_be_read_again():
    made = config(policy(mode="0660"), rescanInterval="1m30s")
    written = made.model_dump_json(by_alias=True)
    assert '"rescanInterval":"90s"' in written
    assert HostDevicesConfig.model_validate_json(written) == made


@pytest.mark.parametrize(
    ("bad", "where", "reason"),
    [
        pytest.param({"nam": "x"}, ("policies", "kvm", "nam"), "Extra inputs", id="unknown-key"),
        pytest.param({"name": "x"}, ("policies", "kvm", "name"), "Extra inputs", id="name-is-key"),
        pytest.param({"subsystem": "a/b"}, ("policies", "kvm", "subsystem"), "pattern", id="slash"),
        pytest.param(
            {"subsystem": ".."}, ("policies", "kvm", "subsystem"), "pattern", id="upwards"
        ),
        pytest.param(
            {"subsystem": "scsi_generic"},
            ("policies", "kvm", "subsystem"),
            "publish the block device",
            id="raw-access-to-disks",
        ),
        pytest.param({"paths": []}, ("policies", "kvm", "paths"), "at least 1", id="no-path"),
        pytest.param({"count": 0}, ("policies", "kvm", "count"), "greater", id="count-0"),
        pytest.param({"count": 1025}, ("policies", "kvm", "count"), "1024", id="count-1025"),
        pytest.param(
            {"count": 2, "paths": ["/dev/kvm*"]},
            ("policies", "kvm"),
            "one path without wildcards",
            id="count-with-wildcard",
        ),
        pytest.param(
            {"count": 2, "paths": ["/dev/a", "/dev/b"]},
            ("policies", "kvm"),
            "one path without wildcards",
            id="count-with-two-paths",
        ),
        pytest.param(
            {"count": 2, "subsystem": "block"}, ("policies", "kvm"), "one disk", id="count-of-disk"
        ),
        pytest.param(
            {"permissions": "rx"}, ("policies", "kvm", "permissions"), "rwm", id="letters"
        ),
        pytest.param(
            {"permissions": "rr"}, ("policies", "kvm", "permissions"), "twice", id="twice"
        ),
        pytest.param({"mode": 660}, ("policies", "kvm", "mode"), "in quotes", id="mode-as-number"),
        pytest.param({"mode": "0888"}, ("policies", "kvm", "mode"), "octal", id="mode-not-octal"),
        pytest.param({"gid": -1}, ("policies", "kvm", "gid"), "greater", id="gid"),
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
        pytest.param({"rescanInterval": ""}, "rescanInterval", "not a duration", id="empty"),
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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("Kvm", "pattern", id="upper-case"),
        pytest.param("-kvm", "pattern", id="begins-with-a-hyphen"),
        pytest.param("k" * 41, "40", id="too-long"),
    ],
)
def test_a_bad_name_of_a_policy_is_refused_with_the_name(name, reason):
    with pytest.raises(ValidationError) as caught:
        HostDevicesConfig.model_validate({"policies": {name: policy()}})
    (error,) = caught.value.errors()
    assert error["loc"][:2] == ("policies", name)
    assert reason in error["msg"]


def test_by_default_nothing_is_published():
    assert HostDevicesConfig().enabled_policies == {}


def test_enabled_policies_are_sorted_by_name():
    made = HostDevicesConfig.model_validate(
        {"policies": {"b": policy(), "c": policy(enabled=False), "a": policy()}}
    )
    assert list(made.enabled_policies) == ["a", "b"]


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
    assert error["loc"] == ("policies", "kvm", "paths", 1)
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
