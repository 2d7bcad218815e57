"""
Claim templates whose claims cannot be allocated.

:mod:`.handlers` selects those that a change touches; :mod:`.reconcile` finds the problems of one.
"""
