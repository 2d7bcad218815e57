from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from pydantic import field_validator

from drakit import (
    DeviceParameters,
    DevicePolicy,
    Driver,
    NoParameters,
    ParameterVersion,
    PolicyResource,
)
from drakit.driver import DriverConfig
from drakit_driver.runtime import loading
from drakit_driver.runtime.contract import DriverTraits, PolicyTraits
from drakit_nodeplugin.config import ConfigError, DriverEntry, load_config
from drakit_nodeplugin.host.drivers import load_drivers
from tests.fakes.node import StaticNode

FILE = Path("plugin.yaml")
HERE = __name__


class LensConfig(DriverConfig):
    focal_length: int = 50


class Lens(Driver[LensConfig]):
    name = "lens.example.com"

    async def devices(self):
        yield []

    async def prepare(self, claim, device):
        raise NotImplementedError


class OtherConfig(Driver):
    name = "lens.example.com"
    config_type = dict

    async def devices(self):
        yield []


class LensPolicy(DevicePolicy):
    pass


class BrokenConfig(DriverConfig):
    @field_validator("*", mode="before", check_fields=False)
    def _look(cls, value):
        raise KeyError("focal")

    focal_length: int = 50


class FailsToRead(Driver[BrokenConfig]):
    name = "lens.example.com"

    async def devices(self):
        yield []


LENS_POLICIES = PolicyResource(group="lens.example.com", version="v1", plural="lenspolicies")


def define(*arguments: object) -> None:
    """A method of a driver, which nothing calls."""


@pytest.fixture
def special(monkeypatch):
    """Make a driver that differs from `Lens` by some attributes; it is found as ``Special``."""

    def make(**attributes: object) -> str:
        kind = type("Special", (Lens,), attributes)
        monkeypatch.setattr(sys.modules[HERE], "Special", kind, raising=False)
        return f"{HERE}:Special"

    return make


def load(*entries: dict):
    node = StaticNode(name="node-1")
    return load_drivers([DriverEntry(**entry) for entry in entries], file=FILE, node=node)


def test_a_class_is_found_by_module_and_made_with_its_config():
    (loaded,) = load({"driver": f"{HERE}:Lens", "name": Lens.name, "config": {"focalLength": 35}})
    driver = loaded.make()
    assert (loaded.name, driver.config, driver.node.name) == (
        "lens.example.com",
        LensConfig(focal_length=35),
        "node-1",
    )


def test_the_drivers_that_ship_are_found_by_name():
    (loaded,) = load({"driver": "hostdev", "config": {"policies": {}}})
    assert loaded.name == "hostdev.drakit.dev"


