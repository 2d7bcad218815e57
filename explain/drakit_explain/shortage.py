"""
Explains why no node has devices for the claims of a pod: one finding for each cause, with its
remedy.

A cause is a selector that fails, an invalid pool, a request with too few devices, a constraint, or
requests that need the same devices. :mod:`.availability` counts the devices, and :mod:`.wording`
contains the phrases.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from drakit.quantity import quantity_units
from drakit_explain.allocation import AllocatorError, AskedClaim, Failure
from drakit_explain.availability import Analysis, Availability, needed
from drakit_explain.broken import published_device
from drakit_explain.budget import BudgetSpentError
from drakit_explain.codes import Code, Finding, cause_of_class, cause_of_pool, cause_of_selector
from drakit_explain.devices import CapacityPolicy
from drakit_explain.model import Constraint, DeviceID, PodFacts, Request, exact_requests
from drakit_explain.pending_claims import Wanted, what_to_check
from drakit_explain.pools import NodePool, PoolState, Rules
from drakit_explain.queries import NO_CHANGES, Changes, Released
from drakit_explain.reports import dropped_fields, policy_of_class, quoted
from drakit_explain.trial import Judged, Trial, failure_of, not_counted
from drakit_explain.unmatched import domain_of, why_it_fails, why_unmatched
from drakit_explain.verdicts import Verdict
from drakit_explain.wording import advice, cut, how_taints_end, shown, state
from drakit_explain.world import World

STEPS_PER_CAUSE = 50
"""How many steps the sentence about one request costs."""

MAX_NAMED = 3
"""Maximum number of pools to name, and of nodes to query the allocator for about one cause."""

_LOST = ("ListAttributes", "Other")
"""The device features without which devices are published with fewer attributes."""

_MISSING_KEY = re.compile(r"no such key: (\S+)")
"""Matches the message of Kubernetes' CEL library about a key that a map does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestReport:
    """A request or alternative, with its devices."""

    name: str
    """``request`` or ``request/subrequest``."""

    analysis: Analysis
    found: Availability


def findings_of_shortage(
    trial: Trial,
    reports: Mapping[str, Sequence[RequestReport]],
    judged: Judged,
    *,
    reader: str | None,
    preempting: bool = False,
) -> list[Finding]:
    """
    Return the reasons why a pod does not fit on any node.

    :param reports: the devices of each exact request, keyed by the origin of its claim.
    :param judged: the results of the nodes. The pod does not fit on any of them.
    :param reader: the namespace whose holders may be named. None means that all holders may be
        named.
    :param preempting: whether the pod's priority allows it to preempt other pods. Pods are never
        preempted for devices.
    """
    answers = judged.answers
    errors = {name: trial.error(name, each) for name, each in answers.items() if each.fatal}
    failed = [name for name, error in errors.items() if error.device is not None]
    findings = [_failed(errors[name], name, len(failed), trial) for name in failed[:1]]
    invalid = _invalid(trial)
    named = {pool.identity for pool in invalid}
    not_ready = {
        error.pool: _of_error(error, f"node {name}", trial)
        for name in reversed(judged.fatal)
        if (error := errors[name]).pool is not None and error.pool not in named
    }
    findings += list(reversed(not_ready.values()))[:MAX_NAMED]
    findings += [
        Finding(
            code=Code.POOL_INVALID,
            what=f"no device can be allocated from pool {pool.identity.pool} of driver "
            f"{pool.identity.driver}, because {pool.problem}; correct the driver",
            cause=cause_of_pool(pool.identity, pool.problem, trial.world),
        )
        for pool in invalid[:MAX_NAMED]
    ]
    short = bool(invalid)
    for each in trial.wanted:
        of_claim = reports[each.origin]
        for request in each.requests:
            found = _short(trial, each, request, of_claim, reader)
            short = short or bool(found)
            if not invalid or any(one.analysis.matching for one in of_claim):
                findings += (replace(one, claims=(each.claim,)) for one in found)
    impossible = list(_impossible(trial))
    findings += impossible
    if not short and not failed and not not_ready and not impossible:
        unevaluated = _unevaluated(trial, reports)
        if not unevaluated:
            try:
                unevaluated = [_competing(trial, answers, errors)]
            except BudgetSpentError:
                unevaluated = [_too_much(trial, answers)]
        findings += unevaluated
    if preempting:
        findings = [
            replace(each, what=f"{each.what}; Kubernetes preempts no pod for its devices")
            if each.code is Code.DEVICES_ALLOCATED
            else each
            for each in findings
        ]
    # A finding without a particular claim prevents the allocation of all claims.
    every = tuple(each.claim for each in trial.wanted)
    findings = [each if each.claims else replace(each, claims=every) for each in findings]
    if not trial.world.not_ready():
        return findings
    exact = (each for _, _, each in trial.exact())
    note = not_counted(trial.world, exact, set(trial.usable()), trial.budget)
    return [_perhaps_passing(each, note) for each in findings] if note else findings


