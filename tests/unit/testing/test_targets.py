"""Targets: their kinds, their form on the command line, and their node plugin configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from drakit.testing.conformance import targets
from drakit.testing.conformance.facts import TargetError
from drakit.testing.conformance.targets import (
    BackendTarget,
    DevicePluginTarget,
    PythonTarget,
    parse_target,
    remapped,
)

ROOT = Path("/tmp/dk-x")


@pytest.mark.parametrize("text", ["lamp:Lamps", "my_pkg.lamp:Lamps", "simulated", "my-driver"])
def test_a_python_driver(text):
    target = parse_target(text, config={"directory": "{root}/a", "deep": [{"x": "{root}"}, 3]})
    assert isinstance(target, PythonTarget)
    assert target.config(ROOT) == {
        "drivers": [
            {"driver": text, "config": {"directory": f"{ROOT}/a", "deep": [{"x": str(ROOT)}, 3]}}
        ]
    }
    assert target.command(ROOT) is None


def test_a_backend_that_is_started_gets_its_directory():
    target = parse_target(
        "backend:serve --at {directory}/a.sock --state {root}/run",
        config={"driver": "gpu.example.com", "mounts": {"{root}/gpus": "rw"}},
        setup="true",
    )
    assert isinstance(target, BackendTarget)
    command = target.command(ROOT)
    assert command is not None
    assert command.line == f"serve --at {ROOT}/backends/target/a.sock --state {ROOT}/run"
    assert command.environment == {"DRAKIT_BACKENDS": f"{ROOT}/backends/target"}
    entry = {
        "owner": {"uid": os.geteuid()},
        "driver": "gpu.example.com",
        "mounts": {f"{ROOT}/gpus": "rw"},
    }
    assert target.config(ROOT) == {
        "backends": {
            "enabled": True,
            "directory": f"{ROOT}/backends",
            "allowed": {"target": entry},
        }
    }
    assert not target.lives_on


def test_a_device_plugin_is_started_when_it_can_register():
    target = parse_target("device-plugin:serve", config={"resources": ["vendor.example/thing"]})
    assert isinstance(target, DevicePluginTarget)
    command = target.command(ROOT)
    assert command is not None
    assert command.waits_for == ROOT / "device-plugins" / "target" / "kubelet.sock"
    assert "serve" in command.line


def test_a_device_plugin_sees_the_directory_as_it_is_where_no_mounts_can_be_made(monkeypatch):
    monkeypatch.setattr(targets, "_unshare", lambda: None)
    assert remapped("serve 'a b'", directory="/x") == "serve 'a b'"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("lamp Lamps", "lamp Lamps is not a target; give module:Class", id="words"),
        pytest.param("", "is not a target", id="nothing"),
        pytest.param("backend:", "the colon must be followed by a command", id="no-command"),
        pytest.param("unix:/no/such.sock", "there is no socket; start the backend", id="no-socket"),
    ],
)
def test_what_is_no_target_is_refused_with_a_sentence(text, sentence):
    with pytest.raises(TargetError, match=sentence):
        parse_target(text, config={"driver": "gpu.example.com"})


@pytest.mark.parametrize(
    ("text", "config", "sentence"),
    [
        pytest.param("backend:serve", None, "value backends.allowed$", id="backend"),
        pytest.param("backend:serve", {"env": ["A"]}, "has no driver: ", id="no-driver"),
        pytest.param("unix:/tmp/a.sock", None, "value backends.allowed$", id="running-backend"),
        pytest.param("device-plugin:a", None, "has no resources: ", id="device-plugin"),
    ],
)
def test_a_program_needs_its_entry(text, config, sentence):
    with pytest.raises(TargetError, match=sentence):
        parse_target(text, config=config)
