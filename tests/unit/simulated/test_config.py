"""Valid configurations and parameters, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from drakit_drivers.simulated import SimulatedConfig, SimulatedParameters


@pytest.mark.parametrize(
    ("config", "text"),
    [
        pytest.param({"driverName": "Sim"}, "driverName", id="driver-name-in-capitals"),
        pytest.param({"driverName": "3d.example.com"}, "driverName", id="name-of-a-digit"),
        pytest.param({"controlFile": "control.json"}, "absolute", id="relative-control-file"),
        pytest.param({"gpu": {"prefix": "GPU"}}, "gpu.prefix", id="prefix-in-capitals"),
        pytest.param({"gpu": {"driverVersion": "1.2"}}, "driverVersion", id="half-a-version"),
        pytest.param({"gpu": {"partitions": [2, 2]}}, "a size twice", id="size-twice"),
        pytest.param(
            {"gpu": {"partitions": [5]}}, r"above computeSlices \(4\)", id="too-large-a-size"
        ),
        pytest.param({"nic": {"vlans": [4095]}}, "nic.vlans.0", id="no-such-vlan"),
        pytest.param({"nic": {"prefix": "gpu"}}, "gpu.prefix", id="one-prefix-twice"),
        pytest.param(
            {"cpu": {"prefix": "nic-0"}}, "starts with nic.prefix", id="prefix-of-another"
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_name(config, text):
    with pytest.raises(ValidationError, match=text):
        SimulatedConfig.model_validate(config)


@pytest.mark.parametrize(
    ("config", "path"),
    [
        pytest.param(
            {},
            "/var/lib/kubelet/plugins/drakit.dev/drivers/simulated.drakit.dev/control.json",
            id="default",
        ),
        pytest.param(
            {"driverName": "fpga.test"},
            "/var/lib/kubelet/plugins/drakit.dev/drivers/fpga.test/control.json",
            id="of-another-name",
        ),
        pytest.param({"controlFile": "/run/c.json"}, "/run/c.json", id="given"),
    ],
)
def test_each_driver_has_a_control_file(config, path):
    assert SimulatedConfig.model_validate(config).control == Path(path)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        pytest.param({"speed": 3}, "speed", id="unknown-key"),
        pytest.param({"timeSliceMilliseconds": 5}, "sharing: timeSlicing", id="no-time-slicing"),
        pytest.param({"vlan": "all"}, "vlan", id="no-number"),
        pytest.param({"env": {"A B": "x"}}, "env", id="no-variable"),
        pytest.param({"env": {"A": "x\0"}}, "env.A", id="a-value-that-ends-early"),
        pytest.param({"env": {"SIMULATED_GPU": "x"}}, "SIMULATED_GPU is", id="our-own-variable"),
        pytest.param({"env": {f"A{n}": "" for n in range(17)}}, "env", id="too-many-variables"),
    ],
)
def test_parameters_that_cannot_be_are_refused_by_name(parameters, text):
    with pytest.raises(ValidationError, match=text):
        SimulatedParameters.model_validate(parameters)
