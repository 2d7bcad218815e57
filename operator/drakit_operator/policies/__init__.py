"""
HostDevicePolicies: the operator maintains their DeviceClasses, and aggregates their status.

:mod:`.handlers` selects those that a change affects, :mod:`.reconcile` decides what to write, and
:mod:`.apply` writes it. The node plugins read the policies themselves.
"""
