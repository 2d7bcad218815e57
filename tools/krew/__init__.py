"""
The krew plugin `drakit`: an archive for each platform, and the manifest with their checksums.

:mod:`.archive` makes the archives, :mod:`.__main__` renders the manifest from `drakit.yaml`.
"""
