"""
Reconciles HostDevicePolicies: their DeviceClass and status.

:mod:`.handlers` contains the Kopf handlers. :mod:`.controller` reconciles one policy, and
:mod:`.status` computes its desired state with pure functions.
"""
