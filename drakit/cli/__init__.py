"""
The command line of drakit: ``drakit``.

:mod:`.main` has the words, each other module one command or what several share. It is the top
layer: of the daemons it imports what it needs when a command needs it, and no daemon imports it.
"""
