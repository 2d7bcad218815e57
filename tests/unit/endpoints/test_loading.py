from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from pydantic import field_validator

from drakit import DevicePolicy, Driver, PolicyResource
from drakit.driver import DriverConfig
from drakit_nodeplugin.config import ConfigError, DriverEntry, load_config
from drakit_nodeplugin.endpoints.contract import DriverTraits, PolicyTraits
from drakit_nodeplugin.endpoints.python import loading
from drakit_nodeplugin.endpoints.python.loading import load_drivers
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


class BadName(Lens):
    name = "Lens_Of_Mine"


class NameOfADigit(Lens):
    name = "3d.example.com"


class NoName(Lens):
    name = None


class OtherConfig(Driver):
    name = "lens.example.com"
    config_type = dict

    async def devices(self):
        yield []


class Untyped(Lens):
    parameters_type = LensConfig


class Undecided(Lens):
    side_effects = None


class Restless(Lens):
    health_period_seconds = 0


class NoDevices(Driver[LensConfig]):
    name = "lens.example.com"


class UselessReset(Lens):
    side_effects = False

    def reset(self, device):
        raise NotImplementedError


class LensPolicy(DevicePolicy):
    pass


LENS_POLICIES = PolicyResource(group="lens.example.com", version="v1", plural="lenspolicies")


class PoliciesWithoutType(Lens):
    policy_resource = LENS_POLICIES


class PoliciesOfAnotherType(Lens):
    policy_type = LensConfig
    policy_resource = LENS_POLICIES


class PoliciesOfNothing(Lens):
    policy_type = LensPolicy
    policy_resource = "lenspolicies"


class PoliciesUnused(Lens):
    policy_type = LensPolicy
    policy_resource = LENS_POLICIES


class WithPolicies(PoliciesUnused):
    def apply_policies(self, policies):
        raise NotImplementedError


class BrokenConfig(DriverConfig):
    @field_validator("*", mode="before", check_fields=False)
    def _look(cls, value):
        raise KeyError("focal")

    focal_length: int = 50


class FailsToRead(Driver[BrokenConfig]):
    name = "lens.example.com"

    async def devices(self):
        yield []


class NameOfNothing(Lens):
    @classmethod
    def name_of(cls, config):
        return None


class Checked(Lens):
    side_effects = False

    async def check(self, claim, device):
        return True


class Declared(Lens):
    side_effects = True


class Undone(Lens):
    def unprepare(self, claim, device):
        raise NotImplementedError


class UndoneByBatch(Lens):
    def unprepare_claims(self, claims):
        raise NotImplementedError


class SetBack(Lens):
    def reset(self, device):
        raise NotImplementedError


class Harmless(Undone):
    side_effects = False


class Listing(NoDevices):
    async def devices(self):
        yield []


def load(*entries: dict):
    node = StaticNode(name="node-1")
    return load_drivers([DriverEntry(**entry) for entry in entries], file=FILE, node=node)


def test_a_driver_can_be_configured_by_its_name_as_well():
    (loaded,) = load({"driver": f"{HERE}:Lens", "name": Lens.name})
    assert loaded.name == Lens.name