def _perhaps_passing(finding: Finding, note: str) -> Finding:
    """Mark a finding as transient, because it may no longer apply when pools are complete. Drivers
    need a moment to publish them."""
    return replace(
        finding,
        what=f"{finding.what} ({note})",
        transient=finding.transient or f"{finding.code} in addition to an incomplete pool",
    )


def _invalid(trial: Trial) -> list[NodePool]:
    found = {
        pool.identity: pool
        for pool in trial.not_ready()
        if pool.state is PoolState.INVALID and trial.concerns(pool)
    }
    return [found[identity] for identity in sorted(found)]


# ---- an error of the allocator


_ADVICE = {
    Failure.INCOMPLETE_POOL: "wait until the driver has published all slices, or ask for a number "
    "of devices",
    Failure.INVALID_POOL: "correct the driver",
    Failure.CONSTRAINT: "relax the constraint, or ask for a number of devices",
    Failure.TOO_MANY: "reduce the requests",
}

_CODES = {
    Failure.OTHER: Code.SEARCH_FAILED,
    Failure.SELECTOR: Code.SELECTOR_FAILED,
    Failure.INCOMPLETE_POOL: Code.POOL_INCOMPLETE,
    Failure.INVALID_POOL: Code.POOL_INVALID,
    Failure.CONSTRAINT: Code.CONSTRAINT_NOT_MET,
    Failure.TOO_MANY: Code.REQUESTS_COMPETE,
}


def findings_of_errors(trial: Trial, judged: Judged) -> list[Finding]:
    """Return the reasons why the scheduler gives up on a pod, even if the pod fits on nodes without
    these errors."""
    nodes: dict[Failure, list[str]] = {}
    for name in judged.fatal:
        nodes.setdefault(failure_of(judged.answers[name].text), []).append(name)
    every = tuple(each.claim for each in trial.wanted)
    return [replace(_given_up(names, judged, trial), claims=every) for names in nodes.values()]


def _given_up(names: Sequence[str], judged: Judged, trial: Trial) -> Finding:
    error = trial.error(names[0], judged.answers[names[0]])
    where = f"node {names[0]}{_and_more(len(names))}"
    if judged.chance:
        where += ", unless it tries another node first, so the pod might still start"
    fits = f"the pod would fit on node {judged.fits_on}, but " if judged.fits_on else ""
    if error.device is not None:
        return _of_selector(error.text, error.device, f"{fits}{_GIVES_UP} {where}", trial)
    return _of_error(error, where, trial, fits=fits)


_GIVES_UP = "the scheduler gives up on all nodes because of this error on"


def _of_error(error: AllocatorError, where: str, trial: Trial, *, fits: str = "") -> Finding:
    # An incomplete pool is normal while slices are being published.
    is_passing = error.kind is Failure.INCOMPLETE_POOL
    return Finding(
        code=_CODES[error.kind],
        what=f"{error.text}; {fits}{_GIVES_UP} {where}",
        advice=_ADVICE.get(error.kind, ""),
        transient=Code.POOL_INCOMPLETE if is_passing else "",
        cause=cause_of_pool(error.pool, error.text, trial.world) if error.pool else None,
    )


def _and_more(number: int) -> str:
    """Return a phrase with the number of nodes in addition to the named one."""
    if number < 2:
        return ""
    return f" (and {number - 1} more node{'s' if number > 2 else ''})"


_TIMEOUT = re.compile(r"\bnode (\S+): timed out trying to allocate devices")
_DISABLED = re.compile(
    r"\bclaim \S+, (?:sub)?request [^:]+: [^:;]*\bthe (?:\w+ )?feature is disabled"
)
"""Matches plugin and allocator errors whose causes do not show in any object: the clock, and the
scheduler's feature gates."""


