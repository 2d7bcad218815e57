"""
The doctor's findings, and its checks of the API, pools, nodes, classes, and the user's permissions.

Does not depend on sessions or releases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from drakit.text import plural
from drakit_cli.kubectl.capabilities import evaluate_selectors, lacks_helper
from drakit_cli.kubectl.devices import UNREACHABLE, PoolRow
from drakit_cli.kubectl.gather import Gap, Gathered
from drakit_cli.kubectl.output import shortened
from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.availability import analyze, budget_of
from drakit_explain.budget import BudgetSpentError
from drakit_explain.bugs import FoundBug, bugs_of_node, known_bugs
from drakit_explain.counts import devices_of_policies
from drakit_explain.kinds import CLASSES, NODES, SLICES
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceID,
    NamespaceFacts,
    NodeFacts,
    PolicyFacts,
    PoolID,
    ReportFacts,
    Request,
    TemplateFacts,
    exact_of,
)
from drakit_explain.pending_claims import class_of_resource, missing_classes
from drakit_explain.projection import ADMIN_ACCESS
from drakit_explain.reports import (
    HOSTDEV,
    STOPPED,
    UNHEALTHY,
    policy_of_class,
    words_of,
)
from drakit_explain.shortage import advice_on_failure, with_device
from drakit_explain.unmatched import uncounted, why_unmatched

_HELPER_FIX = (
    "install the plugin with its programs: from krew's archive, or in a clone of drakit, on Linux "
    'with Go: pip install "$(make -s wheel)[kubectl]"'
)

VIEWER_LACKS = frozenset({"configmaps", "subjectaccessreviews"})
"""The resources that the doctor reads but the chart's ClusterRole for viewers does not include,
except for API server paths. A test compares this list with the chart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A problem, or a state that might be one, with its remedy."""

    object: str
    """The kind and the name of the object."""

    what: str
    fix: str
    """The remedy: a command, or a value of the chart."""

    problem: bool = True
    """Whether the finding keeps pods from using devices, or a release from working. If not, the
    state may be intended."""

    is_bug: bool = False
    """Whether the finding is a known bug in Kubernetes or a container runtime."""

    @property
    def severity(self) -> str:
        return "problem" if self.problem else "note"


def note(*, object: str, what: str, fix: str, is_bug: bool = False) -> Finding:
    """Return a finding that is not a problem."""
    return Finding(object=object, what=what, fix=fix, problem=False, is_bug=is_bug)


def check_cluster(found: Gathered, rows: Iterable[PoolRow]) -> list[Finding]:
    """Check the listed objects."""
    pools = list(rows)
    return [
        *_api(found),
        *_evaluator(),
        *_pools(pools, found),
        *_reports(found),
        *_twins(pools),
        *_nodes(pools, found),
        *_missing_classes(found),
        *_classes(found),
        *_around_policies(found),
        *_admin_access(found),
    ]


def _api(found: Gathered) -> Iterator[Finding]:
    if found.version != "v1":
        yield note(
            object="API server",
            what=f"the API server does not serve resource.k8s.io/v1; {found.version} is used",
            fix="upgrade the cluster to Kubernetes 1.34 or newer, or keep the beta API enabled",
        )


def _evaluator() -> Iterator[Finding]:
    if lacks_helper():
        yield note(
            object="Program drakit-cel",
            what="the program drakit-cel is not installed, so a Python library evaluates "
            "selectors; it does not support quantities, semantic versions and some of Kubernetes' "
            "CEL functions",
            fix=_HELPER_FIX,
        )


def _reports(found: Gathered) -> Iterator[Finding]:
    """Return the problems that node plugins report about their drivers."""
    for report in sorted(found.world.of(ReportFacts).values(), key=lambda each: each.name):
        subject = f"NodeDeviceReport {report.name}"
        driver, node = f"driver {report.driver}", f"node {report.node}"
        if report.registration:
            yield Finding(
                object=subject,
                what=f"{driver} is not registered with the kubelet of {node} "
                f"({report.registration}): pods that use its devices there cannot start",
                fix=f"read the log of the node plugin on {node}",
            )
        if report.progress:
            yield Finding(
                object=subject,
                what=f"{driver} is slow on {node}: {report.progress}",
                fix=f"read the log of {report.driver} on that node; if it persists, restart the "
                "pod in which the driver runs: that of its backend, otherwise the node plugin's",
            )
        if report.rejected:
            yield Finding(
                object=subject,
                what=f"{driver} does not publish {plural(report.rejected, 'device')} of {node}, "
                f"such as {report.faulty_example or report.rejected_example}",
                fix=f"kubectl describe nodedevicereport {report.name}: it lists the devices and "
                "reasons; correct the policy, or report it to the driver's vendor",
                problem=bool(report.faulty_example),
            )


def _pools(rows: Iterable[PoolRow], found: Gathered) -> Iterator[Finding]:
    for row in rows:
        where = f"pool {row.identity.pool} of driver {row.identity.driver}"
        subject = f"Pool {row.identity.driver}/{row.identity.pool}"
        delete = f"kubectl delete resourceslices --field-selector spec.nodeName={row.node}"
        log = f"read the log of {row.identity.driver}"
        if row.vanished:
            yield Finding(
                object=subject,
                what=f"{where} is for node {row.node}, which does not exist",
                fix=f"if the node does not return, and Kubernetes does not delete the slices "
                f"within minutes: {delete}",
            )
        elif row.problem:
            of_node, there = (f", node {row.node}", " on that node") if row.named else ("", "")
            fix = (
                f"{log}{there}: the driver must publish all slices of the pool's latest "
                "generation, and they must be consistent"
            )
            if not row.slices:
                fix = (
                    f"check that {row.identity.driver} runs{there}: claims hold its devices, but "
                    "it publishes none"
                )
            elif row.problem.startswith(UNREACHABLE):
                fix = "correct the node selector in the driver, or the labels of the nodes"
            yield Finding(
                object=subject,
                what=f"no device can be allocated from {where}{of_node}: {row.problem}",
                fix=fix,
            )
        for key, state, fix in (
            (UNHEALTHY, "unhealthy", f"check the device, and {log} on node {row.node}"),
            (STOPPED, "unavailable, because the driver has stopped", _stopped_fix(row, found, log)),
        ):
            names = [each.name for each in row.devices if key in each.taints]
            if key == UNHEALTHY:
                names = [_with_words(row.identity, each, found) for each in names]
            if names:
                verb = "is" if len(names) == 1 else "are"
                yield Finding(
                    object=subject,
                    what=f"{plural(len(names), 'device')} of {where} {verb} {state}: "
                    f"{shortened(names)}",
                    fix=fix,
                )


def _stopped_fix(row: PoolRow, found: Gathered, log: str) -> str:
    """Return the remedy for a stopped driver, with the reason from the report of its node."""
    fix = f"{log} on node {row.node}"
    reasons = (
        each.stopped
        for each in found.world.of(ReportFacts).values()
        if (each.node, each.driver) == (row.node, row.identity.driver)
    )
    reason = next(filter(None, reasons), "")
    return f"remove the cause, then {fix} if it persists: {reason}" if reason else fix


def _with_words(pool: PoolID, name: str, found: Gathered) -> str:
    """Return the name of an unhealthy device, with its driver's message."""
    words = words_of(DeviceID(*pool, name), found.world)
    return f"{name} ({words})" if words else name


