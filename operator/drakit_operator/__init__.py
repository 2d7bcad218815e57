"""
The operator: it reports why a pod's claim is pending, and warns of templates that cannot be
allocated.

:mod:`.app` puts it together. Objects come in through :mod:`.watching` (Kopf, in a thread of its
own) and :mod:`.intake`, are kept in :mod:`.store`, and are judged by the concerns, one folder each:
:mod:`.claims`, :mod:`.templates`. :mod:`.announcing` reports their findings.
"""
