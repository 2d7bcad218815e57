"""
Backends: drivers that are separate programs, in any language, behind a unix socket.

:mod:`.directory` finds backends, and :mod:`.connection` keeps one connected. Their messages are
parsed in small pieces (:mod:`..wire`), so that the size, number or rate of messages cannot harm the
daemon.

This package is imported only if backends are enabled. It does not depend on claims beyond their
identity, slices or the kubelet.
"""
