"""
The front door of a driver: what the kubelet sees, and nothing behind it.

:mod:`.server` puts it together: :mod:`.sockets` and :mod:`.ownership` (files),
:mod:`.registration`, :mod:`.dra` and :mod:`.healthservice` (the kubelet's three contracts),
:mod:`.calls` and :mod:`.inflight` (how a call meets work in flight), :mod:`.health` (what is told
of devices, and when), :mod:`.probe` (liveness).

It translates and decides nothing; what is done for claims is behind
:class:`drakit_nodeplugin.claims.answers.ClaimService`.
"""
