"""
HostDevicePolicies: their DeviceClass and status.

:mod:`.handlers` are Kopf's, :mod:`.controller` reconciles one policy, :mod:`.status` is what must
be, as pure functions.
"""
