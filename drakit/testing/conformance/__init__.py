"""
The conformance kit: the rules of the driver contract, and a simulated node to test drivers on.

:mod:`.rules` contains the rules, one module per subject, :mod:`.kit` the node, and :mod:`.targets`
the kinds of drivers. :mod:`.runner` tests a driver with them. The modules are internal, except for
the names in :mod:`drakit.testing`.
"""
