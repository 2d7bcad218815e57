"""
Watching with Kopf: one thread and event loop of its own, run on the leader only.

:mod:`.kopf_import` is the only module that imports Kopf, :mod:`.settings` says how it runs,
:mod:`.thread` is one run of it, :mod:`.supervisor` runs it again when it has ended, :mod:`.census`
lists what Kopf cannot know: what was deleted behind its back.
"""
