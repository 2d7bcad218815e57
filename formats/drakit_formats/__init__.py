"""
External formats that drakit reads and writes: the objects of ``resource.k8s.io``, and CDI files.

The package contains only plain data and pure functions, except for :mod:`.cdi.directory`. Does not
depend on clients, daemons, or explanations.
"""
