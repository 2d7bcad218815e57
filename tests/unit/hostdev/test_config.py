"""Valid configurations, and errors with key and reason."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import ValidationError

from drakit_drivers.hostdev.matching import check_glob, matches
from drakit_drivers.hostdev.policy import HostDevicesConfig
from tests.fakes.sysfs import policy


def config(**options) -> HostDevicesConfig:
    kvm = policy("misc", "/dev/kvm")
    return HostDevicesConfig.model_validate({"policies": {"kvm": kvm}, **options})


def test_defaults():
    assert HostDevicesConfig().model_dump(mode="json") == {
        "policies": {},
        "allow_dangerous": False,
        "rescan_interval": "10s",
        "sys_root": "/sys",
        "udev_root": "/run/udev",
        "dev_root": "/dev",
        "mountinfo": "/proc/1/mountinfo",
        "swaps": "/proc/swaps",
    }


def test_a_serialized_config_can_be_read_back():
    made = config(rescanInterval="1m30s", devRoot="/host/dev")
    assert made.rescan_interval == timedelta(seconds=90)
    written = made.model_dump_json(by_alias=True)
    assert '"rescanInterval":"90s"' in written
    assert HostDevicesConfig.model_validate_json(written) == made


@pytest.mark.parametrize(
    ("bad", "where", "reason"),
    [
        pytest.param({"allowDisks": True}, "allowDisks", "Extra inputs", id="unknown-key"),
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
        config(**bad)
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
        HostDevicesConfig.model_validate({"policies": {name: policy("misc", "/dev/kvm")}})
    (error,) = caught.value.errors()
    assert error["loc"][:2] == ("policies", name)
    assert reason in error["msg"]


@pytest.mark.parametrize(
    ("glob", "reason"),
    [
        ("kvm", "absolute path under /dev"),
        ("/etc/passwd", "absolute path under /dev"),
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
        HostDevicesConfig.model_validate({"policies": {"kvm": policy("misc", "/dev/kvm", glob)}})
    (error,) = caught.value.errors()
    assert error["loc"] == ("policies", "kvm", "match", 0, "paths", 1)
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
