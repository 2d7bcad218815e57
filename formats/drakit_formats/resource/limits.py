"""
The numbers of the API for slices and what is in them, in one place.

They are those of ``resource.k8s.io/v1`` in Kubernetes 1.36 and 1.37; earlier versions have no lower
limit for what drakit publishes.

It must not know how any of them is checked.
"""

from __future__ import annotations

__all__ = (
    "MAX_ATTRIBUTES_AND_CAPACITIES",
    "MAX_ATTRIBUTE_VALUES",
    "MAX_CONSUMED_COUNTER_SETS",
    "MAX_COUNTERS",
    "MAX_COUNTER_SETS_PER_SLICE",
    "MAX_DRIVER_TAINTS",
    "MAX_POOL_NAME_LENGTH",
    "MAX_STRING_BYTES",
    "MAX_TAINTED_DEVICES_PER_SLICE",
    "MAX_TAINTS",
    "MAX_VALID_VALUES",
)

MAX_TAINTED_DEVICES_PER_SLICE = 64
"""If any device of the slice has taints, consumes counters or has a list attribute; 128
otherwise."""

MAX_COUNTER_SETS_PER_SLICE = 8
MAX_COUNTERS = 32
"""Counters of a counter set, and of a device's consumption of one."""

MAX_CONSUMED_COUNTER_SETS = 2
"""Sets that a device consumes from."""

MAX_ATTRIBUTES_AND_CAPACITIES = 32
"""Attributes and capacities of a device together, topology attributes included."""

MAX_ATTRIBUTE_VALUES = 48
"""Attribute values of a device; each value of a list counts."""

MAX_STRING_BYTES = 64
"""Bytes of a string or version attribute."""

MAX_VALID_VALUES = 10
"""Amounts of a capacity to choose from."""

MAX_TAINTS = 16
MAX_DRIVER_TAINTS = 12
"""Taints of the driver's own; the rest are for the node plugin."""

MAX_POOL_NAME_LENGTH = 253
