"""
The conformance kit: the rules of the driver contract, and a node on which drivers are tested.

:mod:`.rules` has the rules, one module a subject, :mod:`.kit` the node, :mod:`.targets` the kinds
of drivers; :mod:`.runner` combines the three. The modules are internal, except for the names in
:mod:`drakit.testing`.

It must not know how results are shown: the command line and pytest do that.
"""
