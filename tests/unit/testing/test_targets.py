"""Targets: their kinds, their form on the command line, and their node plugin configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from drakit.testing.conformance import targets
from drakit.testing.conformance.errors import TargetError
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
    target = parse_target("backend:serve --at {directory}/a.sock --state {root}/run", setup="true")
    assert isinstance(target, BackendTarget)
    command = target.command(ROOT)
    assert command is not None
    assert command.line == f"serve --at {ROOT}/backends/a.sock --state {ROOT}/run"
    assert command.environment == {"DRAKIT_BACKENDS": f"{ROOT}/backends"}
    assert target.config(ROOT) == {"backends": {"enabled": True, "directory": f"{ROOT}/backends"}}
    assert not target.lives_on


def test_a_device_plugin_is_started_when_it_can_register():
    target = parse_target("device-plugin:serve")
    assert isinstance(target, DevicePluginTarget)
    command = target.command(ROOT)
    assert command is not None
    assert command.waits_for == ROOT / "device-plugins" / "kubelet.sock"
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
        parse_target(text)


def test_a_program_has_no_configuration_of_ours():
    with pytest.raises(TargetError, match="is for Python drivers"):
        parse_target("backend:serve", config={"a": 1})
