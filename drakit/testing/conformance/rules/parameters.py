"""
Opaque parameters and errors: users can write parameters with any content, and read the driver's
errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drakit.testing.conformance.facts import ClaimUnderTest, ConformanceError, PublishedDevice
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rules import rule, steps

DEEP = 200
"""An object depth that API servers accept, but that a parser in the driver may reject."""

MAX_RAW = 10 * 1024
"""The API server's size limit for one config. A claim can have :data:`MAX_CONFIGS` configs."""

MAX_CONFIGS = 64

KEYS = 6
"""Maximum number of the target's own parameters to replace with invalid values."""

DENSE: Mapping[str, Any] = {"a": [[]] * ((MAX_RAW - 8) // 3)}
"""A config with the largest possible number of memory-consuming values."""

_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "without keys": {},
    "with an unknown key": {"no-such-key": 1},
    "with 500 keys": {f"key-{number}": number for number in range(500)},
    "with a long string": {"text": "x" * 9000},
    "with as many values as an API server accepts": DENSE,
    "with numbers that are too large": {"number": 2**64 - 1, "count": -(2**63), "size": 1e308},
    "with control characters": {"\u202ename\u0000": "\u0000\u001b[2J\u2028\U0001f600"},
    "of the wrong types": {"apiVersion": [], "kind": 1, "spec": "x", "mode": {"a": None}},
    "with a path": {"path": "../../../../etc/passwd", "device": "/dev/null", "name": "../x"},
}
_VALUES: tuple[Any, ...] = (None, True, -1, 1e308, "", "\u0000/../x", [], [[1]], {}, {"a": None})


def hostile(own: Mapping[str, Any] | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield invalid parameters, each with a description. `own` are the target's valid
    parameters."""
    yield from _PLAIN.items()
    nested: dict[str, Any] = {}
    for _ in range(DEEP):
        nested = {"a": nested}
    yield f"of {DEEP} levels", nested
    for key in list(own or {})[:KEYS]:
        for value in _VALUES:
            yield f"with {key}: {value!r}", {**(own or {}), key: value}


@rule(
    "hostile-parameters",
    "the driver accepts or rejects a claim's opaque parameters without an effect on other claims",
    why="Any user who can create a claim can write opaque parameters, which neither the API "
    "server nor the scheduler checks. If they stop the driver, all users lose its devices.",
    seconds=120,
)
async def hostile_parameters(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    await steps.prepared_once(kit, device)
    begun = len(kit.log())
    for what, config in hostile(kit.target.parameters):
        claim = kit.claim(device, configs=[config])
        await _try(kit, claim, what)
        if reasons := steps.stop_reasons(kit.log()[begun:]):
            kit.fail(f"a claim with parameters {what} stopped the driver: {reasons[0]}")
    bomb = kit.claim(device, configs=[DENSE] * MAX_CONFIGS)
    await _try(
        kit, bomb, f"of {MAX_CONFIGS} configs of the largest size that an API server accepts"
    )
    await steps.free_again(kit, device, when="after claims with parameters of all kinds")
    if names := steps.stopped(await kit.devices()):
        kit.fail(f"claims with invalid parameters stopped the driver: {names[0]} is tainted")


async def _try(kit: Kit, claim: ClaimUnderTest, what: str) -> None:
    """Prepare and unprepare a claim. Both calls must return a response, which can be an error."""
    try:
        await kit.prepare(claim)
        error = (await kit.unprepare(claim)).get(claim.uid)
    except ConformanceError as failure:
        kit.fail(f"a claim with parameters {what} got no response: {failure}")
    if error:
        kit.fail(f"a claim with parameters {what} cannot be unprepared: {error}")


@rule(
    "error-messages",
    "an error message is a sentence for users, and the same cause always produces the same message",
    why="The message of an error appears in an Event on the pod, and the kubelet retries "
    "indefinitely. If the text contains a time or a counter, each attempt creates a new Event. A "
    "traceback does not help a user.",
)
async def error_messages(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    await steps.prepared_once(kit, device)
    refused = 0
    for what, claim in _bad(kit, device):
        error = (await steps.answer_of(kit, claim)).error
        if error:
            refused += 1
            steps.check_sentence(kit, error, what)
            again = (await steps.answer_of(kit, claim)).error
            if again != error:
                kit.fail(f"a claim {what} got two different errors: {error!r}, then {again!r}")
        if left := (await kit.unprepare(claim)).get(claim.uid):
            kit.skip(f"a claim {what} cannot be unprepared (see the unprepare rules): {left}")
    if not refused:
        kit.skip("the driver prepares all claims, so there is no error to check")


def _bad(kit: Kit, device: PublishedDevice) -> Iterator[tuple[str, ClaimUnderTest]]:
    """Store and yield claims that a driver may reject, each with a description."""
    absent = {"pool": device.pool, "device": "no-such-device"}
    yield "for a device that does not exist", kit.claim(results=[absent])
    for what, config in hostile(kit.target.parameters):
        yield f"with parameters {what}", kit.claim(device, configs=[config])
