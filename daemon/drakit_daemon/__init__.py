"""
What both daemons share: the session with the API server (:mod:`.kube`), logs, metrics, probes, and
the tasks of a process.

Commands use its session too. It must not know devices, claims, or what a daemon does.
"""
