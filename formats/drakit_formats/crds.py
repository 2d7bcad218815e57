"""
Group, version and names of drakit's custom resources.

All code that reads or writes these resources uses this module. The definitions are in
``charts/drakit/crds/``.
"""

from __future__ import annotations

from typing import Final

GROUP: Final = "drakit.dev"

VERSION: Final = "v1beta1"
"""The only version that is served and stored."""

API_VERSION: Final = f"{GROUP}/{VERSION}"

DRIVERS: Final = "devicedrivers"
POLICIES: Final = "hostdevicepolicies"
REPORTS: Final = "nodedevicereports"
MAINTENANCES: Final = "devicemaintenances"
