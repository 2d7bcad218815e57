"""
The provider `kind`: Kubernetes in Docker.

:mod:`.provider` is the cluster, :mod:`.config` what kind creates it from, :mod:`.engine` a private
Docker engine for machines that have none, :mod:`.host` the proof that the engine left no trace.
"""
