"""
Pools of which devices are not allocated as their driver intends, and slices of missing nodes.

:mod:`.handlers` selects the nodes and slices that a change affects; :mod:`.reconcile` finds the
problems of one. Events are about Nodes, because slices come and go with each update of a pool.
"""
