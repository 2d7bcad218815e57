"""
Claim templates whose claims nobody could allocate.

:mod:`.handlers` says which of them a change touches, :mod:`.reconcile` what is the matter with one.
"""
