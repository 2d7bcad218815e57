"""
Watching with Kopf: one thread and event loop of its own, run on the leader only.

:mod:`.kopf_import` is the only module that imports Kopf, :mod:`.settings` configures it,
:mod:`.thread` is one run of it, :mod:`.supervisor` restarts it when it has ended, :mod:`.census`
finds the deletions that Kopf has missed.
"""