def _twins(rows: Iterable[PoolRow]) -> Iterator[Finding]:
    """Find devices that two nodes publish with the same name. If one of them is allocated, the
    other one is, too."""
    seen: dict[PoolID, list[PoolRow]] = {}
    for row in rows:
        seen.setdefault(row.identity, []).append(row)
    for identity, same in seen.items():
        names = [{device.name for device in row.published} for row in same if row.named]
        nodes = [row.node for row in same if row.named]
        common = sum(map(len, names)) > len(set[str]().union(*names))
        if len(nodes) > 1 and common:
            yield Finding(
                object=f"Pool {identity.driver}/{identity.pool}",
                what=f"nodes {shortened(nodes)} publish devices of the same names in pool "
                f"{identity.pool} of driver {identity.driver}: the scheduler considers them one "
                "device",
                fix="configure the driver to name its pools after their nodes",
            )


def _nodes(rows: Iterable[PoolRow], found: Gathered) -> Iterator[Finding]:
    counts: dict[str, int] = {}
    for row in rows:
        if row.named:
            counts[row.node] = counts.get(row.node, 0) + len(row.published)
    for name, count in sorted(counts.items()):
        node = found.world.node(name)
        if count and node is not None and not node.ready:
            yield Finding(
                object=f"Node {name}",
                what=f"node {name} is not ready: pods that use its {plural(count, 'device')} "
                "cannot start",
                fix=f"kubectl describe node {name}",
            )


