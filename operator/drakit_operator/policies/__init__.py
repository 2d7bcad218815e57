"""
Reconciles HostDevicePolicies: their DeviceClass and status.

:mod:`drakit_operator.handlers` contains the Kopf handlers. :mod:`.controller` reconciles one
policy, and :mod:`.status` computes its desired state with pure functions.
"""
