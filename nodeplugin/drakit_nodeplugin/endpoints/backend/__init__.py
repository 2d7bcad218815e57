"""
Backends: drivers that are separate programs, in any language, behind a unix socket.

:mod:`.directory` finds backends, and :mod:`.connection` keeps one connected. Messages from backends
are parsed in small pieces (:mod:`..wire`), so that their size, number or rate cannot harm the
daemon.

This package is imported only if backends are enabled. It does not depend on the checkpoint, slices
or the kubelet.
"""
