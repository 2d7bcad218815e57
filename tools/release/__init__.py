"""
Releases: the project's version, and all parts of a release.

:mod:`.version` defines the version and writes it to all files that state it. :mod:`.__main__`
builds a release in a folder.
"""
