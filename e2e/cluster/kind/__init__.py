"""
Kubernetes in Docker: the provider `kind`, and a node image that needs no registry.

:mod:`.provider` is the cluster, :mod:`.config` what kind creates it from, :mod:`.image` what its
nodes run, :mod:`.engine` a private Docker engine for machines that have none, :mod:`.host` the
comparison that shows that the engine left nothing.
"""
