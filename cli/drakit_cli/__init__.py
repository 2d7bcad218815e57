"""
The command lines of drakit: ``drakit``, and ``kubectl drakit`` in :mod:`.kubectl`.

:mod:`.main` has the parsers, each other module one command or shared code. It is the top layer: a
command imports parts of the daemons when it needs them, and no daemon imports it.
"""
