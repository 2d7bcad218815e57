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


TRAITS = {
    "nothing-undoes-its-prepare": ({}, {"side_effects": False}, True),
    "nothing-undoes-its-effects": ({"side_effects": True}, {"side_effects": True}, True),
    "undone-by-device": ({"unprepare": define}, {"side_effects": True}, False),
    "undone-by-batch": (
        {"unprepare_claims": define},
        {"side_effects": True, "batches": frozenset({"unprepare"})},
        False,
    ),
    "reset": ({"reset": define}, {"side_effects": True, "resets": True}, False),
    "claim-data": ({"claim_data": True}, {"side_effects": False, "claim_data": True}, True),
    "declared-without": (
        {"unprepare": define, "side_effects": False},
        {"side_effects": False},
        False,
    ),
    "with-policies": (
        {"policy_type": LensPolicy, "policy_resource": LENS_POLICIES, "apply_policies": define},
        {"side_effects": False, "policies": PolicyTraits(resource=LENS_POLICIES, type=LensPolicy)},
        True,
    ),
    "checked": (
        {"check": define, "side_effects": False},
        {"side_effects": False, "checks": True},
        False,
    ),
    "without-a-prepare": ({"prepare": Driver.prepare}, {"side_effects": False}, False),
}


@pytest.mark.parametrize(("attributes", "traits", "warned"), TRAITS.values(), ids=TRAITS)
def test_the_class_of_a_driver_shows_the_calls_that_it_needs(
    special, attributes, traits, warned, caplog
):
    (loaded,) = load({"driver": special(**attributes)})
    assert loaded.traits == DriverTraits(**traits)
    assert ("define unprepare" in caplog.text) is warned


def test_messages_have_the_names_of_the_drivers_methods(special):
    batch = special(prepare=Driver.prepare, prepare_claims=define, check=define)
    (loaded,) = load({"driver": batch})
    named = [loaded.traits.method(each) for each in ("prepare", "check", "unprepare")]
    assert named == ["prepare_claims", "check", "unprepare"]


def versions(*given: object) -> dict[str, object]:
    return {"parameters_type": NoParameters, "parameter_versions": [*given]}


CONTRADICTIONS = {
    "no-name": ({"name": None}, "has no name"),
    "bad-name": ({"name": "Lens_Of_Mine"}, ".*is not a DNS subdomain"),
    "no-cdi-vendor": ({"name": "3d.example.com"}, ".*begins with a letter"),
    "parameters": ({"parameters_type": LensConfig}, "has a parameters_type that is not"),
    "side-effects": ({"side_effects": None}, "has side_effects set to None"),
    "text": ({"metadata_files": "no"}, "has metadata_files set to 'no', which is neither"),
    "no-period": ({"health_period_seconds": 0}, "has health_period_seconds set to 0"),
    "policies-without-type": (
        {"policy_resource": LENS_POLICIES},
        "has only one of policy_type and",
    ),
    "policies-of-another-type": (
        {"policy_type": LensConfig, "policy_resource": LENS_POLICIES},
        "has a policy_type that is not",
    ),
    "policies-of-nothing": (
        {"policy_type": LensPolicy, "policy_resource": "lenspolicies"},
        "has a policy_resource that is not",
    ),
    "policies-unused": (
        {"policy_type": LensPolicy, "policy_resource": LENS_POLICIES},
        "has a policy_type, but does not define",
    ),
    "no-devices": ({"devices": Driver.devices}, "does not define devices; this is a bug"),
    "reset-without-effects": (
        {"side_effects": False, "reset": define},
        "defines reset, but sets side_effects to False",
    ),
    "versions-of-nothing": (
        {"parameter_versions": [ParameterVersion("v1", "Lens")]},
        "has parameter_versions, but no parameters_type",
    ),
    "versions-of-another-type": (versions("v1"), "has parameter_versions that are not a tuple of"),
    "a-version-twice": (
        versions(ParameterVersion("v1", "Lens"), ParameterVersion("v1", "Lens")),
        "has the parameter version v1 Lens twice",
    ),
    "a-version-without-conversion": (
        versions(ParameterVersion("v1", "Lens", type=DeviceParameters)),
        "has a type for the parameter version v1 Lens .*: set convert",
    ),
    "a-version-of-another-type": (
        versions(ParameterVersion("v1", "Lens", type=LensConfig)),
        "has a type for the parameter version v1 Lens that is not derived from drakit.Device",
    ),
    "a-kind-without-version": (
        versions(ParameterVersion("", "Lens")),
        "has the parameter version Lens, which has no apiVersion",
    ),
    "name-of": ({"name_of": classmethod(define)}, "has the name None, which is not a DNS"),
}


