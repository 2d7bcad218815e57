"""
The opaque parameters of simulated devices, in a claim or a DeviceClass.

The driver only shows them to the container. They are typed to show the consequences of a mistake.

It must not know claims or devices.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from drakit import DeviceParameters

OUR_VARIABLES = "SIMULATED_"
"""The prefix of the driver's own environment variables."""

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)]


class SimulatedParameters(DeviceParameters):
    """Opaque parameters of simulated devices. All of them are optional."""

    sharing: Literal["exclusive", "timeSlicing"] = "exclusive"
    """The mode in which the containers of a claim share a device."""

    time_slice_milliseconds: int | None = Field(default=None, ge=1, le=1000)
    """The length of a time slice. Valid only with ``timeSlicing``."""

    vlan: int | None = Field(default=None, ge=1, le=4094)
    """The VLAN of an interface."""

    env: dict[Variable, Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")]] = Field(
        default_factory=dict, max_length=16
    )
    """Environment variables of the containers. If two devices set the same variable in one
    container, the last value applies."""

    @model_validator(mode="after")
    def _time_slices_are_for_time_slicing(self) -> Self:
        if self.time_slice_milliseconds is not None and self.sharing != "timeSlicing":
            raise ValueError("timeSliceMilliseconds needs sharing: timeSlicing")
        if ours := [name for name in self.env if name.startswith(OUR_VARIABLES)]:
            raise ValueError(f"env: {ours[0]} is one of the driver's own variables")
        return self
