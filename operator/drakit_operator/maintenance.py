"""
Reconciles a DeviceMaintenance: taints its devices, evicts the pods that use them, and ends it.

The selection is decided once, and stored in the status before anything is tainted: devices that
appear later do not join. All else follows from the store at each call, so a leader that is killed
leaves nothing that the next one does not find. Rules are owned by the maintenance, so the garbage
collector deletes them without an operator. :mod:`drakit_explain.maintenance` decides which rules
and evictions there are.

Whatever the API server refuses is a condition, with its message. Only a server that does not answer
is an error of the caller. Does not depend on Kopf or queues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
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
from drakit_explain.maintenance import (
    CORDON,
    DRAIN,
    NO_RULES,
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
    uses,
)
from drakit_explain.model import ClassFacts, DeviceID, MaintenanceFacts, TaintRuleFacts
from drakit_explain.reports import project_maintenance
from drakit_explain.world import Name, World
from drakit_formats import crds
from drakit_formats.resource.objects import child, children, text
from drakit_operator.statuses import Condition, Object, Status, changes, turned

logger = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
"""Least time between two writes of a status, and between two creations of rules: another client may
delete them again and again."""

POLL_SECONDS = 5.0
"""Pause between two rounds of evictions."""

REFUSED_SECONDS = 30.0
"""Pause after a refusal: a webhook, quota or role may allow the write later."""

CLOCK_SECONDS = 60.0
"""Longest wait for the beginning or the end of a window: clocks step."""

EVICTIONS = 20
"""Evictions of a maintenance in one round."""

EVICT_SECONDS = (5.0, 60.0)
"""First and longest pause before the eviction of a pod is tried again. A budget may allow it later,
and a pod whose eviction was accepted may take its grace period to end."""

LISTED = 20
"""Blockers that the status lists: enough to find the cause."""


NOT_EVALUATED = "NotEvaluated"
"""The reason while the selectors of a class have no outcome."""


@dataclass(slots=True)
class _Eviction:
    """What became of the eviction of a pod."""

    again_at: float = float("-inf")
    pause_seconds: float = EVICT_SECONDS[0]
    said: str = ""
    refused: bool = False


@dataclass(slots=True)
class _Memory:
    """What is remembered of a maintenance; nothing depends on it after a restart."""

    written_at: float = float("-inf")
    rules_at: float = float("-inf")
    """When rules were created."""

    evictions: dict[str, _Eviction] = field(default_factory=dict[str, _Eviction])
    """By the UIDs of pods that still use devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """What was found and done in one call."""

    phase: Literal["Scheduled", "Active", "Ended"]
    by_rules: bool
    tainted: tuple[DeviceID, ...] = ()
    unsupported: Sequence[DeviceID] = ()
    uses: Sequence[Use] = ()
    problem: str = ""
    """What the API server refuses about rules."""

    drain_start: str = ""
    """When the evictions began; empty without one."""

    over: bool = False
    """The time limit of the evictions is over."""


