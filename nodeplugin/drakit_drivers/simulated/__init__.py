"""
simulated: devices without hardware, which demonstrate the features of DRA and the effects of
failing devices.

:mod:`.config` defines the administrator's configuration and the users' parameters. :mod:`.control`
reads failures from a file (taints, health, missing devices). :mod:`.inventory` creates the devices,
and changes them according to the file. :mod:`.driver` publishes the devices and prepares them.

Uses only the public API, as a driver outside this repository would.
"""

from __future__ import annotations

from drakit_drivers.simulated.config import SimulatedConfig, SimulatedParameters
from drakit_drivers.simulated.driver import Simulated

__all__ = ("Simulated", "SimulatedConfig", "SimulatedParameters")
