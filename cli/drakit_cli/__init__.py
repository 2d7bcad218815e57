"""
drakit's command lines: ``drakit``, and ``kubectl drakit`` in :mod:`.kubectl`.

:mod:`.main` defines the parsers. Each other module contains one command, or code that several
commands share.

This is the top layer: a command imports parts of the daemons when it needs them, and no daemon
imports a command.
"""
