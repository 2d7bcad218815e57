"""
simulated: devices without hardware, which show the features of DRA and the effects of failing
devices.

:mod:`.config` has the admin's configuration and the users' parameters. :mod:`.control` reads
failures from a file (taints, health, missing devices). :mod:`.inventory` makes the devices, and
changes them as the file says. :mod:`.driver` publishes the devices and prepares them.

It uses only the public API, as any driver outside this repository would: it must not know the node
plugin, Kubernetes clients or gRPC.
"""

from __future__ import annotations

from drakit_drivers.simulated.config import SimulatedConfig, SimulatedParameters
from drakit_drivers.simulated.driver import Simulated

__all__ = ("Simulated", "SimulatedConfig", "SimulatedParameters")
