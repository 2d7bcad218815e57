"""Opaque parameters: merged, converted from their versions, and refused with the remedy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, field_validator

from drakit import AllocatedDevice, DeviceParameters, NoParameters, ParameterVersion
from drakit_driver.runtime.failures import BadParametersError
from drakit_driver.runtime.parameters import with_parameters

DRIVER = "camera.example.com"


class Lens(DeviceParameters):
    focal_length: Annotated[int, Field(gt=0)] = 35


class Parameters(DeviceParameters):
    mode: Literal["fast", "slow"] = "slow"
    frame_rate: Annotated[int, Field(le=120)] = 30
    lenses: tuple[Lens, ...] = ()
    password: Annotated[str, Field(max_length=8)] = ""


class Required(DeviceParameters):
    mode: str


class Odd(DeviceParameters):
    mode: str = ""

    @field_validator("mode")
    @classmethod
    def _known(cls, mode: str) -> str:
        return {"fast": "f"}[mode]


class Greedy(DeviceParameters):
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("options", mode="before")
    @classmethod
    def _pop(cls, options: dict[str, Any]) -> dict[str, Any]:
        options.pop("mode", None)
        return options


def checked(kind, *configs, versions=(), lenient=False) -> Any:
    device = AllocatedDevice(name="cam-0", pool="", request="main", configs=configs)
    made = with_parameters(device, kind, driver=DRIVER, index=2, versions=versions, lenient=lenient)
    assert made.configs == configs, "the driver still sees what users wrote"
    return made.parameters


def refusal(kind, *configs, **options: Any) -> str:
    with pytest.raises(BadParametersError) as raised:
        checked(kind, *configs, **options)
    assert raised.value.index == 2
    return str(raised.value)


def test_nothing_is_merged_below_the_top():
    found = checked(Greedy, {"options": {"x": 1}}, {"options": {"y": 2}})
    assert found.options == {"y": 2}


def test_a_field_has_one_name_in_class_and_claim_so_that_the_last_word_can_be_had():
    assert checked(Parameters, {"frameRate": 60}, {"frameRate": 90}).frame_rate == 90
    for configs in ([{"frame_rate": 60}], [{"frameRate": 60}, {"frame_rate": 90}]):
        assert "frame_rate: is not a known key" in refusal(Parameters, *configs)
    assert Parameters(frame_rate=60).frame_rate == 60, "but not in Python"


INVALID = {
    "a-field-as-the-manifest-has-it": (
        {"frameRate": 1000},
        "frameRate: Input should be less than or equal to 120",
    ),
    "a-field-in-a-list": (
        {"lenses": [{}, {"focalLength": 0}]},
        "lenses[1].focalLength: Input should be greater than 0",
    ),
    "a-field-as-the-driver-has-it": (
        {"frame_rate": 60},
        "frame_rate: is not a known key (keys are written as in frameRate);",
    ),
    "an-empty-key": ({"": 1}, "'': is not a known key;"),
    "an-unknown-key-that-nobody-can-read": (
        {"a\nb" + "c" * 5000: 1},
        f"'a\\nb{'c' * (64 - 5)}...: is not a known key",
    ),
    "all-problems": (
        {"mode": "medium", "frameRate": []},
        "mode: Input should be 'fast' or 'slow'; frameRate: Input should be a valid integer",
    ),
    "more-problems-than-fit": (
        {f"key{number}": 1 for number in range(9)},
        "key4: is not a known key; and more;",
    ),
}


@pytest.mark.parametrize(("config", "problem"), INVALID.values(), ids=INVALID)
def test_errors_name_the_field(config, problem):
    text = refusal(Parameters, config)
    assert text.startswith(f"the opaque parameters for driver {DRIVER} are invalid: ")
    assert problem in text
    assert text == refusal(Parameters, config)


class Many(DeviceParameters):
    """Parameters with too many keys, and one unreadable key."""

    ten: int = Field(default=0, alias="a\nb" + "c" * 5000)
    one: int = 0
    two: int = 0
    three: int = 0
    four: int = 0
    five: int = 0
    six: int = 0
    seven: int = 0
    eight: int = 0
    nine: int = 0
    eleven: int = 0
    twelve: int = 0


class Empty(DeviceParameters):
    """Parameters without keys."""


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        pytest.param(Parameters, "mode, frameRate, lenses, password", id="as-users-write-them"),
        pytest.param(
            Many,
            f"'a\\nb{'c' * (64 - 5)}..., one, two, three, four, five, six, seven, eight, nine "
            f"and 2 more",
            id="a-bounded-number-and-length",
        ),
        pytest.param(Empty, "none", id="no-keys"),
    ],
)
def test_an_unknown_key_names_the_known_ones_and_where_to_correct_it(kind, known):
    assert refusal(kind, {"color": "red"}) == (
        f"the opaque parameters for driver {DRIVER} are invalid: color: is not a known key; "
        f"known keys: {known}; correct them in the claim, its template or its DeviceClass, and "
        f"recreate the pod"
    )


@pytest.mark.parametrize(
    "config",
    [{"mode": "medium"}, {"lenses": [{"color": "red"}]}],
    ids=["another-problem", "below-a-path"],
)
def test_the_known_keys_are_named_for_unknown_ones_of_the_type_itself(config):
    assert "known keys:" not in refusal(Parameters, config)


def test_a_field_that_is_missing_is_named():
    assert "mode: Field required" in refusal(Required)


def test_errors_do_not_repeat_values_because_they_may_be_secrets():
    assert "hunter" not in refusal(Parameters, {"password": "hunter2hunter2"})
    assert "hunter" not in refusal(Odd, {"mode": "hunter2"})


def test_a_validator_that_fails_is_a_fault_of_the_driver(caplog):
    text = refusal(Odd, {"mode": "medium"})
    assert f"driver {DRIVER} failed with KeyError" in text
    assert [record.message for record in caplog.records] == ["driver failed"]


@pytest.mark.parametrize(
    ("kind", "configs"),
    [
        pytest.param(Parameters, [{"color": "red"}], id="unknown-key-to-a-newer-driver"),
        pytest.param(Required, [], id="configs-that-were-not-rebuilt"),
        pytest.param(Odd, [{"mode": "medium"}], id="a-validator-that-fails"),
    ],
)
def test_an_unprepare_continues_without_invalid_parameters(kind, configs):
    assert checked(kind, *configs, lenient=True) is None


def test_a_validator_that_changes_what_it_gets_leaves_the_configs_as_they_are():
    assert checked(Greedy, {"options": {"mode": "fast"}}).options == {}


def test_a_driver_without_parameters_refuses_any_in_one_sentence():
    assert refusal(NoParameters, {"mode": "fast"}, {"color": "red"}) == (
        f"driver {DRIVER} accepts no opaque parameters; remove them from the claim, its "
        f"template or its DeviceClass, and recreate the pod"
    )


@pytest.mark.parametrize("configs", [[], [{}]], ids=["no-config", "an-empty-one"])
def test_a_driver_without_parameters_takes_a_claim_without_any(configs):
    assert checked(NoParameters, *configs) == NoParameters()


# ------------------------------------------------------------ versions

GROUP = "gpu.resource.example.com"
TAIL = "correct them in the claim, its template or its DeviceClass, and recreate the pod"


class Gpu(DeviceParameters):
    interval: Literal["Short", "Long"] = "Short"
    partitions: Annotated[int, Field(le=8)] = 1


class Slicing(DeviceParameters):
    interval: str = "Short"


class Alpha(DeviceParameters):
    """The first version, with another layout."""

    slicing: Slicing | None = None
    partition_count: int | None = None
    required: str = ""


class Mig(Gpu):
    """Another kind of parameters, which only some devices have."""

    profile: str = "1g"


class Needs(DeviceParameters):
    a: int
    b: int


def from_alpha(old: Alpha) -> Gpu:
    given: dict[str, Any] = {}
    if old.slicing is not None:
        given["interval"] = old.slicing.interval
    if old.partition_count is not None:
        if old.partition_count == 7:
            raise ValueError("partitionCount: 7 partitions do not fit on any GPU")
        given["partitions"] = old.partition_count
    return Gpu(**given)


VERSIONS = (
    ParameterVersion(f"{GROUP}/v1", "GpuConfig"),
    ParameterVersion(f"{GROUP}/v1", "MigConfig", type=Mig),
    ParameterVersion(f"{GROUP}/v1alpha1", "GpuConfig", type=Alpha, convert=from_alpha),
    ParameterVersion("other.example.com/v3", "GpuSettings"),
)


def of(version: str, kind: str = "GpuConfig", **fields: Any) -> dict[str, Any]:
    return {"apiVersion": f"{GROUP}/{version}", "kind": kind, **fields}


PARAMETERS = {
    "none": ([], Gpu()),
    "without-a-version": ([{"partitions": 2}], Gpu(partitions=2)),
    "the-present-version": ([of("v1", partitions=2)], Gpu(partitions=2)),
    "an-earlier-version": ([of("v1alpha1", slicing={"interval": "Long"})], Gpu(interval="Long")),
    "the-version-of-another-project": (
        [{"apiVersion": "other.example.com/v3", "kind": "GpuSettings", "partitions": 2}],
        Gpu(partitions=2),
    ),
    "another-kind": ([of("v1", "MigConfig", profile="2g")], Mig(profile="2g")),
    "two-versions-are-merged-by-key": (
        [of("v1alpha1", slicing={"interval": "Long"}), of("v1", partitions=2)],
        Gpu(interval="Long", partitions=2),
    ),
    "the-last-version-takes-precedence": (
        [of("v1", partitions=2), of("v1alpha1", partitionCount=3)],
        Gpu(partitions=3),
    ),
    "a-kind-replaces-another-kind": (
        [of("v1", partitions=2), of("v1", "MigConfig", profile="2g")],
        Mig(profile="2g"),
    ),
    "with-and-without-a-version": (
        [of("v1", partitions=2), {"interval": "Long"}],
        Gpu(partitions=2, interval="Long"),
    ),
}


@pytest.mark.parametrize(("configs", "parameters"), PARAMETERS.values(), ids=PARAMETERS)
def test_the_parameters_of_configs_of_several_versions(configs, parameters):
    found = checked(Gpu, *configs, versions=VERSIONS)
    assert (type(found), found) == (type(parameters), parameters)


def test_configs_of_one_version_complete_each_other():
    versions = (ParameterVersion(f"{GROUP}/v1", "Needs"),)
    both = (of("v1", "Needs", a=1), of("v1", "Needs", b=2))
    assert checked(Needs, *both, versions=versions) == Needs(a=1, b=2)


def test_parameters_from_before_there_were_versions_are_converted():
    versions = (*VERSIONS, ParameterVersion("", type=Alpha, convert=from_alpha))
    assert checked(Gpu, {"partitionCount": 3}, versions=versions) == Gpu(partitions=3)
    assert checked(Gpu, of("v1", partitions=2), versions=versions) == Gpu(partitions=2)


UNKNOWN_VERSIONS = {
    "a-later-version": (of("v2"), f"{GROUP}/v2 GpuConfig"),
    "an-unknown-kind": (of("v1", "NicConfig"), f"{GROUP}/v1 NicConfig"),
    "no-kind": ({"apiVersion": f"{GROUP}/v1"}, f"{GROUP}/v1 ''"),
    "no-version": ({"kind": "GpuConfig"}, "'' GpuConfig"),
    "no-texts": ({"apiVersion": ["v1"], "kind": {}}, "? ?"),
    "hostile": ({"apiVersion": "a\n" + "x" * 9000, "kind": "K"}, f"'a\\n{'x' * 60}... K"),
}


@pytest.mark.parametrize(("config", "given"), UNKNOWN_VERSIONS.values(), ids=UNKNOWN_VERSIONS)
def test_an_unknown_version_names_the_known_ones_and_where_to_correct_it(config, given):
    assert refusal(Gpu, config, versions=VERSIONS) == (
        f"the opaque parameters for driver {DRIVER} have apiVersion and kind {given}, which the "
        f"driver does not know; known: {GROUP}/v1 GpuConfig, {GROUP}/v1 MigConfig, "
        f"{GROUP}/v1alpha1 GpuConfig, other.example.com/v3 GpuSettings; {TAIL}"
    )


def test_a_driver_without_versions_takes_them_for_keys():
    assert "apiVersion: is not a known key" in refusal(Gpu, of("v1"))


INVALID_IN_THEIR_VERSION = {
    "a-key-of-another-version": (
        [of("v1alpha1", partitions=2)],
        "partitions: is not a known key; known keys: slicing, partitionCount, required",
    ),
    "the-words-of-the-conversion": (
        [of("v1alpha1", partitionCount=7)],
        "partitionCount: 7 partitions do not fit on any GPU",
    ),
    "invalid-after-the-conversion": (
        [of("v1alpha1", partitionCount=9)],
        "partitions: Input should be less than or equal to 8",
    ),
}


@pytest.mark.parametrize(
    ("configs", "problem"), INVALID_IN_THEIR_VERSION.values(), ids=INVALID_IN_THEIR_VERSION
)
def test_invalid_parameters_are_explained_with_the_keys_of_their_version(configs, problem):
    expected = f"the opaque parameters for driver {DRIVER} are invalid: {problem}; {TAIL}"
    assert refusal(Gpu, *configs, versions=VERSIONS) == expected


@pytest.mark.parametrize(
    "convert",
    [lambda old: {}, lambda old: old.missing, lambda old: old],
    ids=["dict", "bug", "old"],
)
def test_a_conversion_that_fails_is_a_fault_of_the_driver(convert, caplog):
    versions = (ParameterVersion(f"{GROUP}/v1", "GpuConfig", type=Alpha, convert=convert),)
    assert f"driver {DRIVER} failed with" in refusal(Gpu, of("v1"), versions=versions)
    assert [record.message for record in caplog.records] == ["driver failed"]


@pytest.mark.parametrize("config", [of("v2"), of("v1alpha1", partitionCount=7)])
def test_an_unprepare_continues_without_parameters_of_a_version_that_is_gone(config):
    assert checked(Gpu, config, versions=VERSIONS, lenient=True) is None
