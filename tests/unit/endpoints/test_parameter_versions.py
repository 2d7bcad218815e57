"""Versions of opaque parameters: accepted, converted, merged, and refused with the known ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from drakit import AllocatedDevice, DeviceParameters, ParameterVersion
from drakit_driver.runtime.failures import BadParametersError
from drakit_driver.runtime.parameters import with_parameters

DRIVER = "gpu.example.com"
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


def checked(*configs: dict[str, Any], versions=VERSIONS, kind=Gpu, lenient=False) -> Any:
    device = AllocatedDevice(name="gpu-0", pool="", request="main", configs=configs)
    made = with_parameters(device, kind, driver=DRIVER, index=1, versions=versions, lenient=lenient)
    assert made.configs == configs, "the driver still sees what users wrote"
    return made.parameters


def refusal(*configs: dict[str, Any], **options: Any) -> str:
    with pytest.raises(BadParametersError) as raised:
        checked(*configs, **options)
    assert raised.value.index == 1
    return str(raised.value)


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
    found = checked(*configs)
    assert (type(found), found) == (type(parameters), parameters)


def test_configs_of_one_version_complete_each_other():
    versions = (ParameterVersion(f"{GROUP}/v1", "Needs"),)
    both = (of("v1", "Needs", a=1), of("v1", "Needs", b=2))
    assert checked(*both, versions=versions, kind=Needs) == Needs(a=1, b=2)


def test_parameters_from_before_there_were_versions_are_converted():
    versions = (*VERSIONS, ParameterVersion("", type=Alpha, convert=from_alpha))
    assert checked({"partitionCount": 3}, versions=versions) == Gpu(partitions=3)
    assert checked(of("v1", partitions=2), versions=versions) == Gpu(partitions=2)


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
    assert refusal(config) == (
        f"the opaque parameters for driver {DRIVER} have apiVersion and kind {given}, which the "
        f"driver does not know; known: {GROUP}/v1 GpuConfig, {GROUP}/v1 MigConfig, "
        f"{GROUP}/v1alpha1 GpuConfig, other.example.com/v3 GpuSettings; {TAIL}"
    )


def test_a_driver_without_versions_takes_them_for_keys():
    assert "apiVersion: is not a known key" in refusal(of("v1"), versions=())


INVALID = {
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


@pytest.mark.parametrize(("configs", "problem"), INVALID.values(), ids=INVALID)
def test_invalid_parameters_are_explained_with_the_keys_of_their_version(configs, problem):
    expected = f"the opaque parameters for driver {DRIVER} are invalid: {problem}; {TAIL}"
    assert refusal(*configs) == expected


@pytest.mark.parametrize(
    "convert",
    [lambda old: {}, lambda old: old.missing, lambda old: old],
    ids=["dict", "bug", "old"],
)
def test_a_conversion_that_fails_is_a_fault_of_the_driver(convert, caplog):
    versions = (ParameterVersion(f"{GROUP}/v1", "GpuConfig", type=Alpha, convert=convert),)
    assert f"driver {DRIVER} failed with" in refusal(of("v1"), versions=versions)
    assert [record.message for record in caplog.records] == ["driver failed"]


@pytest.mark.parametrize("config", [of("v2"), of("v1alpha1", partitionCount=7)])
def test_an_unprepare_continues_without_parameters_of_a_version_that_is_gone(config):
    assert checked(config, lenient=True) is None
