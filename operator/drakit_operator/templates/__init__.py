"""
Claim templates whose claims cannot be allocated, and DeviceClasses that select no device.

:mod:`.handlers` selects those that a change affects; :mod:`.reconcile` finds the problems of one.
They are checked when they appear, not whenever devices change: a pod that waits gets Events then.
"""
