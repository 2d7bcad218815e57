"""The types of configuration and parameters: inferred from ``Driver[Config, Parameters]``."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import pytest
import typing_extensions

from drakit import DeviceParameters, DevicePolicy, Driver, DriverConfig, NoParameters


class LensConfig(DriverConfig):
    focal_length: int = 50


class ZoomConfig(LensConfig):
    reach: int = 3


class OtherConfig(DriverConfig):
    pass


class Exposure(DeviceParameters):
    seconds: int = 1


class LensPolicy(DevicePolicy):
    port: str = "a"


ConfigT = TypeVar("ConfigT", bound=DriverConfig)
ParametersT = TypeVar("ParametersT", bound=DeviceParameters)
DefaultT = typing_extensions.TypeVar("DefaultT", bound=DriverConfig, default=LensConfig)


class Generics(Driver[ConfigT, ParametersT], Generic[ConfigT, ParametersT]):
    pass


class Swapped(Generics[ConfigT, ParametersT], Generic[ParametersT, ConfigT]):
    pass


class HalfBound(Swapped[Exposure, ConfigT]):
    pass


class WithDefault(Driver[DefaultT]):
    pass


class Typed(Driver[LensConfig, Exposure]):
    pass


class Mixin(Driver):
    pass


class Explicit(Driver):
    config_type = LensConfig
    parameters_type = Exposure


class Agrees(Driver[LensConfig, DeviceParameters]):
    config_type = ZoomConfig
    parameters_type = Exposure


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        pytest.param(Mixin, (DriverConfig, None), id="neither"),
        pytest.param(Driver[LensConfig], (LensConfig, None), id="config"),
        pytest.param(Driver[LensConfig, Exposure], (LensConfig, Exposure), id="both"),
        pytest.param(Driver[LensConfig, NoParameters], (LensConfig, NoParameters), id="no-params"),
        pytest.param(Driver[Any, Any], (DriverConfig, None), id="any"),
        pytest.param(Typed, (LensConfig, Exposure), id="a-subclass"),
        pytest.param(Generics, (DriverConfig, None), id="open"),
        pytest.param(Generics[LensConfig, Exposure], (LensConfig, Exposure), id="generic-base"),
        pytest.param(Swapped[Exposure, LensConfig], (LensConfig, Exposure), id="in-another-order"),
        pytest.param(HalfBound[LensConfig], (LensConfig, Exposure), id="in-two-steps"),
        pytest.param(WithDefault, (LensConfig, None), id="default-of-a-generic-base"),
        pytest.param(WithDefault[OtherConfig], (OtherConfig, None), id="other-than-the-default"),
        pytest.param(Explicit, (LensConfig, Exposure), id="explicit"),
        pytest.param(Agrees, (ZoomConfig, Exposure), id="explicit-takes-precedence"),
    ],
)
def test_the_types_of_a_driver(kind, types):
    class Made(kind):
        pass

    assert (Made.config_type, Made.parameters_type) == types


def test_the_third_type_is_that_of_policies_and_most_drivers_have_none():
    class Made(Driver[LensConfig, NoParameters, LensPolicy]):
        pass

    assert (Made.config_type, Made.policy_type) == (LensConfig, LensPolicy)
    assert (Typed.policy_type, Generics.policy_type) == (None, None)


def test_a_base_without_types_takes_nothing_away():
    class Made(Mixin, Typed):
        pass

    assert (Made.config_type, Made.parameters_type) == (LensConfig, Exposure)


@pytest.mark.parametrize(
    ("bases", "attribute", "value", "text"),
    [
        pytest.param(
            Driver[LensConfig],
            "config_type",
            OtherConfig,
            "Made: config_type is OtherConfig, but the type argument of Driver is LensConfig",
            id="config",
        ),
        pytest.param(
            Driver[LensConfig, Exposure],
            "parameters_type",
            None,
            "Made: parameters_type is None, but the type argument of Driver is Exposure",
            id="parameters",
        ),
        pytest.param(
            HalfBound[LensConfig],
            "parameters_type",
            NoParameters,
            "parameters_type is NoParameters, but",
            id="generic-base",
        ),
        pytest.param(
            Typed, "config_type", OtherConfig, "config_type is OtherConfig", id="subclass"
        ),
    ],
)
def test_types_that_contradict_each_other_are_refused_with_the_class(bases, attribute, value, text):
    with pytest.raises(TypeError, match=text):

        class Made(bases):
            locals()[attribute] = value


@pytest.mark.parametrize("given", [Exposure | NoParameters, Exposure | None, None], ids=str)
def test_an_argument_that_is_not_a_class_is_refused_and_not_ignored(given):
    with pytest.raises(TypeError, match=r"of Driver is not a class; .* or set parameters_type"):

        class Made(Driver[LensConfig, given]):
            pass

    class Set(Driver[LensConfig, Exposure | NoParameters]):
        parameters_type = Exposure

    assert Set.parameters_type is Exposure


def test_a_type_that_is_text_must_be_set():
    with pytest.raises(
        TypeError, match=r"'LensConfig' of Driver is a string; .* or set config_type"
    ):

        class Made(Driver["LensConfig"]):
            pass

    class Set(Driver["LensConfig"]):
        config_type = LensConfig

    assert Set.config_type is LensConfig
