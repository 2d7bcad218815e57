"""
Releases: the project's version, and everything that a release consists of.

:mod:`.version` owns the version and writes it to all files that state it. :mod:`.__main__` builds
a release into a folder.
"""