_GAVE_UP = 'running "DynamicResources" filter plugin'
"""The scheduler's message about an error that affects all nodes (``RunFilterPlugins`` in
``pkg/scheduler/framework/runtime/framework.go``)."""


def is_given_up(pod: PodFacts) -> bool:
    """Return whether the scheduler reports that it gave up on the pod because of an error."""
    return _GAVE_UP in pod.scheduling_message


def reported_by_scheduler(pod: PodFacts, rules: Rules) -> Finding | None:
    """Return the error that made the scheduler give up on the pod, if only the scheduler knows the
    error."""
    if (timeout := _TIMEOUT.search(pod.scheduling_message)) and rules.ends_at_timeout:
        return Finding(
            code=Code.SEARCH_FAILED,
            what=f"the scheduler's search on node {timeout[1]} reached its timeout, so the "
            f"scheduler gave up on all nodes",
            advice="simplify the constraints and requests of its claims",
        )
    if disabled := _DISABLED.search(pod.scheduling_message):
        return Finding(
            code=Code.SEARCH_FAILED,
            what=f"a feature gate of the scheduler is off: {disabled[0]}; the scheduler gives up "
            f"on all nodes because of this error",
            advice="enable the feature gate, or do not use the feature",
        )
    return None


# ---- a selector that fails


def _failed(error: AllocatorError, node: str, nodes: int, trial: Trial) -> Finding:
    assert error.device is not None
    what = f"the scheduler aborts its search on node {node}{_and_more(nodes)} at this device"
    return _of_selector(
        error.text, error.device, "" if _NOT_COMPILED in error.text else what, trial
    )


def _of_selector(failure: str, device: DeviceID, effect: str, trial: Trial) -> Finding:
    exact = [each for _, _, each in trial.exact()]
    texts = [text for each in exact for _, text in trial.world.expressions(each)]
    correct = advice_on_failure(failure, device, texts, trial.world)
    return Finding(
        code=Code.SELECTOR_FAILED,
        what="; ".join(filter(None, (with_device(failure, device), effect, correct))),
        cause=cause_of_selector(failure, {each.device_class for each in exact}, trial.world),
    )


_NOT_COMPILED = " does not compile: "
"""The phrase in a failure description which shows that the failure does not depend on a device."""


def with_device(failure: str, device: DeviceID) -> str:
    """Add the device for which a selector fails to the description of the failure."""
    if _NOT_COMPILED in failure:
        return failure
    return f"{failure}, on device {device.device} of pool {device.pool}, driver {device.driver}"


_OF_CLASS = re.compile(r"selector of class (\S+) fails")


def advice_on_failure(
    failure: str, identity: DeviceID, texts: Collection[str], world: World
) -> str:
    """
    Return the advice for a selector that fails. Advice on spelling comes first, because a guard in
    the selector would hide a typo.

    :param texts: the selectors, one of which fails.
    """
    driver, _, name = identity
    if (found := _OF_CLASS.search(failure)) and (policy := policy_of_class(found[1], world)):
        return (
            f"the operator restores the class of HostDevicePolicy {policy}, so do not edit it: "
            f"read the log of the node plugin that publishes the device"
        )
    device = published_device(identity, world)
    if device is not None and (correct := why_it_fails(failure, texts, device, driver)):
        return correct
    if _NOT_COMPILED in failure:
        return "correct the expression"
    missing = _MISSING_KEY.search(failure)
    if missing is None or device is None:
        return "correct the expression, or test device.driver first, so that it skips this device"
    key = missing[1]
    domain, slash, bare = key.rpartition("/")
    if slash and device.attribute(key, driver) is not None:
        return (
            f'device {name} has {bare} in device.attributes["{domain}"], so write the key without '
            f"the domain {domain}"
        )
    key, domain = bare, domain_of(bare, texts) or driver
    if domain != driver and any(each.driver == domain and each.devices for each in world.slices()):
        return (
            f"device {name} is not of driver {domain}, so test the driver first "
            f'(device.driver == "{domain}" && ...)'
        )
    capacity = [each.name.rpartition("/")[2] for each in device.kind.capacity]
    attributes = [each.rpartition("/")[2] for each in device.kind.attributes]
    close = get_close_matches(key, [*attributes, *capacity], n=1)
    field = "capacity" if close and close[0] not in attributes else "attributes"
    spelling = f"check the spelling of {key}"
    if close:
        spelling = f"device {name} has {close[0]}, so {spelling}"
    elif lost := dropped_fields([driver], _LOST, world):
        spelling = f"check whether the API server drops {key} ({lost})"
    return (
        f"{spelling}; if only some devices have it, test for it first "
        f'(has(device.{field}["{domain}"].{key})), or test device.driver first'
    )