def _missing_classes(found: Gathered) -> Iterator[Finding]:
    if found.lacks_all(CLASSES):
        return
    world = found.world
    claims = (
        each
        for each in world.of(ClaimFacts).values()
        # Don't check the claims from templates, because they have the same requests.
        if not each.allocated and each.owner_pod is None
    )
    for of in (*claims, *world.of(TemplateFacts).values()):
        subject = f"{of.reference.kind} {of.namespace}/{of.name}"
        for what, fix in dict.fromkeys(
            (each.sentence, each.advice) for each in missing_classes(of, world)
        ):
            # A template may be unused, so don't report a problem. `explain` shows the pods that
            # wait for its claims.
            yield Finding(
                object=subject, what=what, fix=fix, problem=not isinstance(of, TemplateFacts)
            )


def _classes(found: Gathered) -> Iterator[Finding]:
    world = found.world
    if found.lacks(CLASSES, SLICES) or found.lacks_all(NODES):
        return
    classes = sorted(world.of(ClassFacts).values(), key=lambda each: each.name)
    evaluate_selectors(found, (text for each in classes for text in each.selectors if text))
    for resource in {each.extended_resource: None for each in classes if each.extended_resource}:
        names = [each.name for each in classes if each.extended_resource == resource]
        used = class_of_resource(resource, world)
        if len(names) > 1 and used is not None:
            yield note(
                object=f"DeviceClass {used.name}",
                what=f"DeviceClasses {shortened(names)} have the extended resource {resource}: a "
                f"pod that requests it gets devices of {used.name} only",
                fix="set another extendedResourceName in one of them, or select all of the devices "
                "with one class",
            )
    for each in classes:
        subject = f"DeviceClass {each.name}"
        policy = policy_of_class(each.name, world)
        request = Request(name="", device_class=each.name)
        try:
            analysis = analyze(request, world, budget_of(world))
        except (BudgetSpentError, NotEvaluatedError, ValueError) as error:
            yield note(
                object=subject,
                what=f"DeviceClass {each.name} is not checked: {error}",
                fix=_HELPER_FIX
                if lacks_helper()
                else f"kubectl get deviceclass {each.name} -o yaml: check its selectors",
            )
            continue
        if analysis.errors:
            error = analysis.errors[0]
            advice = advice_on_failure(error.text, error.device, each.selectors, world)
            yield Finding(
                object=subject,
                what=with_device(error.text, error.device),
                fix=advice if policy else f"kubectl edit deviceclass {each.name}: {advice}",
            )
        elif not analysis.matching:
            elsewhere = uncounted(request, world)
            why = elsewhere or why_unmatched(request, world)
            if policy:
                fix = (
                    f"kubectl describe hostdevicepolicy {policy}: its conditions, and the devices "
                    "that its nodes do not publish"
                )
            elif elsewhere:
                fix = "kubectl drakit devices: the state of the pool"
            else:
                fix = (
                    f"kubectl get deviceclass {each.name} -o yaml: check its selectors, and that "
                    "its driver publishes devices"
                )
            yield note(
                object=subject,
                what=f"DeviceClass {each.name} selects none of the "
                f"{plural(analysis.published, 'published device')}{f': {why}' if why else ''}",
                fix=fix,
            )


def _around_policies(found: Gathered) -> Iterator[Finding]:
    """Find classes that let all namespaces claim devices, although the devices' policy allows only
    some namespaces."""
    world, policies = found.world, found.world.of(PolicyFacts).values()
    restricted = {each.name: each.class_name for each in policies if each.restricted}
    if not restricted or found.lacks(CLASSES, SLICES):
        return
    slices = [
        (each, devices_of_policies(each)) for each in world.slices() if each.driver == HOSTDEV
    ]
    # Skip the classes of policies, because the operator maintains them.
    owners = {each.uid for each in policies}
    names = {each.name for each in world.of(ClassFacts).values() if each.owner not in owners}
    for name in sorted(names):
        request, counts = Request(name="", device_class=name), Counter[str]()
        if not world.concerns(request, HOSTDEV):
            continue
        try:
            for of, masks in slices:
                matches = world.selected(request, of).matches
                counts.update({each: (matches & mask).bit_count() for each, mask in masks.items()})
        except NotEvaluatedError:
            continue  # the check of the class reports the error
        for policy, its_class in sorted(restricted.items()):
            if counts[policy] and its_class != name:
                yield note(
                    object=f"DeviceClass {name}",
                    what=f"DeviceClass {name} selects {plural(counts[policy], 'device')} of "
                    f"HostDevicePolicy {policy}, so claims for it get around the policy's "
                    "allowedNamespaces",
                    fix=f"kubectl edit deviceclass {name}: exclude the devices with the selector "
                    f'!(device.attributes["{HOSTDEV}"].?policy.orValue("") == "{policy}"), or '
                    "delete the class",
                )


