"""
The rest of a claim: metadata, consumers, other drivers' devices, and parameter versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from drakit.driver import Driver, ParameterVersion
from drakit.testing.conformance.facts import ClaimUnderTest, ConformanceError, PublishedDevice
from drakit.testing.conformance.kit import Kit
from drakit.testing.conformance.rules import rule, steps

LABELS = 2000
"""A number of labels that exceeds the node plugin's limit. The API server does not limit the number
of labels."""

ANNOTATION_BYTES = 200 * 1024
"""Total size of the annotations. The API server's limit is 256 KiB."""

CONSUMERS = 256
"""Number of consumers. This is the API server's limit."""

UNKNOWN = {"apiVersion": "no-such-group.example.com/v9", "kind": "NoSuchKind"}

_HOSTILE = "\u202e\u0000\u001b[2J\u2028\U0001f600../../etc/passwd"


def _claims(kit: Kit, device: PublishedDevice) -> Iterator[tuple[str, ClaimUnderTest]]:
    """Store and yield claims in various forms that users can write, each with a description."""
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "pod", "uid": "u", "controller": True}
    many = [{"resource": "pods", "name": f"pod-{n}", "uid": f"u-{n}"} for n in range(CONSUMERS)]
    train = {"apiGroup": "batch.example.com", "resource": "trains", "name": "t", "uid": "t"}
    other = {"driver": "other.example.com", "pool": "fabric", "request": "link"}
    texts = {f"example.com/a{n}": _HOSTILE * 20 for n in range(20)}
    yield "without metadata and consumers", kit.claim(device, reserved_for=[])
    yield (
        "with labels and owners",
        kit.claim(
            device, metadata={"labels": {"team": "a", "empty": ""}, "ownerReferences": [owner] * 3}
        ),
    )
    yield "with hostile annotations", kit.claim(device, metadata={"annotations": texts})
    yield f"with {CONSUMERS} consumers", kit.claim(device, reserved_for=many)
    yield "with a consumer that is not a pod", kit.claim(device, reserved_for=[train])
    others = [{**other, "device": f"nic-{n}", "shareID": f"s-{n}"} for n in range(31)]
    yield "with devices of another driver", kit.claim(device, others=others)
    labels = {f"l{n}": "x" for n in range(LABELS)}
    yield f"with {LABELS:,} labels", kit.claim(device, metadata={"labels": labels})
    large = {"a": "x" * ANNOTATION_BYTES}
    yield "with large annotations", kit.claim(device, metadata={"annotations": large})


@rule(
    "claim-metadata",
    "the driver accepts or rejects a claim's metadata without an effect on other claims",
    why="Users write any labels and annotations, or none, and a claim can be reserved for many "
    "pods or for none. A driver with `claim_data` reads them.",
    seconds=120,
)
async def claim_metadata(kit: Kit) -> None:
    device, *_ = await steps.usable(kit)
    await steps.prepared_once(kit, device)
    begun = len(kit.log())
    for what, claim in _claims(kit, device):
        try:
            answer = await steps.answer_of(kit, claim)
            left = (await kit.unprepare(claim)).get(claim.uid)
        except ConformanceError as failure:
            kit.fail(f"a claim {what} got no response: {failure}")
        if answer.error:
            steps.check_sentence(kit, answer.error, what)
        if left:
            kit.fail(f"a claim {what} cannot be unprepared: {left}")
        if reasons := steps.stop_reasons(kit.log()[begun:]):
            kit.fail(f"a claim {what} stopped the driver: {reasons[0]}")
    await steps.free_again(kit, device, when="after claims with metadata of all kinds")


@rule(
    "parameter-versions",
    "the error for parameters of an unknown version names the known ones, and those of each known "
    "version reach the driver",
    why="Claims and checkpoints outlive a driver's version. If a conversion fails, users of an "
    "earlier version cannot start pods after an update.",
    kinds=("python",),
)
async def parameter_versions(kit: Kit) -> None:
    kind = cast("type[Driver[Any, Any]]", steps.class_of(kit.target))
    versions: Sequence[ParameterVersion] = kind.parameter_versions
    if not versions:
        kit.skip("the driver's parameters have no versions")
    device, *_ = await steps.usable(kit)
    own: Mapping[str, Any] = kit.target.parameters or {}
    unknown = kit.claim(device, configs=[{**own, **UNKNOWN}])
    error = (await steps.answer_of(kit, unknown)).error
    await steps.must_unprepare(kit, unknown, when="after parameters of an unknown version,")
    for version in versions:
        if version.api_version not in error:
            kit.fail(
                f"the error for a claim with parameters of an unknown version does not name "
                f"{version.api_version}: {error!r}"
            )
    for version in versions:
        config = {"apiVersion": version.api_version, "kind": version.kind}
        what = f"with parameters of {version.api_version or 'no version'} that have no other key"
        claim = kit.claim(device, configs=[config] if version.api_version else [{}])
        error = (await steps.answer_of(kit, claim)).error
        if re.search(r"because driver \S+ failed with", error):
            kit.fail(f"a claim {what} cannot be prepared, because the conversion fails: {error}")
        if error:
            steps.check_sentence(kit, error, what)
        await steps.must_unprepare(kit, claim, when=f"after a claim {what},")
