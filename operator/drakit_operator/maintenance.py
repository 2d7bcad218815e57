"""
Reconciles a DeviceMaintenance: taints its devices, evicts the pods that use them, and ends it.

The devices are selected once, and stored in the status before any device is tainted. Devices that
appear later are not included. Each call derives everything else from the store, so if a leader is
killed, the next one continues its work. The maintenance owns its rules, so the garbage collector
deletes them even without an operator. :mod:`drakit_explain.maintenance` decides which rules and
evictions are required.

If the API server refuses a request, its message becomes a condition. The caller gets an error only
if the server does not respond. Does not depend on Kopf or queues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from drakit.text import plural
from drakit_daemon.kube import (
    AlreadyExistsError,
    ApiError,
    ConflictError,
    NotFoundError,
    Session,
    TooManyRequestsError,
    UnavailableError,
    resource_path,
)
from drakit_daemon.kube.events import EventRecorder
from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.kinds import MAINTENANCES
from drakit_explain.maintenance import (
    CORDON,
    DRAIN,
    MAX_MESSAGE,
    NOT_LISTED,
    RefusedError,
    Use,
    is_tainted,
    named,
    rule_facts,
    rule_name,
    rule_of,
    rules_named,
    select,
    unsupported,
    unsupported_message,
    uses,
)
from drakit_explain.model import (
    DeviceID,
    MaintenanceFacts,
    ObjectReference,
    TaintRuleFacts,
)
from drakit_explain.world import Name, World
from drakit_formats.resource.objects import child, children, words
from drakit_operator.statuses import (
    REFUSED_SECONDS,
    Condition,
    Object,
    Status,
    StatusWriter,
    changes,
    turned,
)

WRITE_SECONDS = 5.0
"""The minimum time between two writes of a status, and between two creations of rules, because
another client may delete them repeatedly."""

POLL_SECONDS = 5.0
"""How long to wait between two rounds of evictions."""

CLOCK_SECONDS = 60.0
"""Maximum wait before the start or end of a window is checked again, because the clock can be
changed."""

EVICTIONS = 20
"""Maximum number of evictions in one round of a maintenance."""

EVICT_SECONDS = (5.0, 60.0)
"""The initial and the maximum backoff before a pod's eviction is retried. A PodDisruptionBudget may
allow it later. A pod whose eviction was accepted may need its grace period to terminate."""

DECIDED_SECONDS = 0.5
"""How long to wait after writing the selected devices before the next step. By then, the store
contains them."""

LISTED = 20
"""Maximum number of blockers to list in the status, which is enough to find the cause."""

NOT_EVALUATED = "NotEvaluated"
"""The condition reason while the selectors of a class have not been evaluated."""


@dataclass(slots=True)
class _Eviction:
    """The result of a pod's eviction."""

    again_at: float = float("-inf")
    pause_seconds: float = EVICT_SECONDS[0]
    said: str = ""
    refused: bool = False


@dataclass(slots=True)
class _Memory:
    """The in-memory state of a maintenance. It can be lost in a restart without harm."""

    written_at: float = float("-inf")
    rules_at: float = float("-inf")
    """The time at which rules were last created."""

    refusal: str = ""
    """The reason why the API server refused to create the rules."""

    evictions: dict[str, _Eviction] = field(default_factory=dict[str, _Eviction])
    """The evictions, keyed by the UIDs of pods that still use devices."""


@dataclass(kw_only=True, slots=True)
class _State:
    """The results and actions of one call."""

    phase: Literal["Scheduled", "Active", "Ended"] = "Active"
    by_rules: bool
    problem: str
    """The reason why rules cannot be read or written."""

    tainted: int = 0
    unsupported: Sequence[DeviceID] = ()
    uses: Sequence[Use] = ()
    drain_start: float = 0.0
    """The time at which the evictions started. 0 if there were none."""

    over: bool = False
    """Whether the evictions have exceeded their time limit."""

    @property
    def pods(self) -> set[str]:
        """The UIDs of the pods that use devices."""
        return {each.pod.uid for each in self.uses if each.pod is not None}


