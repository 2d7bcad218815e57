"""
Parts that both daemons share: the session with the API server (:mod:`.kube`), logs, metrics,
probes, and background tasks. The command lines also use the session.

Does not depend on devices or claims.
"""
