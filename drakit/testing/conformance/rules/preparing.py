"""
Preparing: the response for a claim must be the same when the claim is prepared again.

Does not depend on interrupted calls.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drakit.driver import PREPARE_METHODS, overrides
from drakit.testing.conformance.facts import ClaimUnderTest, PublishedDevice
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rules import rule, steps
from drakit_formats.cdi import lint_spec

CHECKED_DEVICES = 8
"""Maximum number of devices whose edits to check. A driver is unlikely to have more kinds of
devices."""

LOST_AT_REBOOT = ("/run/", "/var/run/", "/tmp/", "/dev/shm/")  # noqa: S108
"""Directories that are empty after a node reboot."""

_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@rule(
    "prepare",
    "the response for a prepared claim has a CDI name for each device",
    why="The kubelet calls NodePrepareResources before it creates a pod's containers, and passes "
    "the CDI names of the response to the runtime. If the response has an error or lacks a "
    "device, the pod does not start. The kubelet waits 45 s for the response.",
)
async def prepare(kit: Kit) -> None:
    devices = await steps.usable(kit)
    await _expect_edits(kit, devices)
    await _prepare_and_check(kit, devices[0])
    if len(devices) > 2:
        await _prepare_and_check(kit, *devices[1:3])


async def _expect_edits(kit: Kit, devices: Sequence[PublishedDevice]) -> None:
    """Fail the rule if the driver does not define prepare, and its devices have no edits. If the
    driver defines prepare, this may be intentional."""
    kind = steps.class_of(kit.target)
    if kind is None or overrides(kind, *PREPARE_METHODS):
        return
    for device in devices[:CHECKED_DEVICES]:
        claim = kit.claim(device)
        if (await steps.answer_of(kit, claim)).error:
            return
        edits = steps.edits_of(kit, claim)
        await steps.must_unprepare(kit, claim, when="after its edits were checked,")
        if edits.keys() != {"env"} or not str(edits["env"]).startswith("['DRAKIT_DEVICE_"):
            return
    kit.fail(
        "containers get nothing: the driver defines none of prepare and prepare_claims, and its "
        "devices have no edits; define one of these methods, or set Device.edits"
    )


async def _prepare_and_check(kit: Kit, *devices: PublishedDevice) -> None:
    claim = kit.claim(*devices)
    names = [device.name for device in devices]
    answer = await steps.must_prepare(kit, claim, when=f"with {', '.join(names)},")
    if sorted((d.pool, d.name) for d in answer.devices) != sorted(
        (d.pool, d.name) for d in devices
    ):
        kit.fail(
            f"the response for a claim of {', '.join(names)} contains "
            f"{', '.join(d.name for d in answer.devices) or 'no device'}"
        )
    ids = answer.cdi_ids
    if len(ids) < len(devices) or len(set(ids)) != len(ids):
        kit.fail(f"the response for {len(devices)} devices has the CDI names {', '.join(ids)}")
    if kit.spec(claim) is None:
        kit.fail("the claim is prepared, but has no CDI file")


@rule(
    "cdi-valid",
    "container edits are a valid CDI specification",
    why="The container runtime reads the CDI file when it creates a container. If it rejects the "
    "file, the pod stays in CreateContainerError, and the kubelet does not call the driver again.",
)
async def cdi_valid(kit: Kit) -> None:
    checked = 0
    for device in (await steps.usable(kit))[:CHECKED_DEVICES]:
        claim = kit.claim(device)
        answer = await steps.answer_of(kit, claim)
        if "cannot write the CDI file" in answer.error:
            kit.fail(
                f"the node plugin cannot write a CDI file for device {device.name}: {answer.error}"
            )
        if answer.error:
            continue
        checked += 1
        _check_spec(kit, claim, device)
    if not checked:
        kit.skip("the driver prepares no claim (see the rule prepare)")


def _check_spec(kit: Kit, claim: ClaimUnderTest, device: PublishedDevice) -> None:
    spec = kit.spec(claim)
    if spec is None:
        kit.fail(f"the claim of device {device.name} is prepared, but has no CDI file")
    problems = lint_spec(spec)
    if errors := [problem for problem in problems if problem.severity == "error"]:
        kit.fail(f"the CDI file of device {device.name} is not valid: {errors[0]}")
    for text in steps.edits_of(kit, claim).get("env") or ():
        if not _ENV.match(str(text)):
            kit.fail(
                f"device {device.name} gives its containers the environment variable {text!r}, "
                f"whose name a shell cannot use; use letters, digits and underscores"
            )


@rule(
    "host-paths",
    "the host paths in container edits exist",
    why="The runtime mounts the paths in the CDI file. If a path does not exist on the node, the "
    "pod stays in CreateContainerError.",
)
async def host_paths(kit: Kit) -> None:
    checked = 0
    for device in (await steps.usable(kit))[:CHECKED_DEVICES]:
        claim = kit.claim(device)
        if (await steps.answer_of(kit, claim)).error:
            continue
        checked += 1
        edits = steps.edits_of(kit, claim)
        if missing := steps.missing_paths(edits):
            kit.fail(
                f"the edits of device {device.name} name {missing[0]}, which does not exist on "
                f"the host"
            )
        for hook in edits.get("hooks") or ():
            if not os.access(str(hook.get("path")), os.X_OK):
                kit.fail(
                    f"the {hook.get('hookName')} hook of device {device.name}, {hook.get('path')}, "
                    f"is not executable"
                )
    if not checked:
        kit.skip("the driver prepares no claim (see the rule prepare)")


@rule(
    "prepare-again",
    "a claim that is prepared again gets the same result",
    why="After a restart or a reboot, the kubelet prepares the same claim again, and the "
    "containers must get the same result. Side effects that are already in place are not an error.",
)
async def prepare_again(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    held = await steps.hold(kit, kit.claim(device))
    await _expect_same(kit, held, when="when the kubelet repeats the call,")
    await kit.restart()
    await _expect_same(kit, held, when="after a crash of the node plugin,")
    await kit.reboot()
    await _expect_same(kit, held, when="after a reboot of the node,")


async def _expect_same(kit: Kit, held: steps.Held, *, when: str) -> None:
    edits = held.edits
    again = await steps.must_prepare(kit, held.claim, when=when)
    if again.devices != held.answer.devices:
        kit.fail(f"{when} a prepared claim got different devices than the first time")
    if (now := steps.edits_of(kit, held.claim)) != edits:
        key = next(k for k in sorted(edits.keys() | now.keys()) if edits.get(k) != now.get(k))
        kit.fail(
            f"{when} containers get a different {key} for the same claim: first "
            f"{edits.get(key)!r}, then {now.get(key)!r}"
        )


@rule(
    "reboot",
    "a claim is prepared again after a reboot",
    why="Pods survive a reboot of their node: the kubelet prepares their claims again. State in "
    "memory, in /run and in the hardware is lost, even if files on disk record it.",
)
async def reboot(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    claim = kit.claim(device)
    await steps.prepared(kit, claim)
    made = await _made(kit, claim)
    await kit.stop()
    for path in made:
        _remove(path)
    await kit.reboot()
    await steps.must_prepare(kit, claim, when="after a reboot of the node,")
    if kit.spec(claim) is None:
        kit.fail("after a reboot, the claim is prepared, but has no CDI file")
    if missing := steps.missing_paths(steps.edits_of(kit, claim)):
        kit.fail(
            f"after a reboot, prepare succeeds, but did not create {missing[0]} again, which the "
            f"first prepare had created"
        )


async def _made(kit: Kit, claim: ClaimUnderTest) -> Sequence[Path]:
    """Return the paths that prepare creates and a reboot removes: the paths that unprepare removes,
    if they are in directories that are empty after a reboot. Leaves the claim prepared."""
    paths = [Path(path) for path in steps.host_paths(steps.edits_of(kit, claim))]
    if (await kit.unprepare(claim)).get(claim.uid):
        return ()
    made = [path for path in paths if not path.exists()]
    await steps.prepared(kit, claim)
    return [path for path in made if _lost_at_reboot(kit, path)]


def _lost_at_reboot(kit: Kit, path: Path) -> bool:
    """Return whether to remove a path to simulate a reboot. Paths in the kit's folder are excluded,
    because the kit itself removes the files there that a reboot loses. Mounts and their content are
    never removed."""
    if not str(path).startswith(LOST_AT_REBOOT) or path.is_relative_to(kit.root):
        return False
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return not path.is_symlink() and not any(Path(m).is_relative_to(path) for m in mounts)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@rule(
    "partial-success",
    "a claim that cannot be prepared does not affect other claims",
    why="One call contains all claims of a pod, and each claim has its own result: the kubelet "
    "expects successful claims to stay prepared, and calls again for the rest.",
)
async def partial_success(kit: Kit) -> None:
    devices = await steps.usable(kit)
    good = kit.claim(devices[0])
    await steps.prepared(kit, good)
    await steps.must_unprepare(kit, good, when="at the start of the rule,")
    absent = {"pool": devices[0].pool, "device": "no-such-device"}
    bad = kit.claim(results=[absent])
    await _beside(kit, good, bad, "a claim whose device does not exist")
    if len(devices) > 1:
        odd = kit.claim(devices[1], configs=[{"no-such-key": [1, {"a": None}]}])
        await _beside(kit, good, odd, "a claim with unknown parameters")


async def _beside(kit: Kit, good: ClaimUnderTest, bad: ClaimUnderTest, what: str) -> None:
    answers = await kit.prepare(good, bad)
    if good.uid not in answers or bad.uid not in answers:
        kit.fail(f"in a call with {what}, the response does not contain all claims")
    if error := answers[good.uid].error:
        kit.fail(f"in a call with {what}, a valid claim failed: {error}")
    await steps.must_unprepare(kit, good, when=f"after it was prepared in a call with {what},")
    await kit.unprepare(bad)


@rule(
    "batch",
    "one call prepares claims for different devices",
    why="The kubelet prepares all claims of a pod in one call. If a claim is missing from the "
    "response, the kubelet treats its prepare as failed.",
)
async def batch(kit: Kit) -> None:
    devices = (await steps.usable(kit, at_least=2))[:4]
    await steps.prepared_once(kit, devices[0])
    claims = [kit.claim(device) for device in devices]
    answers = await kit.prepare(*claims)
    for claim, device in zip(claims, devices, strict=True):
        if claim.uid not in answers or answers[claim.uid].error:
            error = (
                answers[claim.uid].error
                if claim.uid in answers
                else "the response does not contain it"
            )
            kit.fail(
                f"in a call with {len(claims)} claims, the claim of {device.name} was not "
                f"prepared: {error}"
            )
    errors = await kit.unprepare(*claims)
    for claim, device in zip(claims, devices, strict=True):
        if errors.get(claim.uid) != "":
            kit.fail(
                f"in a call with {len(claims)} claims, the claim of {device.name} was not "
                f"unprepared: {errors.get(claim.uid, 'the response does not contain it')}"
            )


@rule(
    "device-reuse",
    "the next claim for a device gets no data from the previous claim",
    why="The scheduler allocates a device to the next pod as soon as its claim is deallocated. "
    "Data and settings of the previous claim belong to another user.",
)
async def device_reuse(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    former = kit.claim(device)
    await steps.prepared(kit, former)
    await steps.must_unprepare(kit, former, when="at the start of the rule,")
    claim = kit.claim(device)
    await steps.must_prepare(kit, claim, when="after the previous claim was unprepared,")
    if trace := _trace(kit.spec(claim), former):
        kit.fail(
            f"the edits of a device's second claim refer to the first claim: {trace}; use data of "
            f"the second claim only"
        )
    await kit.reboot()
    await steps.must_prepare(kit, claim, when="after a reboot of the node,")
    if trace := _trace(kit.spec(claim), former):
        kit.fail(
            f"after a reboot, the edits of a device's second claim refer to the first claim: "
            f"{trace}"
        )


@rule(
    "claim-reallocated",
    "a claim that is allocated again gets its new device, and releases the old device",
    why="After the last pod of a claim terminates, Kubernetes deallocates the claim. The next pod "
    "can get another device with the same claim UID.",
)
async def claim_reallocated(kit: Kit) -> None:
    old, new, *_ = await steps.usable(kit, at_least=2)
    plain = kit.claim(new)
    await steps.prepared(kit, plain)
    wanted = _without_uid(kit, plain)
    await steps.must_unprepare(kit, plain, when="at the start of the rule,")
    claim = kit.claim(old)
    await steps.prepared(kit, claim)
    before = _without_uid(kit, claim)
    claim = kit.reallocate(claim, new)
    answer = await steps.must_prepare(
        kit, claim, when=f"after it was allocated {new.name} instead,"
    )
    if names := [device.name for device in answer.devices if device.name != new.name]:
        kit.fail(f"the response for a claim that was allocated {new.name} contains {names[0]}")
    if before != wanted and _without_uid(kit, claim) == before:
        kit.fail(
            f"after a claim was allocated {new.name} instead of {old.name}, its containers "
            f"still get the edits of {old.name}: {steps.edits_of(kit, claim)}"
        )
    await steps.free_again(kit, old, when="after its claim was allocated another device")
    await steps.must_unprepare(kit, claim, when="after it was allocated again,")


def _without_uid(kit: Kit, claim: ClaimUnderTest) -> str:
    """Return a claim's edits, with a placeholder for its UID."""
    text = str(steps.edits_of(kit, claim))
    for uid in _spellings(claim.uid):
        text = text.replace(uid, "UID")
    return text


def _spellings(uid: str) -> tuple[str, str]:
    """Return a UID unchanged, and in the form used in environment variable names: containers
    without other edits get a variable whose name contains the UID."""
    return uid, re.sub(r"[^A-Z0-9]", "_", uid.upper())


def _trace(value: Any, claim: ClaimUnderTest) -> str | None:
    """Return the first string in a nested value that contains the claim's UID."""
    if isinstance(value, str):
        return value if any(uid in value for uid in _spellings(claim.uid)) else None
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    elif isinstance(value, list):
        parts = [*value]  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    return next((found for part in parts if (found := _trace(part, claim))), None)
