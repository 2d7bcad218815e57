"""
What others define and drakit reads and writes: the objects of ``resource.k8s.io``, and CDI files.

Both are plain data and pure functions, but for the files of :mod:`.cdi.directory`. It must not know
clients, daemons, or explanations.
"""