def _unevaluated(trial: Trial, reports: Mapping[str, Sequence[RequestReport]]) -> list[Finding]:
    """
    Return findings about the selectors that fail for each device that could match.

    The allocator does not reach these devices, because they are not free: it skips them before it
    evaluates selectors.
    """
    return [
        replace(
            _of_selector(
                f'request "{report.name}" of {each.origin}: {error.text}',
                error.device,
                "no device matches",
                trial,
            ),
            claims=(each.claim,),
        )
        for each in trial.wanted
        for report in reports[each.origin]
        if not report.analysis.matching
        for error in report.analysis.errors[:1]
    ]


# ---- one request


def counted_shortage(
    trial: Trial, reports: Mapping[str, Sequence[RequestReport]], *, reader: str | None
) -> list[str]:
    """Describe the shortage based on drakit's own counts, for claims without a result from the
    allocator."""
    try:
        return [
            f"according to drakit's own counts, {found.what}"
            for each in trial.wanted
            for request in each.requests
            for found in _short(trial, each, request, reports[each.origin], reader)
        ]
    except (BudgetSpentError, KeyError):  # KeyError means that the budget was used up earlier
        return []


def _short(
    trial: Trial,
    wanted: Wanted,
    request: Request,
    reports: Sequence[RequestReport],
    reader: str | None,
) -> list[Finding]:
    """Return the reasons why no node has enough devices for this request by itself. Empty if a node
    has enough."""
    if any(trial.is_usable(node) for node in trial.able(request)):
        return []
    names = dict(exact_requests(request))
    trial.budget.spend(len(names) * (STEPS_PER_CAUSE + len(trial.world.slices())))
    findings: list[Finding] = []
    for each in reports:
        # If a selector fails for a device, it is unknown whether the device would match.
        if each.name in names and not (each.analysis.errors and not each.analysis.matching):
            found = _too_few(wanted.origin, each, reader, trial)
            cause = cause_of_class(each.analysis.request.device_class, found.code, trial.world)
            findings.append(replace(found, cause=cause))
    return findings


def _too_few(origin: str, report: RequestReport, reader: str | None, trial: Trial) -> Finding:
    request, found, analysis = report.analysis.request, report.found, report.analysis
    world, code, advised = trial.world, Code.NO_DEVICE_PUBLISHED, ""
    of_class = f'DeviceClass "{request.device_class}"'
    name = f'request "{report.name}" of {origin}'
    asks = f"{name} asks for {request.count} devices of {of_class}"
    if not analysis.matching:
        what = f"no node publishes a device of {of_class} that matches {name}{_rejected(analysis)}"
        if why := why_unmatched(request, world):
            what += f"; {why}"
        else:
            advised = what_to_check(request, world)
    elif found.total == 0 and not request.capacity:
        what = (
            f"every published device of {of_class} that matches {name} consumes more of a counter "
            f"than its pool provides, so none can be allocated; correct the driver"
        )
    elif found.total == 0 and (absent := _absent_capacity(report, world)):
        dropped = _dropped(analysis, ["Other"], world)
        what = (
            f"none of the published devices of {of_class} that match {name} has {absent}{dropped}"
        )
    elif found.total == 0:
        what = (
            f"no published device of {of_class} that matches {name} has the requested capacity"
            f"{_most(report, world)}"
        )
        advised = "lower capacity.requests or add devices"
    elif found.total < needed(request):
        noun = "device is" if found.total == 1 else "devices are"
        what = f"{asks}, but only {found.total} matching {noun} published"
        advised = "lower count or add devices"
    elif found.free >= needed(request, found):
        code, (node, most) = Code.REQUESTS_COMPETE, found.most_free
        what = (
            f"{asks} on one node, but no node has that many free devices: node {node} has the most "
            f"({most})"
        )
        advised = "lower count or add devices to one node"
    else:
        obstacle, most = found.on_one_node or analysis.on_one_node(trial.nodes, found)
        if obstacle is not None:
            return _unavailable(obstacle, name, report, reader, world)
        what = f"{asks} on one node, but no node publishes more than {most} that match"
        advised = "lower count or add devices to one node"
    return Finding(code=code, what=what, advice=advised)


