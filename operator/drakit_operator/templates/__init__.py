"""
Claim templates whose claims cannot be allocated.

:mod:`.handlers` selects those that a change affects; :mod:`.reconcile` finds the problems of one.
"""
