"""
HostDevicePolicies: their DeviceClass and status.

:mod:`.handlers` has the Kopf handlers, :mod:`.controller` reconciles one policy, and :mod:`.status`
has the desired state, as pure functions.
"""