def _unavailable(
    code: Code, name: str, report: RequestReport, reader: str | None, world: World
) -> Finding:
    """Return a finding about the obstacles to using the devices that match a request."""
    request, found = report.analysis.request, report.found
    match = "matches" if found.total == 1 else "match"
    devices, asks = f'DeviceClass "{request.device_class}" that {match}', ""
    if request.every or request.count > 1:
        asks = f"{name} asks for {'all' if request.every else request.count} devices: "
    else:
        devices += f" {name}"
    what = asks + state(found, of=devices, reader=reader)
    if ends := how_taints_end(found, quoted(sorted(found.unhealthy), world)):
        what = f"{what}; {ends}"
    if code is Code.DEVICES_ALLOCATED:
        what += _dropped(report.analysis, ["MultipleAllocations"], world)
    return Finding(
        code=code, what=what, advice=advice(found, released=code is Code.DEVICES_ALLOCATED)
    )


def _absent_capacity(report: RequestReport, world: World) -> str:
    """Return a requested capacity that no matching device has, with advice. Empty if there is no
    such capacity."""
    asked, found = report.analysis.request, set[str]()
    for _, kind in report.analysis.find_kinds(world):
        found.update(each.name for each in kind.capacity)
    for each in asked.capacity:
        if each.name not in found:
            close = get_close_matches(each.name, sorted(found), n=1)
            if close:
                return (
                    f"capacity {each.name}; the devices have {close[0]}, so check the spelling in "
                    f"capacity.requests"
                )
            have = cut(sorted(found), MAX_NAMED) or "none"
            return f"capacity {each.name}; correct capacity.requests (the devices have {have})"
    return ""


def _most(report: RequestReport, world: World) -> str:
    """Return the largest amounts of the requested capacities that a claim can get, in
    parentheses."""
    most: dict[str, str] = {}
    kinds = [kind for _, kind in report.analysis.find_kinds(world)]
    for each in (each for kind in kinds for each in kind.capacity):
        policy = each.policy or CapacityPolicy()
        limits = [policy.max] if policy.max else [*policy.valid_values] or [each.value]
        limit = min(each.value, max(limits, key=quantity_units), key=quantity_units)
        most[each.name] = max(limit, most.get(each.name, limit), key=quantity_units)
    asked = (each.name for each in report.analysis.request.capacity)
    found = [f"{most[name]} of {name}" for name in asked if name in most]
    return f" (a claim can have at most {cut(found, MAX_NAMED)})" if found else ""


def _dropped(analysis: Analysis, features: Collection[str], world: World) -> str:
    """If the API server drops one of these features, return the effect on a request's devices, in
    parentheses. Empty if it is not known to drop any."""
    drivers = {driver for driver, _ in analysis.find_kinds(world)}
    said = dropped_fields(drivers, features, world)
    return f" ({said})" if said else ""


def _rejected(analysis: Analysis) -> str:
    """Return the number of devices that each selector rejects, as a clause."""
    parts = [
        f"{owner} rejects {number} with selector {shown(expression)}"
        for owner, expression, number in analysis.rejected
        if number
    ]
    if not parts:
        return ""
    return f" (of {analysis.published} published, {', '.join(parts)})"


# ---- requests together


def _competing(
    trial: Trial, answers: Mapping[str, Verdict], errors: Mapping[str, AllocatorError]
) -> Finding:
    """Explain why there are enough devices for each of a pod's requests by itself, but not for all
    of them together."""
    nodes = list(answers)[:MAX_NAMED]
    constraints = [
        (number, index)
        for number, each in enumerate(trial.wanted)
        for index in range(len(each.constraints))
    ]
    for name in nodes:
        for number, index in constraints:
            if _fits(trial, name, trial.without_constraint(number, index)):
                return _constraint(trial.wanted[number], index)
        if constraints and _fits(trial, name, trial.without_constraints()):
            return Finding(
                code=Code.CONSTRAINT_NOT_MET,
                what="no node has free devices that satisfy all constraints of the pod's claims "
                "together",
                advice="relax one of them or add devices",
            )
    for name in nodes:
        if _fits(trial, name, changes=Changes(released=Released(kept=trial.own))):
            return Finding(
                code=Code.DEVICES_ALLOCATED,
                what=_taken(trial, name),
                advice="the claims can be allocated when enough devices are released",
            )
    too_many = (each.text for each in errors.values() if each.kind is Failure.TOO_MANY)
    if failure := next(too_many, ""):
        return Finding(code=Code.REQUESTS_COMPETE, what=failure, advice="reduce the requests")
    return _too_much(trial, answers)