class MaintenanceController:
    """Reconciles maintenances with the facts of a world."""

    def __init__(
        self,
        session: Session,
        world: World,
        *,
        rules_version: Callable[[], str],
        recorder: EventRecorder,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param rules_version: returns the served ``apiVersion`` of DeviceTaintRules; empty if the
            cluster does not serve them.
        """
        self._session = session
        self._world = world
        self._rules_version = rules_version
        self._recorder = recorder
        self._now = now
        self._clock = clock
        self._memories: dict[str, _Memory] = {}

    def expressions(self, name: str) -> Sequence[str]:
        """Return the selectors that the selection of a maintenance needs."""
        found = self._world.of(MaintenanceFacts).get(Name("", name))
        if found is None or _is_decided(found) or not found.selection.device_class:
            return ()
        of_class = self._world.of(ClassFacts).get(Name("", found.selection.device_class))
        return [each for each in of_class.selectors if each] if of_class is not None else ()

    async def refresh(
        self, name: str, *, write: Callable[[Object], None] | None = None
    ) -> float | None:
        """
        Reconcile a maintenance of the world; return in how many seconds to do it again.

        :param write: takes what must change in the status, if the caller writes it.
        :raises ApiError: the API server does not answer.
        """
        if MaintenanceFacts in self._world.hidden:
            return None  # it may exist
        found = self._world.of(MaintenanceFacts).get(Name("", name))
        if found is None or found.deleting:
            self._memories.pop(name, None)
            # The garbage collector does the same, unless the owner was deleted without its rules.
            problem = await self._remove(rules_named(name, self._world))
            return REFUSED_SECONDS if problem else None
        memory = self._memories.setdefault(name, _Memory())
        status, again = await self._reconcile(found, memory)
        if write is not None and status.conditions[0].reason == NOT_EVALUATED:
            return 0.0  # the queue asks the evaluator first
        if not (change := changes(status, found.status, now=self._now())):
            return again
        if (passed := self._clock() - memory.written_at) < WRITE_SECONDS:
            return min(again or WRITE_SECONDS, WRITE_SECONDS - passed)
        memory.written_at = self._clock()
        if write is not None:
            write(change)
        elif not await self._write(found, change):
            return REFUSED_SECONDS
        for each in turned(status, found.status):
            await self._announce(found, each)
        # What follows from a decision is done when it is stored.
        return 0.5 if not _is_decided(found) else again

    async def _reconcile(
        self, found: MaintenanceFacts, memory: _Memory
    ) -> tuple[Status, float | None]:
        if not _is_decided(found):
            accepted, devices = self._decide(found)
            again = None if accepted.status == "False" else POLL_SECONDS
            fields = _fields(found, devices=devices) if devices else _fields(found)
            return Status(conditions=(accepted,), fields=fields), again
        old = _condition(found, "Accepted")
        accepted = Condition("Accepted", old["status"], old["reason"], old["message"])
        if not found.devices or found.mode not in (CORDON, DRAIN):
            return Status(conditions=(accepted,), fields=_fields(found)), None
        state, again = await self._act(found, memory)
        return _status(found, accepted, state, memory), again

    def _decide(self, found: MaintenanceFacts) -> tuple[Condition, tuple[DeviceID, ...]]:
        """Decide which devices are in maintenance."""
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
        """Do what is due; return what was found, and in how many seconds to do it again."""
        now, version = self._now().timestamp(), self._rules_version()
        ended = _condition(found, "Ended").get("status") == "True"
        phase: Literal["Scheduled", "Active", "Ended"] = "Active"
        if ended or now >= found.end:  # once it has ended, a clock that steps does not begin it
            phase = "Ended"
        elif now < found.start:
            phase = "Scheduled"
        problem = ""
        if phase == "Active" and version:
            problem = await self._add_rules(found, version, memory)
        elif phase != "Active":
            problem = await self._remove(self._rules_of(found))
        state = _State(phase=phase, by_rules=bool(version), problem=problem)
        if phase == "Ended":
            tainted = tuple(found.devices[: len(self._rules_of(found))])
            return replace(state, tainted=tainted), REFUSED_SECONDS if problem else None
        boundary = found.start if phase == "Scheduled" else found.end
        again = [min(boundary - now, CLOCK_SECONDS)] if boundary != float("inf") else []
        again += [REFUSED_SECONDS] if problem else []
        if phase == "Active":
            tainted = tuple(
                each
                for each in found.devices
                if is_tainted(found, each, self._world, by_rules=bool(version))
            )
            missing = [each for each in found.devices if each not in tainted]
            again += [WRITE_SECONDS] if missing and not problem else []
            state = replace(
                state,
                tainted=tainted,
                unsupported=() if version else unsupported(missing, self._world),
                uses=uses(found, found.devices, self._world),
            )
            if found.mode == DRAIN and tainted:
                start = text(found.status, "drainStartTime") or _time(self._now())
                over = now >= datetime.fromisoformat(start).timestamp() + found.limit_seconds
                state = replace(state, drain_start=start, over=over)
                due = [each for each in state.uses if set(each.devices) <= set(tainted)]
                if due and not over:
                    await self._evict(found, due, memory)
                    again.append(POLL_SECONDS)
        users = {each.pod.uid for each in state.uses if each.pod is not None}
        for uid in memory.evictions.keys() - users:
            del memory.evictions[uid]
        return state, min(again, default=None)

    def _rules_of(self, found: MaintenanceFacts) -> list[TaintRuleFacts]:
        """Return the rules that a maintenance has."""
        rules = self._world.of(TaintRuleFacts)
        known = (rules.get(Name("", rule_name(found, each))) for each in found.devices)
        return [each for each in known if each is not None and each.owner == found.uid]

    async def _add_rules(self, found: MaintenanceFacts, version: str, memory: _Memory) -> str:
        """Create the rules that are missing; return the problem, if any."""
        rules = self._world.of(TaintRuleFacts)
        missing: list[DeviceID] = []
        for device in found.devices:
            wanted = rule_facts(found, device)
            rule = rules.get(Name("", wanted.name))
            if rule is None:
                missing.append(device)
            elif replace(rule, uid="") != wanted:
                return (
                    f"DeviceTaintRule {rule.name} was changed by another client: delete it, and "
                    "the operator creates it again"
                )
        if not missing or self._clock() < memory.rules_at + WRITE_SECONDS:
            return ""
        memory.rules_at = self._clock()
        path = resource_path(crds.API_VERSION, crds.MAINTENANCES, name=found.name)
        try:
            # A rule must not outlive a maintenance that is gone; so the store is not enough.
            metadata = child(await self._session.get(path), "metadata")
            if metadata.get("uid") != found.uid or metadata.get("deletionTimestamp"):
                return ""
            for device in missing:
                body = rule_of(found, device, api_version=version)
                with suppress(AlreadyExistsError):  # the store is behind
                    await self._session.create(resource_path(version, "devicetaintrules"), body)
        except NotFoundError:
            return ""
        except ApiError as error:
            if not _is_refused(error):
                raise
            return f"a DeviceTaintRule cannot be created: {error.message}"
        return ""

    async def _remove(self, rules: Sequence[TaintRuleFacts]) -> str:
        """Delete rules; return the problem, if any."""
        for each in rules:
            path = resource_path(self._rules_version(), "devicetaintrules", name=each.name)
            try:
                with suppress(NotFoundError, ConflictError):
                    await self._session.delete(path, uid=each.uid)
            except ApiError as error:
                if not _is_refused(error):
                    raise
                return f"DeviceTaintRule {each.name} cannot be deleted: {error.message}"
        return ""

    async def _evict(self, found: MaintenanceFacts, due: Sequence[Use], memory: _Memory) -> None:
        """Evict pods whose turn it is."""
        now, left = self._clock(), EVICTIONS
        for use in due:
            if (pod := use.pod) is None:
                continue
            eviction = memory.evictions.setdefault(pod.uid, _Eviction())
            if eviction.again_at > now or not left:
                continue
            left -= 1
            place = {"namespace": use.claim.namespace, "name": pod.name}
            body = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": place,
                "deleteOptions": {"preconditions": {"uid": pod.uid}},
            }
            path = resource_path("v1", "pods", **place, subresource="eviction")
            eviction.refused = False
            try:
                await self._session.create(path, body)
            except (NotFoundError, ConflictError):
                eviction.said = "it is gone, and Kubernetes is about to release its claim"
                eviction.pause_seconds = EVICT_SECONDS[1]
            except ApiError as error:
                # With two budgets for one pod, the API server answers 500.
                if isinstance(error, UnavailableError) and error.status != 500:
                    raise
                eviction.said, eviction.refused = _refusal(error), True
            else:
                eviction.said = f"it is being evicted, because it uses {use.what}"
                eviction.pause_seconds = EVICT_SECONDS[1]
                await self._announce_eviction(found, use, pod.name, pod.uid)
            eviction.again_at = now + eviction.pause_seconds
            eviction.pause_seconds = min(eviction.pause_seconds * 2, EVICT_SECONDS[1])

    # ------------------------------------------------------------ what users read

    async def _write(self, found: MaintenanceFacts, change: Object) -> bool:
        """Write a status; return False if the API server refuses it."""
        path = resource_path(crds.API_VERSION, crds.MAINTENANCES, name=found.name)
        seen = {"uid": found.uid, "resourceVersion": found.version}
        try:
            body = await self._session.patch(f"{path}/status", {"metadata": seen, "status": change})
        except (NotFoundError, ConflictError):
            return True  # the store is behind: the watch reports it
        except ApiError as error:
            if not error.is_refusal:
                raise
            extra = {"maintenance": found.name, "error": str(error)}
            logger.warning("the status of a maintenance is refused", extra=extra)
            return False
        self._world.apply(project_maintenance(body))
        return True

    async def _announce(self, found: MaintenanceFacts, turned_to: Condition) -> None:
        """Write the Event of a condition that people wait for."""
        bad = turned_to.reason in ("Blocked", "Refused", "TimeLimit", "Unsupported") or (
            turned_to.type == "Accepted" and turned_to.status == "False"
        )
        if not bad and (turned_to.status != "True" or turned_to.type == "Accepted"):
            return
        reason = f"Not{turned_to.type}" if bad else turned_to.type
        await self._recorder.record(
            found.reference.body(),
            type="Warning" if bad else "Normal",
            reason=reason,
            action=found.mode,
            note=_with_reason(turned_to.message, found),
        )

    async def _announce_eviction(
        self, found: MaintenanceFacts, use: Use, pod: str, uid: str
    ) -> None:
        note = f"DeviceMaintenance {found.name} evicts the pod, because it uses {use.what}"
        await self._recorder.record(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": use.claim.namespace,
                "name": pod,
                "uid": uid,
            },
            type="Normal",
            reason="EvictedForMaintenance",
            action=DRAIN,
            note=_with_reason(note, found),
        )


# ---------------------------------------------------------------- the status


def _condition(found: MaintenanceFacts, kind: str) -> Mapping[str, Any]:
    conditions = children(found.status, "conditions")
    return next((each for each in conditions if each.get("type") == kind), child({}))


def _is_decided(found: MaintenanceFacts) -> bool:
    return _condition(found, "Accepted").get("status") in ("True", "False")


def _fields(
    found: MaintenanceFacts, *, devices: Sequence[DeviceID] | None = None
) -> dict[str, Any]:
    fields: dict[str, Any] = {"observedGeneration": found.generation}
    if devices:
        fields["devices"] = [each._asdict() for each in devices]
        fields["deviceCount"] = len(devices)
    return fields


def _status(found: MaintenanceFacts, accepted: Condition, state: _State, memory: _Memory) -> Status:
    """Return the status of an accepted maintenance."""
    said = memory.evictions
    blockers: list[tuple[bool, dict[str, str]]] = []
    for each in state.uses:
        eviction = said.get(each.pod.uid, _Eviction()) if each.pod else _Eviction()
        blockers.append((not eviction.refused, each.blocker(eviction.said)))
    # Those that something holds up come first.
    blockers.sort(key=lambda each: each[0])
    fields = _fields(found) | {
        "phase": state.phase,
        "taintedBy": "DeviceTaintRule" if state.by_rules else "NodePlugin",
        "taintedDevices": len(state.tainted),
        "pods": len({each.pod.uid for each in state.uses if each.pod is not None}),
        "blockers": [each for _, each in blockers[:LISTED]],
        "drainStartTime": state.drain_start or None,
    }
    conditions = (accepted, _tainted(found, state), _drained(found, state, said), _ended(state))
    return Status(conditions=conditions, fields=fields)


def _tainted(found: MaintenanceFacts, state: _State) -> Condition:
    done, every = len(state.tainted), plural(len(found.devices), "device")
    message = f"{done} of {every} {'is' if done == 1 else 'are'} tainted"
    if state.problem:
        return Condition("Tainted", "False", "Refused", state.problem)
    if state.phase != "Active":
        if done:
            return Condition("Tainted", "True", "Removing", message)
        return Condition("Tainted", "False", state.phase, "no device is tainted")
    if state.unsupported:
        number = plural(len(state.unsupported), "device")
        message = f"{number} of other drivers, {named(state.unsupported)}: {NO_RULES}"
        return Condition("Tainted", "False", "Unsupported", message)
    if done < len(found.devices):
        who = "the API server" if state.by_rules else "the node plugin"
        return Condition("Tainted", "False", "Progressing", f"{message}: waiting for {who}")
    return Condition("Tainted", "True", "Tainted", f"{message}: new pods do not get them")


def _drained(found: MaintenanceFacts, state: _State, evictions: dict[str, _Eviction]) -> Condition:
    if state.phase != "Active":
        message = "the maintenance is not active, and evicts no pods"
        return Condition("Drained", "False", state.phase, message)
    done = len(state.tainted) == len(found.devices)
    if not state.uses and done:
        return Condition("Drained", "True", "Drained", "no claim holds the devices")
    pods = plural(len({each.pod.uid for each in state.uses if each.pod is not None}), "pod")
    claims = plural(len({each.claim.uid for each in state.uses}), "claim")
    message = f"{claims} of {pods} hold devices"
    if found.mode == CORDON:
        return Condition("Drained", "False", "InUse", f"{message}; mode Cordon evicts no pods")
    if state.over:
        message = f"{message}; timeLimitSeconds is over, and pods are no longer evicted"
        return Condition("Drained", "False", "TimeLimit", message)
    if not done:
        return Condition("Drained", "False", "NotTainted", f"{message}; evictions wait for taints")
    refused = next((each for each in evictions.values() if each.refused), None)
    stuck = all(each.pod is None for each in state.uses)
    if refused is not None:
        return Condition("Drained", "False", "Blocked", f"{message}; {refused.said}")
    if stuck:
        blocked = state.uses[0].blocker()["message"]
        return Condition("Drained", "False", "Blocked", f"{message}; {blocked}")
    return Condition("Drained", "False", "Evicting", f"{message}; they are being evicted")


def _ended(state: _State) -> Condition:
    if state.phase == "Ended" and not state.tainted and not state.problem:
        return Condition("Ended", "True", "WindowOver", "the window is over; no device is tainted")
    message = "to end it, delete the DeviceMaintenance"
    if state.phase == "Scheduled":
        message = "the window has not begun"
    return Condition("Ended", "False", state.phase, message)


def _is_refused(error: ApiError) -> bool:
    return error.is_refusal or isinstance(error, TooManyRequestsError)


def _refusal(error: ApiError) -> str:
    """Return why a pod cannot be evicted: the budget that forbids it, by name."""
    causes: list[Object] = error.details.get("causes") or []
    budgets = [text(each, "message") for each in causes if each.get("reason") == "DisruptionBudget"]
    said = "; ".join(filter(None, budgets)) or error.message
    busy = isinstance(error, TooManyRequestsError) and not budgets
    return f"the API server {'delays' if busy else 'refuses'} its eviction: {said}"


def _with_reason(note: str, found: MaintenanceFacts) -> str:
    return f"{note}. Reason: {found.reason}" if found.reason else note


def _time(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
