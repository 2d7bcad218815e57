"""The row of a driver: its nodes, pools and claims, and what is wrong with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drakit_explain.devices import Place, TaintFacts
from drakit_explain.drivers import MAX_DRIVERS, MAX_PROBLEMS, driver_rows
from drakit_explain.model import (
    Consumer,
    DeviceID,
    DriverFacts,
    PodClaim,
    PodFacts,
    ReportFacts,
    Result,
    TaintRuleFacts,
)
from tests.fakes.world import device, holding, node, on, slice_on, world_of

N1, N2 = node("n1", labels={"gpu": "yes"}), node("n2", labels={"gpu": "yes"})
S1, S2 = slice_on("n1", device("a")), slice_on("n2", device("a"))
DRIVER = DriverFacts(name="d", uid="d", node_selector={"matchLabels": {"gpu": "yes"}})
SHARED = replace(S1, place=Place(every=True))


def report(of="n1", **facts):
    return ReportFacts(name=f"{of}.d", uid=of, node=of, driver="d", **facts)


def held(name, *, consumers=None, place="n1", **facts):
    """An allocated claim with device ``a``."""
    result = Result(request="r", device=DeviceID("d", place, "a"))
    users = () if consumers == 0 else (Consumer("pods", "pod", "pod"),)
    return replace(
        holding(name, "a", pool=place), results=(result,), nodes=place, consumers=users, **facts
    )


def pod(**facts):
    given = {"node": "n1", "sandbox": False, "claims": (PodClaim(name="c", claim="mine"),)} | facts
    return PodFacts(namespace="lab", name="pod", uid="pod", **given)


def rows_of(*facts):
    rows = {}
    for _ in driver_rows(world_of(*facts), rows):
        pass
    return rows


def row_of(*facts):
    return rows_of(*facts)["d"]


@pytest.mark.parametrize(
    ("facts", "numbers"),
    [
        pytest.param([N1, N2, S1, S2], (2, 2, 2, 2, 0, 0), id="a-driver-of-others"),
        pytest.param([S1], (1, 1, 1, 1, 0, 0), id="nodes-may-not-be-listed"),
        pytest.param([N1, N2, S1, report(published=1)], (1, 1, 1, 1, 0, 0), id="a-report"),
        pytest.param(
            [N1, N2, S1, report(published=1), report("n2")],
            (2, 2, 1, 1, 0, 0),
            id="a-node-without-devices",
        ),
        pytest.param([N1, N2, S1, DRIVER], (2, 1, 1, 1, 0, 0), id="a-node-that-must-have-it"),
        pytest.param(
            [N1, N2, S1, replace(DRIVER, node_selector={"matchLabels": {"gpu": "no"}})],
            (0, 0, 0, 1, 0, 0),
            id="a-node-that-need-not-have-it",
        ),
        pytest.param([N1, N2, SHARED, DRIVER], (2, 0, 0, 1, 0, 0), id="devices-on-a-network"),
        pytest.param([N1, replace(S1, pool_slices=2)], (1, 1, 1, 1, 1, 0), id="incomplete"),
        pytest.param([N1, slice_on("n1")], (1, 1, 1, 1, 0, 1), id="an-empty-pool"),
    ],
)
def test_the_numbers_of_nodes_and_pools(facts, numbers):
    row = row_of(*facts)
    nodes = (row.desired, row.registered, row.publishing)
    assert (*nodes, row.pools, row.incomplete, row.empty) == numbers
    assert row.unknown == (SHARED in facts)


RULE = TaintRuleFacts(
    name="r", uid="r", taint=TaintFacts(key="k", effect="NoSchedule"), driver="d", pool="n1"
)


@pytest.mark.parametrize(
    ("facts", "problems", "words"),
    [
        pytest.param([N1, S1], [], "", id="nothing"),
        pytest.param([N1, S1, report(published=1)], [], "", id="a-registered-plugin"),
        pytest.param(
            [N1, S1, report(published=1, registration="NotRegistered: no such socket")],
            [("Registered", "NotRegistered", "n1")],
            "(NotRegistered: no such socket); run 'kubectl describe nodedevicereport n1.d'",
            id="slices-without-a-registered-plugin",
        ),
        pytest.param(
            [N1, report(published=3)],
            [("Publishing", "NoResourceSlices", "n1")],
            "the plugin on n1 publishes no ResourceSlices",
            id="a-plugin-without-slices",
        ),
        pytest.param([N1, report()], [], "", id="a-plugin-without-devices"),
        pytest.param(
            [N1, S1, report(published=1, outdated=True)],
            [("Registered", "PluginGone", "n1")],
            "kubectl get pods -A -o wide --field-selector spec.nodeName=n1",
            id="the-plugin-is-gone",
        ),
        pytest.param(
            [N1, S1, report(published=1, stopped="it crashed")],
            [("Publishing", "DriverStopped", "n1")],
            "does not run on node n1 (it crashed)",
            id="the-driver-has-stopped",
        ),
        pytest.param(
            [N1, N2, S1, DRIVER],
            [("Registered", "PluginMissing", "n2")],
            "node n2 has no ResourceSlice of the driver",
            id="a-node-without-the-plugin",
        ),
        pytest.param([N1, N2, SHARED, DRIVER], [], "", id="no-evidence-is-no-problem"),
        pytest.param(
            [replace(N1, ready=False), S1],
            [("Registered", "NodeNotReady", "n1")],
            "kubectl describe node n1",
            id="a-node-that-is-not-ready",
        ),
        pytest.param(
            [N1, replace(S1, pool_slices=2)],
            [("Publishing", "PoolIncomplete", "pool n1")],
            "pool n1 is incomplete; run 'kubectl drakit explain node/n1'",
            id="a-slice-is-missing",
        ),
        pytest.param(
            [N1, slice_on("n1", device("a"), device("a"))],
            [("Publishing", "PoolInvalid", "pool n1")],
            "pool n1 is invalid",
            id="a-device-twice",
        ),
        pytest.param(
            [N1, replace(SHARED, pool_slices=2)],
            [("Publishing", "PoolIncomplete", "pool n1")],
            "run 'kubectl drakit devices d/n1'",
            id="a-pool-of-a-network-is-incomplete",
        ),
        pytest.param(
            [N1, S1, report(published=1, progress="claims do not progress", stuck=2)],
            [("ClaimsProgressing", "ClaimsStuck", "n1")],
            "node n1: claims do not progress",
            id="prepares-that-fail",
        ),
        pytest.param(
            [N1, S1, held("mine"), pod()],
            [("ClaimsProgressing", "PodsNotStarted", "pod lab/pod")],
            "run 'kubectl drakit explain pod/pod -n lab'",
            id="a-pod-waits-for-a-driver-of-others",
        ),
        pytest.param([N1, S1, held("mine"), pod(sandbox=True)], [], "", id="a-pod-has-started"),
        pytest.param(
            [N1, S1, held("mine"), pod(), report(published=1)],
            [],
            "",
            id="the-report-decides-whether-claims-progress",
        ),
        pytest.param(
            [N1, S1, held("mine", consumers=0)],
            [("ClaimsReleased", "ClaimsNotReleased", "claim lab/mine")],
            "but no pod uses it; run 'kubectl drakit explain claim/mine -n lab'",
            id="a-claim-that-no-pod-uses",
        ),
        pytest.param(
            [N1, S1, held("mine", deleting=True, finalizers=("x.example.com/f",))],
            [("ClaimsReleased", "ClaimsNotReleased", "claim lab/mine")],
            "the finalizer x.example.com/f keeps it",
            id="a-claim-that-a-finalizer-keeps",
        ),
        pytest.param(
            [N1, S1, held("mine", place="n9")],
            [("ClaimsReleased", "ClaimsNotReleased", "claim lab/mine")],
            "its node n9 no longer exists",
            id="a-claim-of-a-node-that-is-gone",
        ),
        pytest.param(
            [N1, held("mine")],
            [("Installed", "Leftovers", "")],
            "its objects remain: 1 resourceclaim; install the driver, or run 'kubectl drakit "
            "claims -A'",
            id="a-claim-remains",
        ),
        pytest.param(
            [N1, replace(S2, place=on("n9")), DRIVER, replace(RULE)],
            [("Installed", "Leftovers", ""), ("Registered", "PluginMissing", "n1")],
            "'kubectl delete resourceslices --field-selector spec.driver=d'",
            id="slices-and-rules-remain",
        ),
        pytest.param(
            [N1, report(outdated=True)],
            [("Installed", "Leftovers", ""), ("Registered", "PluginGone", "n1")],
            "'kubectl delete nodedevicereports --field-selector spec.driver=d'",
            id="reports-remain",
        ),
        pytest.param(
            [N1, replace(DRIVER, node_selector=None)],
            [("Installed", "NotFound", "")],
            "kubectl delete devicedriver d",
            id="only-its-devicedriver-remains",
        ),
        pytest.param(
            [N1, replace(DRIVER, node_selector=None), replace(RULE, owner="d")],
            [("Installed", "NotFound", "")],
            "kubectl delete devicedriver d",
            id="a-rule-that-goes-with-its-owner",
        ),
    ],
)
def test_what_is_wrong_with_a_driver(facts, problems, words):
    found = row_of(*facts).problems
    assert [(each.condition, each.reason, each.subject) for each in found] == problems
    assert any(words in each.message for each in found) or not problems


def test_claims_are_counted_that_are_stuck_or_not_released():
    busy = report(published=1, progress="claims do not progress", stuck=2)
    row = row_of(N1, N2, S1, S2, busy, held("mine", consumers=0), held("other", consumers=0))
    assert (row.stuck, row.unreleased) == (2, 2)


def test_tenants_cannot_make_problems_without_end():
    claims = (held(f"c{number}", consumers=0) for number in range(MAX_PROBLEMS + 5))
    row = row_of(N1, S1, replace(N2, ready=False), S2, *claims)
    assert row.unreleased == row.numbers["ClaimsReleased"] == MAX_PROBLEMS + 5
    assert len(row.problems) == MAX_PROBLEMS + 1


def test_nodes_without_evidence_do_not_hide_those_with_evidence():
    row = row_of(N1, N2, S2, SHARED, DRIVER)
    assert (row.registered, row.unknown, row.unavailable) == (1, True, set())


def test_a_driver_is_unavailable_on_the_nodes_without_its_plugin():
    row = row_of(N1, replace(N2, ready=False), S1, S2, report(published=1))
    assert row.unavailable == {"n2"}


def test_a_node_plugin_cannot_make_rows_without_end():
    slices = [replace(S1, name=f"{n}", uid=f"{n}", driver=f"x{n:03}") for n in range(MAX_DRIVERS)]
    rows = rows_of(N1, *slices, replace(S1, driver="zebra"), replace(DRIVER, name="z"))
    assert len(rows) == MAX_DRIVERS
    assert "z" in rows