def _taken(trial: Trial, node: str) -> str:
    match list(trial.exact()):
        case [(position, name, _)]:  # no usable node has the free devices
            return (
                f'too few of the devices for node {node} that match request "{name}" of '
                f"{trial.wanted[position.claim].origin} are free: the others are allocated"
            )
        case _:
            return (
                f"the pod's requests compete for the same free devices on node {node}, and the "
                f"other devices there are allocated"
            )


def _too_much(trial: Trial, answers: Mapping[str, Verdict]) -> Finding:
    only = len(trial.nodes) == 1
    where = f"node {next(iter(answers))} does not have" if only else "no node has"
    return Finding(
        code=Code.REQUESTS_COMPETE,
        what=f"{where} enough devices for all requests of the pod's claims together, although "
        f"each request could be allocated by itself",
        advice="reduce the requests, or add devices to one node",
    )


def _fits(
    trial: Trial,
    node: str,
    claims: Sequence[AskedClaim] | None = None,
    *,
    changes: Changes = NO_CHANGES,
) -> bool:
    """Return whether the allocator can allocate the claims. The caller's next query depends on the
    result."""
    answer = trial.ask(node, claims=claims, changes=changes)
    trial.verdicts.check()
    return answer is not None and answer.fits


def _impossible(trial: Trial) -> Iterator[Finding]:
    """Return findings about the constraints that no devices can satisfy, even if all devices are
    free."""
    for wanted in trial.wanted:
        for constraint in wanted.constraints:
            if absent := _absent_attribute(trial, wanted, constraint):
                yield Finding(
                    code=Code.CONSTRAINT_NOT_MET,
                    what=f"{absent[0]}, which {constraint.kind} requires; {absent[1]}",
                    claims=(wanted.claim,),
                )


def _constraint(wanted: Wanted, index: int) -> Finding:
    constraint = wanted.constraints[index]
    of = f" (requests {', '.join(constraint.requests)})" if constraint.requests else ""
    same = "different values" if constraint.distinct else "the same value"
    return Finding(
        code=Code.CONSTRAINT_NOT_MET,
        what=f"no node has enough free devices with {same} of {constraint.attribute}, as "
        f"{constraint.kind}{of} of {wanted.origin} requires",
        advice="relax the constraint or add devices",
        claims=(wanted.claim,),
    )


def _absent_attribute(
    trial: Trial, wanted: Wanted, constraint: Constraint
) -> tuple[str, str] | None:
    """If no device of a request has a constraint's attribute, return a clause and advice."""
    for request in wanted.requests:
        names = dict(exact_requests(request))
        of = [
            name
            for name in names
            if not constraint.requests or {request.name, name} & {*constraint.requests}
        ]
        found: set[str] = set()
        for name in of:
            found |= _attributes(trial.analysis(names[name]), trial.world)
        if of and found and constraint.attribute not in found:
            close = get_close_matches(constraint.attribute, sorted(found), n=1)
            fix = "correct the constraint"
            if close:
                fix = f"the devices have {close[0]}, so check the spelling"
            elif lost := max(
                _dropped(trial.analysis(names[name]), _LOST, trial.world) for name in of
            ):
                fix = f"check whether the API server drops the attribute{lost}"
            what = (
                f'no device that matches request "{request.name}" of {wanted.origin} has attribute '
                f"{constraint.attribute}"
            )
            return what, fix
    return None


def _attributes(analysis: Analysis, world: World) -> set[str]:
    """Return the full names of the attributes of the devices that match a request."""
    return {
        each if "/" in each else f"{driver}/{each}"
        for driver, kind in analysis.find_kinds(world)
        for each in kind.attributes
    }