@pytest.mark.parametrize(
    ("attributes", "traits", "warned"),
    [
        pytest.param({}, {"side_effects": False}, True, id="nothing-undoes-its-prepare"),
        pytest.param(
            {"side_effects": True}, {"side_effects": True}, True, id="nothing-undoes-its-effects"
        ),
        pytest.param({"unprepare": define}, {"side_effects": True}, False, id="undone-by-device"),
        pytest.param(
            {"unprepare_claims": define},
            {"side_effects": True, "batches": frozenset({"unprepare"})},
            False,
            id="undone-by-batch",
        ),
        pytest.param({"reset": define}, {"side_effects": True, "resets": True}, False, id="reset"),
        pytest.param(
            {"claim_data": True},
            {"side_effects": False, "claim_data": True},
            True,
            id="claim-data",
        ),
        pytest.param(
            {"unprepare": define, "side_effects": False},
            {"side_effects": False},
            False,
            id="declared-without",
        ),
        pytest.param(
            {"policy_type": LensPolicy, "policy_resource": LENS_POLICIES, "apply_policies": define},
            {
                "side_effects": False,
                "policies": PolicyTraits(resource=LENS_POLICIES, type=LensPolicy),
            },
            True,
            id="with-policies",
        ),
        pytest.param(
            {"check": define, "side_effects": False},
            {"side_effects": False, "checks": True},
            False,
            id="checked",
        ),
        pytest.param(
            {"prepare": Driver.prepare}, {"side_effects": False}, False, id="without-a-prepare"
        ),
    ],
)
def test_the_class_of_a_driver_shows_the_calls_that_it_needs(
    special, attributes, traits, warned, caplog
):
    (loaded,) = load({"driver": special(**attributes)})
    assert loaded.traits == DriverTraits(**traits)
    assert ("define unprepare" in caplog.text) is warned


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        pytest.param({"name": None}, "has no name", id="no-name"),
        pytest.param({"name": "Lens_Of_Mine"}, ".*is not a DNS subdomain", id="bad-name"),
        pytest.param({"name": "3d.example.com"}, ".*begins with a letter", id="no-cdi-vendor"),
        pytest.param(
            {"parameters_type": LensConfig}, "has a parameters_type that is not", id="parameters"
        ),
        pytest.param({"side_effects": None}, "has side_effects set to None", id="side-effects"),
        pytest.param(
            {"metadata_files": "no"}, "has metadata_files set to 'no', which is neither", id="text"
        ),
        pytest.param(
            {"health_period_seconds": 0}, "has health_period_seconds set to 0", id="no-period"
        ),
        pytest.param(
            {"policy_resource": LENS_POLICIES},
            "has only one of policy_type and",
            id="policies-without-type",
        ),
        pytest.param(
            {"policy_type": LensConfig, "policy_resource": LENS_POLICIES},
            "has a policy_type that is not",
            id="policies-of-another-type",
        ),
        pytest.param(
            {"policy_type": LensPolicy, "policy_resource": "lenspolicies"},
            "has a policy_resource that is not",
            id="policies-of-nothing",
        ),
        pytest.param(
            {"policy_type": LensPolicy, "policy_resource": LENS_POLICIES},
            "has a policy_type, but does not define",
            id="policies-unused",
        ),
        pytest.param(
            {"devices": Driver.devices}, "does not define devices; this is a bug", id="no-devices"
        ),
        pytest.param(
            {"side_effects": False, "reset": define},
            "defines reset, but sets side_effects to False",
            id="reset-without-effects",
        ),
        pytest.param(
            {"parameter_versions": [ParameterVersion("v1", "Lens")]},
            "has parameter_versions, but no parameters_type",
            id="versions-of-nothing",
        ),
        pytest.param(
            {"parameters_type": NoParameters, "parameter_versions": ["v1"]},
            "has parameter_versions that are not a tuple of",
            id="versions-of-another-type",
        ),
        pytest.param(
            {
                "parameters_type": NoParameters,
                "parameter_versions": [
                    ParameterVersion("v1", "Lens"),
                    ParameterVersion("v1", "Lens"),
                ],
            },
            "has the parameter version v1 Lens twice",
            id="a-version-twice",
        ),
        pytest.param(
            {
                "parameters_type": NoParameters,
                "parameter_versions": [ParameterVersion("v1", "Lens", type=DeviceParameters)],
            },
            "has a type for the parameter version v1 Lens .*: set convert",
            id="a-version-without-conversion",
        ),
        pytest.param(
            {
                "parameters_type": NoParameters,
                "parameter_versions": [ParameterVersion("v1", "Lens", type=LensConfig)],
            },
            "has a type for the parameter version v1 Lens that is not derived from drakit.Device",
            id="a-version-of-another-type",
        ),
        pytest.param(
            {
                "parameters_type": NoParameters,
                "parameter_versions": [ParameterVersion("", "Lens")],
            },
            "has the parameter version Lens, which has no apiVersion",
            id="a-kind-without-version",
        ),
        pytest.param(
            {"name_of": classmethod(define)}, "has the name None, which is not a DNS", id="name-of"
        ),
    ],
)
def test_a_driver_that_contradicts_itself_is_refused(special, attributes, sentence):
    reference = special(**attributes)
    with pytest.raises(ConfigError, match=rf"drivers\[0\]\.driver: {reference} {sentence}"):
        load({"driver": reference})


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        pytest.param(
            [{"driver": "missing"}],
            r"plugin.yaml: drivers\[0\].driver: driver 'missing' is not installed; .*hostdev",
            id="unknown",
        ),
        pytest.param(
            [{"driver": "no_such_module:Thing"}],
            "cannot be loaded: No module named",
            id="no-module",
        ),
        pytest.param(
            [{"driver": f"{HERE}:FailsToRead", "config": {"focalLength": 1}}],
            r"drivers\[0\].config: .*FailsToRead fails to read it: KeyError: 'focal'",
            id="fails-to-read-its-config",
        ),
        pytest.param(
            [{"driver": f"{HERE}:OtherConfig"}], "has a config_type that is not", id="config-type"
        ),
        pytest.param(
            [{"driver": f"{HERE}:LensConfig"}], "is not a class derived from", id="no-driver"
        ),
        pytest.param(
            [{"driver": f"{HERE}:Lens"}, {"driver": f"{HERE}:Lens"}],
            r"drivers\[1\].driver: driver lens.example.com is configured twice",
            id="twice",
        ),
        pytest.param(
            [{"driver": f"{HERE}:Lens", "name": "lens.example.org"}],
            r"drivers\[0\].name: the name of .*:Lens is lens.example.com, not lens.example.org",
            id="other-name-than-configured",
        ),
        pytest.param(
            [{"driver": f"{HERE}:Lens", "config": {"focalLenght": 3}}],
            r"drivers\[0\].config.focalLenght: is not a known key",
            id="unknown-key",
        ),
        pytest.param(
            [{"driver": f"{HERE}:Lens", "config": {"focalLength": "long"}}],
            r"drivers\[0\].config.focalLength: Input should be a valid integer",
            id="wrong-type",
        ),
    ],
)
def test_a_mistake_is_named_by_file_key_and_reason(entries, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load(*entries)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param(
            "raise ValueError('no bus')", "cannot be loaded: ValueError: no bus", id="raises"
        ),
        pytest.param("raise SystemExit(3)", "cannot be loaded: SystemExit: 3", id="exits"),
        pytest.param("(", "cannot be loaded: SyntaxError: ", id="is-no-python"),
        pytest.param("import no_such_thing", "cannot be loaded: No module named", id="lacks"),
        pytest.param(
            "from drakit import Driver, DriverConfig\n"
            "class OneConfig(DriverConfig): ...\n"
            "class TwoConfig(DriverConfig): ...\n"
            "class Thing(Driver[OneConfig]): config_type = TwoConfig",
            "cannot be loaded: TypeError: Thing: config_type is TwoConfig, but the type argument "
            "of Driver is OneConfig; remove config_type",
            id="contradicts-itself",
        ),
    ],
)
def test_a_module_that_fails_as_it_is_imported_is_named(tmp_path, monkeypatch, text, sentence):
    (tmp_path / "broken_vendor.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        loading,
        "entry_points",
        lambda group: [EntryPoint(name="vendor", value="broken_vendor:Thing", group=group)],
    )
    for reference in ("broken_vendor:Thing", "vendor"):
        with pytest.raises(ConfigError, match=rf"drivers\[0\].driver: {reference} {sentence}"):
            load({"driver": reference})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param(None, "cannot be read: No such file", id="no-file"),
        pytest.param("drivers: [", "is not YAML", id="no-yaml"),
        pytest.param("- a list", "must be a mapping", id="no-mapping"),
        pytest.param("drivers: []", "yaml: no driver is configured", id="no-drivers"),
        pytest.param(
            "drivers: [{driver: hostdev}]\nkubeletRot: /x",
            "kubeletRot: is not a known key",
            id="unknown-key",
        ),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, sentence):
    path = tmp_path / "plugin.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_config(path)
