"""
simulated: devices without hardware, which show the features of DRA and the effects of failing
devices.

:mod:`.config` is the admin's configuration, :mod:`.parameters` are the users' parameters.
:mod:`.profiles` makes the devices, :mod:`.control` reads failures from a file (taints, health,
missing devices), and :mod:`.inventory` combines the two. :mod:`.driver` publishes the devices and
prepares them.

It uses only the public API, as any driver outside this repository would: it must not know the node
plugin, Kubernetes clients or gRPC.
"""

from __future__ import annotations

from drakit_drivers.simulated.config import SimulatedConfig
from drakit_drivers.simulated.driver import Simulated
from drakit_drivers.simulated.parameters import SimulatedParameters

__all__ = ("Simulated", "SimulatedConfig", "SimulatedParameters")