def _admin_access(found: Gathered) -> Iterator[Finding]:
    """Find claims and templates with admin access in namespaces that do not allow it."""
    world = found.world
    allowed = {each.name: each.admin_access for each in world.of(NamespaceFacts).values()}
    for each in (*world.of(ClaimFacts).values(), *world.of(TemplateFacts).values()):
        asks = any(exact.admin_access for exact in exact_of(each.requests))
        if asks and allowed.get(each.namespace) is False:
            kind, of = each.reference.kind, f"namespace {each.namespace}"
            yield note(
                object=f"{kind} {each.namespace}/{each.name}",
                what=f"{kind} {each.namespace}/{each.name} has admin access to devices, and {of} "
                f"does not have the label {ADMIN_ACCESS}: the label was removed after the "
                f"{'claim' if isinstance(each, ClaimFacts) else 'template'} was created",
                fix=f"kubectl -n {each.namespace} delete {kind.lower()} {each.name}; or, if all "
                f"users of {of} may use all devices: kubectl label namespace {each.namespace} "
                f"{ADMIN_ACCESS}=true",
            )


def check_kubernetes(found: Gathered) -> Iterator[Finding]:
    """Report known bugs in the cluster's release that its objects can trigger."""
    for bug in known_bugs(found.kubernetes, found.world):
        yield note(object=bug.object, what=bug.what, fix=bug.fix, is_bug=True)
    nodes: dict[str, list[FoundBug]] = {}
    for node in found.world.of(NodeFacts).values():
        for _, bug in bugs_of_node(node, found.world):
            nodes.setdefault(f"{bug.link} {node.kubelet} {node.runtime}", []).append(bug)
    for first, *more in nodes.values():
        what = first.what + (f"; so does that of {plural(len(more), 'other node')}" if more else "")
        yield note(object=first.object, what=what, fix=first.fix, is_bug=True)


def check_gaps(gaps: Sequence[Gap], viewer: str) -> Iterator[Finding]:
    """
    Report the checks that were not possible, each with a remedy, such as the missing permission.

    :param viewer: the name of the chart's ClusterRole for viewers, or an empty string.
    """
    forbidden = {gap.kind for gap in gaps if gap.forbidden and not gap.kind.startswith("/")}
    of_viewer = forbidden - VIEWER_LACKS
    if len(of_viewer) == 1:
        # The role for viewers also allows reading pods, Events and quotas in all namespaces, so a
        # role for a single kind is preferable.
        viewer = ""
    for gap in gaps:
        subject, fix = f"{gap.kind} {gap.where}".rstrip(), "run the command again"
        if gap.kind == "selectors" and lacks_helper():
            fix = _HELPER_FIX
        elif gap.forbidden and gap.kind.startswith("/"):
            fix = _grant(gap.kind.strip("/"), f"--verb=get --non-resource-url={gap.kind}")
        elif gap.forbidden and gap.kind == "subjectaccessreviews":
            fix = _grant("reviews", f"--verb=create --resource={_resource(gap)}")
        elif gap.forbidden and viewer and gap.kind in of_viewer:
            fix = (
                "ask an administrator: kubectl create clusterrolebinding drakit-viewer-USER "
                f"--clusterrole={viewer} --user=USER"
            )
        elif gap.forbidden:
            fix = _grant(gap.kind, f"--verb=get,list --resource={_resource(gap)}")
        elif gap.where:
            fix = "correct or delete the object, or ask its owner"
        subject = "Your permissions" if gap.forbidden else subject
        yield note(object=subject, what=str(gap), fix=fix)


def _grant(name: str, role: str) -> str:
    """Return a fix that asks an administrator to bind a user to a new ClusterRole. `role` are the
    ``kubectl create clusterrole`` flags that define its rule."""
    role_name = f"drakit-user-{name}"
    return (
        f"ask an administrator: kubectl create clusterrole {role_name} {role} && kubectl create "
        f"clusterrolebinding {role_name} --clusterrole={role_name} --user=USER"
    )


def _resource(gap: Gap) -> str:
    return f"{gap.kind}.{gap.group}" if gap.group else gap.kind
