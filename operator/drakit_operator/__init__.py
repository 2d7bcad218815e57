"""
The operator: it reports why a pod's claim is pending, and warns of templates that cannot be
allocated.

:mod:`.app` is the composition root. Objects arrive through :mod:`.watching` (Kopf, in its own
thread) and :mod:`.intake` and are stored in :mod:`.store`. The concerns evaluate them, one folder
each:
:mod:`.claims`, :mod:`.templates`. :mod:`.announcing` reports their findings.
"""
