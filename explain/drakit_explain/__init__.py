"""
Why a pod's claim is pending: pure functions over facts of the cluster.

:mod:`.model` holds the facts, :mod:`.projection` reads them from raw objects, :mod:`.world` indexes
them. :mod:`.selectors` decides which selectors must be evaluated, and keeps the outcomes.
:mod:`.nodes` excludes nodes that a pod cannot use. Whether claims fit on the others is decided by
Kubernetes' allocator: :mod:`.asking` plans the questions, and :mod:`.trial` combines the answers.
:mod:`.pools` and :mod:`.availability` count what stands in the way. :mod:`.pending` names the
problem by one of :mod:`.codes`: :mod:`.pending_claims` finds problems before a question,
:mod:`.shortage` those after it, in the words of :mod:`.wording`, and :mod:`.unmatched` why no
device matches. :mod:`.remedies` proves which change would be enough. :mod:`.broken` and
:mod:`.deletion` explain pods and claims after the allocation, from the :mod:`.evidence` of kubelets
and runtimes and the known :mod:`.bugs`.

The caller gathers the facts, evaluates selectors, asks the allocator (:mod:`.cel`) and reports the
result: the operator writes Events, ``kubectl drakit`` prints it.

It must not know Kubernetes clients, clocks (but for :mod:`.cel`), or the operator.
"""
