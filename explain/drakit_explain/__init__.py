"""
Explains why a pod's claim is pending: pure functions over facts of the cluster.

:mod:`.model` holds the facts, :mod:`.projection` reads them from raw objects, :mod:`.world` indexes
them. :mod:`.selectors` decides which selectors must be evaluated, and stores the results.
:mod:`.nodes` excludes nodes that a pod cannot use. Kubernetes' allocator determines whether
claims fit on the other nodes: :mod:`.queries` plans the queries, and :mod:`.trial` combines the
results. :mod:`.pools` and :mod:`.availability` count the obstacles. :mod:`.pending` identifies
the problem by one of :mod:`.codes`. :mod:`.pending_claims` finds problems before a query,
:mod:`.shortage` finds those after it, :mod:`.wording` contains their phrases, and
:mod:`.unmatched` explains why no device matches. :mod:`.remedies` proves which change would be
enough. :mod:`.broken` and :mod:`.deletion` explain pods and claims after the allocation, from
the :mod:`.evidence` of kubelets and runtimes and the known :mod:`.bugs`.

The caller gathers the facts, evaluates selectors, queries the allocator (:mod:`.cel`) and reports
the result: the operator writes Events, ``kubectl drakit`` prints it.

Does not depend on Kubernetes clients, clocks (except for :mod:`.cel`), or the operator.
"""