def test_a_class_is_found_by_module_and_made_with_its_config():
    (loaded,) = load({"driver": f"{HERE}:Lens", "config": {"focalLength": 35}})
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
    ("kind", "traits"),
    [
        pytest.param("Lens", DriverTraits(side_effects=False), id="nothing-to-undo"),
        pytest.param("Undone", DriverTraits(side_effects=True), id="undone-by-device"),
        pytest.param(
            "UndoneByBatch",
            DriverTraits(side_effects=True, batches=frozenset({"unprepare"})),
            id="undone-by-batch",
        ),
        pytest.param("SetBack", DriverTraits(side_effects=True, resets=True), id="reset"),
        pytest.param("Declared", DriverTraits(side_effects=True), id="declared-with"),
        pytest.param("Harmless", DriverTraits(side_effects=False), id="declared-without"),
        pytest.param(
            "WithPolicies",
            DriverTraits(
                side_effects=False, policies=PolicyTraits(resource=LENS_POLICIES, type=LensPolicy)
            ),
            id="with-policies",
        ),
        pytest.param("Checked", DriverTraits(side_effects=False, checks=True), id="checked"),
    ],
)
def test_the_class_of_a_driver_shows_the_calls_that_it_needs(kind, traits):
    (loaded,) = load({"driver": f"{HERE}:{kind}"})
    assert loaded.traits == traits


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
        *(
            pytest.param(
                [{"driver": f"{HERE}:{kind}"}], rf"\.driver: {HERE}:{kind} {sentence}", id=id
            )
            for kind, sentence, id in [
                ("NoName", "has no name", "no-name"),
                ("OtherConfig", "has a config_type that is not", "config-of-another-type"),
                ("Untyped", "has a parameters_type that is not", "parameters-of-another-type"),
                ("Undecided", "has side_effects set to None", "neither-true-nor-false"),
                ("Restless", "has health_period_seconds set to 0", "no-period"),
                ("PoliciesWithoutType", "has only one of policy_type and", "policies-half"),
                ("PoliciesOfAnotherType", "has a policy_type that is not", "policies-type"),
                ("PoliciesOfNothing", "has a policy_resource that is not", "policies-resource"),
                ("PoliciesUnused", "has a policy_type, but does not define", "policies-unused"),
                ("NoDevices", "does not define devices; this is a bug", "no-devices"),
                (
                    "UselessReset",
                    "defines reset, but sets side_effects to False",
                    "reset-without-effects",
                ),
                ("NameOfNothing", "has the name None, which is not a DNS", "chooses-no-name"),
            ]
        ),
        pytest.param(
            [{"driver": f"{HERE}:FailsToRead", "config": {"focalLength": 1}}],
            r"drivers\[0\].config: .*FailsToRead fails to read it: KeyError: 'focal'",
            id="fails-to-read-its-config",
        ),
        pytest.param(
            [{"driver": f"{HERE}:LensConfig"}], "is not a class derived from", id="no-driver"
        ),
        pytest.param([{"driver": f"{HERE}:BadName"}], "is not a DNS subdomain", id="bad-name"),
        pytest.param(
            [{"driver": f"{HERE}:NameOfADigit"}], "begins with a letter", id="no-cdi-vendor"
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
        pytest.param(
            "drivers: [{driver: hostdev}]\ncdiDirectory: cdi",
            "cdiDirectory: must be an absolute path",
            id="relative-path",
        ),
        pytest.param(
            "drivers: [{driver: hostdev, names: x}]",
            r"drivers\[0\].names: is not a known key",
            id="unknown-key-of-a-driver",
        ),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, sentence):
    path = tmp_path / "plugin.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_config(path)


def test_flags_come_before_the_file(tmp_path):
    path = tmp_path / "plugin.yaml"
    path.write_text("drivers: [{driver: hostdev}]\nkubeletRoot: /var/lib/kubelet\n")
    config = load_config(path, kubeletRoot=Path("/data/kubelet"), cdiDirectory=None)
    assert config.kubelet_root == Path("/data/kubelet")
    assert config.cdi_directory == Path("/var/run/cdi")


@pytest.mark.parametrize(
    ("kind", "warned"),
    [
        pytest.param("Lens", True, id="nothing-undoes-its-prepare"),
        pytest.param("Checked", False, id="without-side-effects"),
        pytest.param("Declared", True, id="nothing-undoes-what-it-declares"),
        pytest.param("Undone", False, id="undone-by-device"),
        pytest.param("UndoneByBatch", False, id="undone-by-batch"),
        pytest.param("SetBack", False, id="undone-by-reset"),
        pytest.param("Listing", False, id="without-a-prepare-of-its-own"),
    ],
)
def test_side_effects_that_nothing_undoes_are_warned_of(kind, warned, caplog):
    load({"driver": f"{HERE}:{kind}"})
    assert ("define unprepare" in caplog.text) is warned
