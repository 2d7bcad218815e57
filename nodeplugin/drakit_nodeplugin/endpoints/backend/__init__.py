"""
Backends: drivers that are programs of their own, in any language, behind a unix socket.

:mod:`.directory` finds them, :mod:`.endpoint` keeps one connected and calls it, :mod:`.connection`
is one life of it. What they send is read piece by piece (:mod:`..wire`, :mod:`.inventories`,
:mod:`.healthbook`), so that no size, count or rate of it harms the daemon.

Imported only where backends are enabled. It must not know claims beyond their identity, slices or
the kubelet.
"""
