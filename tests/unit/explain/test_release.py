"""Rules of the counts that differ between the minor releases of Kubernetes."""

from dataclasses import replace

import pytest

from drakit_explain.devices import Amount, CapacityFacts
from drakit_explain.model import DeviceID, Share
from drakit_explain.pending import Verdict
from tests.fakes.world import (
    ANY,
    POD,
    claim,
    device,
    explain,
    holding,
    node,
    request,
    slice_on,
    world_of,
)

ALL_MINORS = {34, 35, 36, 37, None}
MEMORY = CapacityFacts(name="m", value="2")
SHARED = device("shared", capacity=[MEMORY], shareable=True)


def share_of(name, *consumed, of="n1"):
    share = Share(device=DeviceID("d", of, name), consumed=consumed)
    return replace(holding("other"), shares=(share,))


def fitting(*facts):
    """Return the minor releases whose scheduler finds devices for the claim."""
    found = set()
    for minor in ALL_MINORS:
        world = world_of(ANY, node("n1"), *facts)
        world.use_release(minor)
        verdict = explain(POD, world).verdict
        assert verdict in (Verdict.FITS, Verdict.BLOCKED)
        if verdict is Verdict.FITS:
            found.add(minor)
    return found


@pytest.mark.parametrize(
    ("used", "minors"),
    [
        pytest.param("2", {34, 35, 36}, id="too-much"),
        pytest.param("1", ALL_MINORS, id="half"),
    ],
)
def test_all_devices_include_one_of_which_others_use_too_much(used, minors):
    free = device("free", capacity=[MEMORY])
    asked = request(count=0, capacity=(Amount("m", "1"),))
    facts = [slice_on("n1", free, SHARED), share_of("shared", Amount("m", used)), claim(asked)]
    assert fitting(*facts) == minors
