"""
Pods that wait for their claims, and claims that cannot be allocated.

:mod:`.handlers` selects those that a change touches; :mod:`.reconcile` finds the problems of one.
"""
