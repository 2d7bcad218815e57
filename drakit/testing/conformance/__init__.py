"""
The conformance kit: the rules of the driver contract, and a node on which a driver is held to them.

What a rule demands is in :mod:`.rules`, a module a subject; the node is :mod:`.kit`, the kinds of
drivers are :mod:`.targets`, and :mod:`.runner` puts the three together.

It must not know how results are shown: the command line and pytest do that.
"""
