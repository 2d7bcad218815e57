"""
``kubectl drakit``: explains pods and shows devices, with the user's kubeconfig and permissions.

:mod:`.main` reads arguments. :mod:`.gather` lists objects into a world of :mod:`drakit_explain`.
The other modules compute plain rows from it, and :mod:`.output` writes them.

It must not know drakit's daemons, gRPC, or anything that runs in the cluster.
"""
