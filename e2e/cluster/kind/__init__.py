"""
Kubernetes in Docker: the provider `kind`, and a node image that needs no registry.

:mod:`.provider` is the cluster, :mod:`.config` its configuration, :mod:`.image` its node image,
:mod:`.engine` a private Docker engine for machines without one. :mod:`.host` verifies that the
engine leaves nothing behind.
"""
