from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, field_validator

from drakit import AllocatedDevice, DeviceParameters, NoParameters
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


def device(*configs: dict[str, Any]) -> AllocatedDevice:
    return AllocatedDevice(name="cam-0", pool="", request="main", configs=configs)


def checked(kind, *configs, lenient=False):
    return with_parameters(device(*configs), kind, driver=DRIVER, index=2, lenient=lenient)


def refusal(kind, *configs) -> str:
    with pytest.raises(BadParametersError) as raised:
        checked(kind, *configs)
    assert raised.value.index == 2
    return str(raised.value)


def test_nothing_is_merged_below_the_top():
    known = checked(Greedy, {"options": {"x": 1}}, {"options": {"y": 2}})
    assert known.parameters.options == {"y": 2}


def test_a_field_has_one_name_in_class_and_claim_so_that_the_last_word_can_be_had():
    assert checked(Parameters, {"frameRate": 60}, {"frameRate": 90}).parameters.frame_rate == 90
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
    assert refusal(kind, {"colour": "red"}) == (
        f"the opaque parameters for driver {DRIVER} are invalid: colour: is not a known key; "
        f"known keys: {known}; correct them in the claim, its template or its DeviceClass, and "
        f"recreate the pod"
    )


@pytest.mark.parametrize(
    "config",
    [{"mode": "medium"}, {"lenses": [{"colour": "red"}]}],
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
        pytest.param(Parameters, [{"colour": "red"}], id="unknown-key-to-a-newer-driver"),
        pytest.param(Required, [], id="configs-that-were-not-rebuilt"),
        pytest.param(Odd, [{"mode": "medium"}], id="a-validator-that-fails"),
    ],
)
def test_an_unprepare_continues_without_invalid_parameters(kind, configs):
    known = checked(kind, *configs, lenient=True)
    assert known.parameters is None
    assert known.configs == tuple(configs)


def test_a_validator_that_changes_what_it_gets_leaves_the_configs_as_they_are():
    known = checked(Greedy, {"options": {"mode": "fast"}})
    assert known.parameters.options == {}
    assert known.configs == ({"options": {"mode": "fast"}},)


def test_a_driver_without_parameters_refuses_any_in_one_sentence():
    assert refusal(NoParameters, {"mode": "fast"}, {"colour": "red"}) == (
        f"driver {DRIVER} accepts no opaque parameters; remove them from the claim, its "
        f"template or its DeviceClass, and recreate the pod"
    )


@pytest.mark.parametrize("configs", [[], [{}]], ids=["no-config", "an-empty-one"])
def test_a_driver_without_parameters_takes_a_claim_without_any(configs):
    assert checked(NoParameters, *configs).parameters == NoParameters()
