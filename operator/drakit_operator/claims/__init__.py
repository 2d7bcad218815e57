"""
Pods that are pending because of their claims, and claims that cannot be allocated.

:mod:`.handlers` selects those that a change affects; :mod:`.reconcile` finds the problems of one.
"""
