"""
Backends: drivers that are programs of their own, in any language, behind a unix socket.

:mod:`.directory` finds them, and :mod:`.connection` keeps one connected. Their messages are read
piece by piece (:mod:`..wire`), so that no size, number or rate of them harms the daemon.

Imported only where backends are enabled. It must not know claims beyond their identity, slices or
the kubelet.
"""
