"""
simulated: devices that are not there, for whoever wants to see DRA's features without hardware.

:mod:`.config` is what an admin writes, :mod:`.parameters` what a user may; :mod:`.gpus`,
:mod:`.nics` and :mod:`.cpus` are the profiles, which :mod:`.inventory` puts together with what
:mod:`.control` reads from a file (taints, health, devices that are gone); :mod:`.environment` says
what a container got, :mod:`.driver` is the driver.

It uses the vendor's vocabulary alone, as any driver outside this repository would: it must not
know the node plugin, Kubernetes clients or gRPC.
"""

from __future__ import annotations

from drakit_drivers.simulated.config import SimulatedConfig
from drakit_drivers.simulated.driver import Simulated
from drakit_drivers.simulated.parameters import SimulatedParameters

__all__ = ("Simulated", "SimulatedConfig", "SimulatedParameters")
