"""
The conformance kit: the rules of the driver contract, and a node on which drivers are tested.

:mod:`.rules` contains the rules, one module per subject. :mod:`.kit` contains the node, and
:mod:`.targets` the kinds of drivers. :mod:`.runner` combines the three. The modules are internal,
except for the names in :mod:`drakit.testing`.
"""