class MaintenanceController:
    """Reconciles maintenances with the facts of a world."""

    def __init__(
        self,
        session: Session,
        world: World,
        *,
        rules_version: Callable[[], str],
        working_rules_version: Callable[[], str],
        recorder: EventRecorder,
        is_followed: Callable[[], bool],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param rules_version: returns the served ``apiVersion`` of DeviceTaintRules, or an empty
            string if the cluster does not serve them.
        :param working_rules_version: the same, but also an empty string if the scheduler ignores
            DeviceTaintRules.
        :param is_followed: returns whether the world has all maintenances. If not, a maintenance
            may exist although it is missing from the world, so its rules are kept. For example, an
            API server that is starting may not serve maintenances yet.
        """
        self._session = session
        self._is_followed = is_followed
        self._world = world
        self._rules_version = rules_version
        self._working_rules_version = working_rules_version
        self._recorder = recorder
        self._now = now
        self._clock = clock
        self._memories: dict[str, _Memory] = {}
        self._statuses = StatusWriter(session, world, MAINTENANCES)

    def problem(self) -> str | None:
        """Return the reason why a status cannot be written."""
        return next(iter(self._statuses.refused.values()), None)

    def expressions(self, name: str) -> Sequence[str]:
        """Return the selectors that are needed to select the devices of a maintenance."""
        found = self._world.of(MaintenanceFacts).get(Name("", name))
        if found is None or _is_decided(found) or not found.selection.device_class:
            return ()
        of_class = self._world.device_class(found.selection.device_class)
        return [each for each in of_class.selectors if each] if of_class is not None else ()

    async def refresh(
        self, name: str, *, write: Callable[[Object], None] | None = None
    ) -> float | None:
        """
        Reconcile a maintenance of the world. Return the seconds until the next call.

        :param write: receives the changes to the status, if the caller writes it.
        :raises ApiError: the API server does not respond.
        """
        if not self._is_followed():
            return None
        found = self._world.of(MaintenanceFacts).get(Name("", name))
        self._statuses.refused.pop(name, None)
        if found is None or found.deleting:
            self._memories.pop(name, None)
            return REFUSED_SECONDS if await self._remove(name) else None
        memory = self._memories.setdefault(name, _Memory())
        status, again = await self._reconcile(found, memory)
        if write is not None and status.conditions[0].reason == NOT_EVALUATED:
            return 0.0  # the evaluator must run first, from the queue
        if not (change := changes(status, found.status, now=self._now())):
            return again
        if (passed := self._clock() - memory.written_at) < WRITE_SECONDS:
            return min(again or WRITE_SECONDS, WRITE_SECONDS - passed)
        memory.written_at = self._clock()
        later = await self._statuses.write(found, change, via=write)
        if later is None:
            for each in turned(status, found.status):
                await self._announce(found, each)
        return later or again

    async def _reconcile(
        self, found: MaintenanceFacts, memory: _Memory
    ) -> tuple[Status, float | None]:
        fields: dict[str, Any] = {"observedGeneration": found.generation}
        if not _is_decided(found):
            accepted, devices = self._decide(found)
            if devices:  # the next steps follow when the store contains the devices
                fields["devices"] = [each._asdict() for each in devices]
                fields["deviceCount"] = len(devices)
                return Status(conditions=(accepted,), fields=fields), DECIDED_SECONDS
            again = POLL_SECONDS if accepted.reason == NOT_EVALUATED else None
            return Status(conditions=(accepted,), fields=fields), again
        old = _condition(found, "Accepted")
        accepted = Condition("Accepted", old["status"], old["reason"], old["message"])
        if not found.devices:
            await self._remove(found.name)
        if not found.devices or found.mode not in (CORDON, DRAIN):
            return Status(conditions=(accepted,), fields=fields), None
        state, again = await self._act(found, memory)
        return _status(found, accepted, state, memory.evictions), again

    def _decide(self, found: MaintenanceFacts) -> tuple[Condition, tuple[DeviceID, ...]]:
        """Return the condition Accepted, and the devices to put into maintenance."""
        if found.mode not in (CORDON, DRAIN):
            message = f"this version of drakit does not know mode {found.mode!r}: upgrade drakit"
            return Condition("Accepted", "Unknown", "UnknownMode", message), ()
        try:
            devices = select(found, self._world)
        except NotEvaluatedError as error:
            return Condition("Accepted", "Unknown", NOT_EVALUATED, str(error)), ()
        except RefusedError as error:
            message = f"{error}; a refused DeviceMaintenance stays refused: create another one"
            return Condition("Accepted", "False", error.reason, message), ()
        message = f"{plural(len(devices), 'device')}: {named(devices)}"
        return Condition("Accepted", "True", "Accepted", message), devices

    # ------------------------------------------------------------ rules and evictions

    async def _act(self, found: MaintenanceFacts, memory: _Memory) -> tuple[_State, float | None]:
        """Take the actions that are due. Return the results, and the seconds until the next
        call."""
        now, version = self._now().timestamp(), self._working_rules_version()
        problem = NOT_LISTED if TaintRuleFacts in self._world.hidden else ""
        state = _State(by_rules=bool(version or problem), problem=problem)
        boundary = found.end
        # Once a maintenance has ended, a clock change does not start it again.
        if now >= found.end or _condition(found, "Ended").get("status") == "True":
            state.phase, boundary = "Ended", float("inf")
        elif now < found.start:
            state.phase, boundary = "Scheduled", found.start
        pauses = [min(boundary - now, CLOCK_SECONDS)] if boundary != float("inf") else []
        if state.phase == "Active":
            own = {rule_name(found, each) for each in found.devices}
            state.problem = problem or await self._remove(found.name, keep=own)
            if version:
                state.problem = await self._add_rules(found, version, memory) or state.problem
            pauses += await self._drain(found, state, memory, now)
        else:
            # The rules that have not been deleted yet.
            state.tainted = len(rules_named(found.name, self._world))
            state.problem = problem or await self._remove(found.name)
        for uid in memory.evictions.keys() - state.pods:
            del memory.evictions[uid]
        pauses += [REFUSED_SECONDS] if state.problem else []
        return state, min(pauses, default=None)

    async def _drain(
        self, found: MaintenanceFacts, state: _State, memory: _Memory, now: float
    ) -> list[float]:
        """Find the tainted devices and the pods that use them, and evict these pods. Return the
        seconds until each next step."""
        pauses: list[float] = []
        by_rules, devices = state.by_rules, found.devices
        tainted = {
            each for each in devices if is_tainted(found, each, self._world, by_rules=by_rules)
        }
        missing = [each for each in devices if each not in tainted]
        state.tainted = len(tainted)
        state.unsupported = () if by_rules else unsupported(missing, self._world)
        state.uses = uses(found, devices, self._world)
        if missing and not state.problem:
            pauses.append(WRITE_SECONDS)
        if found.mode == DRAIN and tainted:
            state.drain_start = found.drain_start or now
            state.over = now >= state.drain_start + found.limit_seconds
            due = [each for each in state.uses if tainted.issuperset(each.devices)]
            if due and not state.over:
                await self._evict(found, due, memory)
                pauses.append(POLL_SECONDS)
        return pauses

    def _is_current(self, found: MaintenanceFacts) -> bool:
        """Return whether a maintenance has not been changed or deleted since this call read it."""
        known = self._world.of(MaintenanceFacts).get(Name("", found.name))
        if known is None or known.deleting:
            return False
        return (known.uid, known.generation) == (found.uid, found.generation)

    async def _add_rules(self, found: MaintenanceFacts, version: str, memory: _Memory) -> str:
        """Create the missing rules. Return the problem, if any."""
        rules = self._world.of(TaintRuleFacts)
        missing: list[DeviceID] = []
        changed = ""
        for device in found.devices:
            wanted = rule_facts(found, device)
            rule = rules.get(Name("", wanted.name))
            if rule is None:
                missing.append(device)
            elif replace(rule, uid="") != wanted:
                changed = (
                    f"DeviceTaintRule {rule.name} was changed by another client: delete it, and "
                    "the operator creates it again"
                )
        pause = REFUSED_SECONDS if memory.refusal else WRITE_SECONDS
        if not missing or self._clock() < memory.rules_at + pause:
            return (memory.refusal if missing else "") or changed
        memory.rules_at, memory.refusal = self._clock(), ""
        try:
            for device in missing:
                if not self._is_current(found):
                    break  # the owner is gone, so the garbage collector would delete the rule
                body = rule_of(found, device, api_version=version)
                with suppress(AlreadyExistsError):  # the store is outdated
                    await self._session.create(resource_path(version, "devicetaintrules"), body)
        except ApiError as error:
            if not _is_refused(error):
                raise
            memory.refusal = f"a DeviceTaintRule cannot be created: {error.message}"
        return memory.refusal or changed

    async def _remove(self, maintenance: str, *, keep: Collection[str] = ()) -> str:
        """
        Delete the rules of a maintenance, including those of earlier maintenances with this name:
        if an earlier maintenance was deleted and orphaned its rules, the garbage collector does not
        delete them. Return the problem, if any.
        """
        version = self._rules_version()
        for each in rules_named(maintenance, self._world):
            if each.name in keep:
                continue
            path = resource_path(version, "devicetaintrules", name=each.name)
            try:
                with suppress(NotFoundError, ConflictError):
                    await self._session.delete(path, uid=each.uid)
            except ApiError as error:
                if not _is_refused(error):
                    raise
                return f"DeviceTaintRule {each.name} cannot be deleted: {error.message}"
        return ""

    async def _evict(self, found: MaintenanceFacts, due: Sequence[Use], memory: _Memory) -> None:
        """Evict the pods whose eviction is due."""
        now, left = self._clock(), EVICTIONS
        for use in due:
            if (pod := use.pod) is None:
                continue
            eviction = memory.evictions.setdefault(pod.uid, _Eviction())
            if eviction.again_at > now or not left:
                continue
            if not self._is_current(found):
                return
            left -= 1
            # Set the time before the request, so that another call for this maintenance does not
            # repeat it.
            eviction.again_at = now + eviction.pause_seconds
            eviction.pause_seconds = min(eviction.pause_seconds * 2, EVICT_SECONDS[1])
            place = {"namespace": use.claim.namespace, "name": pod.name}
            body = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": place,
                "deleteOptions": {"preconditions": {"uid": pod.uid}},
            }
            path = resource_path("v1", "pods", **place, subresource="eviction")
            try:
                await self._session.create(path, body)
            except (NotFoundError, ConflictError):
                said, refused = "it is gone, and Kubernetes is about to release its claim", False
            except ApiError as error:
                # If a pod has two budgets, the API server returns 500.
                if isinstance(error, UnavailableError) and error.status != 500:
                    raise
                said, refused = _refusal(error), True
            else:
                said, refused = f"it is being evicted, because it uses {use.what}", False
                await self._record(
                    found,
                    ObjectReference(**place, kind="Pod", uid=pod.uid, api_version="v1"),
                    reason="EvictedForMaintenance",
                    note=f"DeviceMaintenance {found.name} evicts the pod, because it uses "
                    f"{use.what}",
                )
            eviction.said, eviction.refused = said, refused
            if not refused:
                eviction.again_at = now + EVICT_SECONDS[1]

    # ------------------------------------------------------------ Events

    async def _announce(self, found: MaintenanceFacts, turned_to: Condition) -> None:
        """Write an Event about a condition that users may be waiting for."""
        kind, status, reason, message = turned_to
        bad = reason in ("Blocked", "Refused", "TimeLimit", "Unsupported")
        bad = bad or (kind == "Accepted" and status == "False")
        if bad or (status == "True" and kind != "Accepted" and reason != "Removing"):
            reason = f"Not{kind}" if bad else kind
            await self._record(found, found.reference, reason=reason, note=message, bad=bad)

    async def _record(
        self,
        found: MaintenanceFacts,
        regarding: ObjectReference,
        *,
        reason: str,
        note: str,
        bad: bool = False,
    ) -> None:
        await self._recorder.record(
            regarding.body(),
            type="Warning" if bad else "Normal",
            reason=reason,
            action=found.mode,
            note=f"{note}. Reason: {found.reason}" if found.reason else note,
        )


# ---------------------------------------------------------------- the status


def _condition(found: MaintenanceFacts, kind: str) -> Mapping[str, Any]:
    conditions = children(found.status, "conditions")
    return next((each for each in conditions if each.get("type") == kind), child({}))


def _is_decided(found: MaintenanceFacts) -> bool:
    return _condition(found, "Accepted").get("status") in ("True", "False")


def _status(
    found: MaintenanceFacts, accepted: Condition, state: _State, evictions: Mapping[str, _Eviction]
) -> Status:
    """Return the desired status of an accepted maintenance."""
    blockers: list[tuple[bool, dict[str, str]]] = []
    for each in state.uses:
        eviction = evictions.get(each.pod.uid, _Eviction()) if each.pod else _Eviction()
        blockers.append((not eviction.refused, each.blocker(eviction.said)))
    # Put the pods whose eviction is blocked first.
    blockers.sort(key=lambda each: each[0])
    start = datetime.fromtimestamp(state.drain_start, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    fields = {
        "observedGeneration": found.generation,
        "phase": state.phase,
        "taintedBy": "DeviceTaintRule" if state.by_rules else "NodePlugin",
        "taintedDevices": state.tainted,
        "pods": len(state.pods),
        "blockers": [each for _, each in blockers[:LISTED]],
        "drainStartTime": start if state.drain_start else None,
    }
    drained = _drained(found, state, evictions)
    conditions = (accepted, _tainted(found, state), drained, _ended(state))
    return Status(conditions=conditions, fields=fields)


def _tainted(found: MaintenanceFacts, state: _State) -> Condition:
    number, every = state.tainted, plural(len(found.devices), "device")
    message = f"{number} of {every} {'is' if number == 1 else 'are'} tainted"
    if state.problem:
        return Condition("Tainted", "False", "Refused", state.problem)
    if state.phase != "Active":
        if number:
            return Condition("Tainted", "True", "Removing", message)
        return Condition("Tainted", "False", state.phase, "no device is tainted")
    if state.unsupported:
        message = unsupported_message(state.unsupported)
        return Condition("Tainted", "False", "Unsupported", message)
    if number < len(found.devices):
        who = "the API server" if state.by_rules else "the node plugin"
        return Condition("Tainted", "False", "Progressing", f"{message}: waiting for {who}")
    return Condition("Tainted", "True", "Tainted", f"{message}: new pods do not get them")


def _drained(
    found: MaintenanceFacts, state: _State, evictions: Mapping[str, _Eviction]
) -> Condition:
    if state.phase != "Active":
        message = "the maintenance is not active, and evicts no pods"
        return Condition("Drained", "False", state.phase, message)
    done = state.tainted == len(found.devices)
    if not state.uses:
        if done:
            return Condition("Drained", "True", "Drained", "no claim holds the devices")
        message = "no claim holds the devices, but new pods can still get some of them"
        return Condition("Drained", "False", "NotTainted", message)
    users = [plural(len({each.claim.uid for each in state.uses}), "claim")]
    users += [plural(len(state.pods), "pod")] if state.pods else []
    refused = [each.said for each in evictions.values() if each.refused]
    if not state.pods:
        refused = [state.uses[0].blocker()["message"]]
    if found.mode == CORDON:
        reason, why = "InUse", "mode Cordon evicts no pods"
    elif state.over:
        reason, why = "TimeLimit", "timeLimitSeconds is over, and pods are no longer evicted"
    elif not done:
        reason, why = "NotTainted", "evictions wait for taints"
    elif refused:
        reason, why = "Blocked", refused[0]
    else:
        reason, why = "Evicting", "the pods are being evicted"
    message = f"the devices are in use by {' and '.join(users)}; {why}"
    return Condition("Drained", "False", reason, message)


def _ended(state: _State) -> Condition:
    if state.phase == "Ended" and not state.tainted and not state.problem:
        return Condition(
            "Ended", "True", "WindowOver", "the window is over, and no DeviceTaintRule is left"
        )
    message = {
        "Scheduled": "the window has not begun",
        "Active": "to end it, delete the DeviceMaintenance",
        "Ended": "the window is over, and the taints are being removed",
    }[state.phase]
    return Condition("Ended", "False", state.phase, message)


def _is_refused(error: ApiError) -> bool:
    return error.is_refusal or isinstance(error, TooManyRequestsError)


def _refusal(error: ApiError) -> str:
    """Return the reason why a pod cannot be evicted, with the name of the budget that forbids
    it."""
    causes = children(error.details, "causes")
    budgets = [
        words(each, "message") for each in causes if each.get("reason") == "DisruptionBudget"
    ]
    said = "; ".join(filter(None, budgets))[:MAX_MESSAGE] or error.message
    busy = isinstance(error, TooManyRequestsError) and not budgets
    return f"the API server {'delays' if busy else 'refuses'} its eviction: {said}"