@pytest.mark.parametrize(("attributes", "sentence"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_driver_that_contradicts_itself_is_refused(special, attributes, sentence):
    reference = special(**attributes)
    with pytest.raises(ConfigError, match=rf"drivers\[0\]\.driver: {reference} {sentence}"):
        load({"driver": reference})


MISTAKES = {
    "unknown": (
        [{"driver": "missing"}],
        r"plugin.yaml: drivers\[0\].driver: driver 'missing' is not installed; .*hostdev",
    ),
    "no-module": ([{"driver": "no_such_module:Thing"}], "cannot be loaded: No module named"),
    "fails-to-read-its-config": (
        [{"driver": f"{HERE}:FailsToRead", "config": {"focalLength": 1}}],
        r"drivers\[0\].config: .*FailsToRead fails to read it: KeyError: 'focal'",
    ),
    "config-type": ([{"driver": f"{HERE}:OtherConfig"}], "has a config_type that is not"),
    "no-driver": ([{"driver": f"{HERE}:LensConfig"}], "is not a class derived from"),
    "twice": (
        [{"driver": f"{HERE}:Lens"}, {"driver": f"{HERE}:Lens"}],
        r"drivers\[1\].driver: driver lens.example.com is configured twice",
    ),
    "other-name-than-configured": (
        [{"driver": f"{HERE}:Lens", "name": "lens.example.org"}],
        r"drivers\[0\].name: the name of .*:Lens is lens.example.com, not lens.example.org",
    ),
    "unknown-key": (
        [{"driver": f"{HERE}:Lens", "config": {"focalLenght": 3}}],
        r"drivers\[0\].config.focalLenght: is not a known key",
    ),
    "wrong-type": (
        [{"driver": f"{HERE}:Lens", "config": {"focalLength": "long"}}],
        r"drivers\[0\].config.focalLength: Input should be a valid integer",
    ),
}


@pytest.mark.parametrize(("entries", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_by_file_key_and_reason(entries, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load(*entries)


FAILING_MODULES = {
    "raises": ("raise ValueError('no bus')", "cannot be loaded: ValueError: no bus"),
    "exits": ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3"),
    "is-no-python": ("(", "cannot be loaded: SyntaxError: "),
    "lacks": ("import no_such_thing", "cannot be loaded: No module named"),
    "contradicts-itself": (
        "from drakit import Driver, DriverConfig\n"
        "class OneConfig(DriverConfig): ...\n"
        "class TwoConfig(DriverConfig): ...\n"
        "class Thing(Driver[OneConfig]): config_type = TwoConfig",
        "cannot be loaded: TypeError: Thing: config_type is TwoConfig, but the type argument "
        "of Driver is OneConfig; remove config_type",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), FAILING_MODULES.values(), ids=FAILING_MODULES)
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


BAD_FILES = {
    "no-file": (None, "cannot be read: No such file"),
    "no-yaml": ("drivers: [", "is not YAML"),
    "no-mapping": ("- a list", "must be a mapping"),
    "no-drivers": ("drivers: []", "yaml: no driver is configured"),
    "unknown-key": (
        "drivers: [{driver: hostdev}]\nkubeletRot: /x",
        "kubeletRot: is not a known key",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_refused(tmp_path, text, sentence):
    path = tmp_path / "plugin.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_config(path)
