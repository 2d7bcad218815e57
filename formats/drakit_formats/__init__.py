"""
Formats that drakit reads and writes and that others define: the objects of ``resource.k8s.io``, and
CDI files.

Everything here is plain data and pure functions, except for the files of :mod:`.cdi.directory`.
Does not depend on clients, daemons, or explanations.
"""
