"""
``kubectl drakit``: explains pods and shows devices, with the user's kubeconfig and permissions.

:mod:`.main` parses arguments. :mod:`.gather` lists objects, and adds their facts to a world of
:mod:`drakit_explain`. The other modules compute plain rows from it, and :mod:`.output` prints them.

Does not depend on drakit's daemons, on gRPC, or on anything that runs in the cluster.
"""
