"""
A pod whose claim has devices of several kinds of endpoints: a driver in the daemon's process, a
backend, and a device plugin.
"""

from __future__ import annotations

import pytest

from e2e.foreign import BLINKER_CLASS, BLINKERS, LOCAL, LOCAL_CLASS, PLUGINS, SAMPLE_CLASS
from e2e.kit import cdi_files, claim, from_claim, pod, wait_for
from e2e.simulated import STAY

pytestmark = [pytest.mark.e2e, pytest.mark.feature("backends", "deviceplugins")]

KINDS = {"local": LOCAL, "blinker": BLINKERS, "sample": PLUGINS}
CLASSES = {"local": LOCAL_CLASS, "blinker": BLINKER_CLASS, "sample": SAMPLE_CLASS}


def test_a_claim_has_devices_of_several_kinds_of_endpoints(yard):
    yard.apply(
        claim("mixed", *CLASSES.items()),
        pod("mixed", ("c", from_claim("mixed")), command=["sh", "-c", STAY]),
    )
    yard.wait_phase("mixed", "Running")
    results = yard.claim_of("mixed", "c")["status"]["allocation"]["devices"]["results"]
    assert {r["request"]: r["driver"] for r in results} == KINDS
    seen = yard.inside("mixed", "env; ls -d /tmp/Dev-* /blinkers/*")
    assert any(line.startswith("/tmp/Dev-") for line in seen)
    assert any(line.startswith("/blinkers/") for line in seen)
    assert any(line.startswith("SIMULATED_") for line in seen)
    yard.delete("pod", "mixed")
    wait_for(
        "no driver to have anything of the claim left",
        lambda: (
            not yard.held()
            and not any(cdi_files(yard.cluster, yard.node, driver=d) for d in KINDS.values())
        ),
    )
