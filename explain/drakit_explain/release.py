"""
What differs between the minor releases of Kubernetes in how the scheduler allocates devices.

The sources are the DynamicResources plugin
(``pkg/scheduler/framework/plugins/dynamicresources/dynamicresources.go`` in ``k8s.io/kubernetes``)
and the allocators (``structured/internal`` in ``k8s.io/dynamic-resource-allocation``), read in
0.34.13, 0.35.10, 0.36.6 and 0.37.2; the plugin in 1.36.3 and 1.37.2.

In all of them, each error of the allocator but ``ErrFailedAllocationOnNode`` makes ``Filter``
return an error, with which ``findNodesThatPassFilters`` (``pkg/scheduler/schedule_one.go``) gives
up the pod on all nodes. Such errors are a selector that fails or does not compile, a request for
all devices on a node with a pool that is incomplete or invalid, a request for all devices one of
which a constraint excludes, more than 32 devices, and a feature that is off.

It must not know how a version is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

FEASIBLE_NODES = 100
"""
With more nodes that fit, the scheduler may stop before it looks at all nodes.

Source: ``minFeasibleNodesToFind`` and ``numFeasibleNodesToFind`` in
``pkg/scheduler/schedule_one.go`` of 1.36.3 and 1.37.2: the search is cancelled when it has found
more nodes than that, and no configuration makes the number smaller.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules of one minor release."""

    skips_pools: bool
    """
    Nothing is allocated from pools that are incomplete or invalid, and the search goes on.

    Since 1.35 (``allocateOne``: ``if pool.IsIncomplete || pool.IsInvalid``). Up to 1.34, an invalid
    pool that the search reaches ends it with an error, and an incomplete pool is used; slices for
    other nodes count as missing (``GatherPools`` in ``pools_stable.go``).
    """

    places_counters: bool
    """
    A slice that only has counters concerns the nodes of its place, like any other.

    Since 1.37 (``GatherPools``). Up to 1.36 it concerns all nodes: on each of them, its pool may be
    incomplete or invalid.
    """

    ends_at_timeout: bool
    """
    The timeout of the filter (10 s) gives up the pod on all nodes; before 1.36, only on the node.

    Source: the case ``context.DeadlineExceeded`` of ``Filter`` in 1.36.3 and 1.37.2.
    """


@cache
def rules_of(minor: int | None) -> Rules:
    """Return the rules of Kubernetes 1.`minor`; of the newest release if it is unknown."""
    return Rules(
        skips_pools=minor is None or minor >= 35,
        places_counters=minor is None or minor >= 37,
        ends_at_timeout=minor is None or minor >= 36,
    )


NEWEST = rules_of(None)
