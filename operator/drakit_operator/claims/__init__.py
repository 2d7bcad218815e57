"""
Pods that wait for their claims, and claims that nobody can allocate.

:mod:`.handlers` says which of them a change touches, :mod:`.reconcile` what is the matter with one.
"""
