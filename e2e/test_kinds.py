"""
One pod whose claim has devices of several kinds of endpoints: of the daemon's own process, of a
backend, of a device plugin.
"""

from __future__ import annotations

import pytest

from e2e.foreign import (
    BLINKER_CLASS,
    BLINKERS,
    FUSE_CLASS,
    LOCAL,
    LOCAL_CLASS,
    PLUGINS,
    SAMPLE_CLASS,
)
from e2e.kit import cdi_files, claim, container, from_claim, pod, wait_for
from e2e.simulated import STAY

pytestmark = [pytest.mark.e2e, pytest.mark.feature("backends", "deviceplugins")]

KINDS = {"local": LOCAL, "blinker": BLINKERS, "sample": PLUGINS}
CLASSES = {"local": LOCAL_CLASS, "blinker": BLINKER_CLASS, "sample": SAMPLE_CLASS}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("blinker", "sample"), id="a-backend-and-a-device-plugin"),
        pytest.param(("local", "blinker", "sample"), id="all-three-kinds"),
    ],
)
def test_a_claim_has_devices_of_several_kinds_of_endpoints(yard, names):
    yard.apply(
        claim("mixed", *((name, CLASSES[name]) for name in names)),
        pod("mixed", ("c", from_claim("mixed")), command=["sh", "-c", STAY]),
    )
    yard.wait_phase("mixed", "Running")
    results = yard.claim_of("mixed", "c")["status"]["allocation"]["devices"]["results"]
    assert {r["request"]: r["driver"] for r in results} == {name: KINDS[name] for name in names}
    seen = yard.inside("mixed", "env; ls -d /tmp/Dev-* /blinkers/*")
    assert any(line.startswith("/tmp/Dev-") for line in seen)
    assert any(line.startswith("/blinkers/") for line in seen)
    assert any(line.startswith("SIMULATED_") for line in seen) == ("local" in names)
    yard.delete("pod", "mixed")
    wait_for(
        "no driver to have anything of the claim left",
        lambda: (
            not yard.held()
            and not any(cdi_files(yard.cluster, yard.node, driver=d) for d in KINDS.values())
        ),
    )


def test_containers_of_a_pod_have_what_they_name_of_a_claim_of_two_kinds(yard):
    def stay(name: str, request: str) -> dict:
        return container(name, ("c", request), command=["sh", "-c", STAY])

    yard.apply(
        claim("mixed", ("blinker", BLINKER_CLASS), ("fuse", FUSE_CLASS)),
        pod(
            "mixed",
            ("c", from_claim("mixed")),
            containers=[stay("a", "blinker"), stay("b", "fuse")],
        ),
    )
    yard.wait_phase("mixed", "Running")
    for name, there, not_there in (
        ("a", "/blinkers", "/dev/fuse"),
        ("b", "/dev/fuse", "/blinkers"),
    ):
        script = f"test -e {there} && test ! -e {not_there}"
        yard.kubectl("exec", "mixed", "-c", name, "--", "sh", "-c", script)
