"""A backend on a real kubelet: the example in Go, which runs in a separate process."""

from __future__ import annotations

import json

import pytest

from e2e.foreign import (
    BACKEND_SET,
    BACKENDS,
    BLINKER_CLASS,
    BLINKERS,
    BLINKERS_DIRECTORY,
    LOCAL,
    PLUGINS,
    THIEF_BACKEND,
    Yard,
    blinkers_set,
    daemon_set,
    with_set,
)
from e2e.kit import (
    TEST_IMAGE,
    cdi_files,
    claim,
    from_claim,
    from_template,
    pod,
    restarts,
    template,
    wait_for,
)
from e2e.scripted.stage import opaque
from e2e.simulated import STAY
from e2e.writes import written

pytestmark = [pytest.mark.e2e, pytest.mark.feature("backends")]

STOPPED = "drakit.dev/stopped:NoSchedule"


def with_blinker(yard: Yard, name: str) -> None:
    """Apply a pod with a blinker, but do not wait for it."""
    yard.apply(
        template(name, ("blinker", BLINKER_CLASS)),
        pod(name, ("b", from_template(name)), command=["sh", "-c", STAY]),
    )


def blinker_of(yard: Yard, pod_name: str) -> str:
    """Return the blinker of a running pod's container."""
    (path,) = yard.inside(pod_name, "ls -d /blinkers/*")
    return path.removeprefix("/blinkers/")


def test_a_backends_devices_are_prepared_with_parameters_and_unprepared(yard):
    red = opaque(BLINKERS, {"color": "red"})
    yard.apply(
        claim("red", ("blinker", BLINKER_CLASS), config=[red]),
        pod("red", ("b", from_claim("red")), command=["sh", "-c", STAY]),
        claim("blue", ("blinker", BLINKER_CLASS), config=[opaque(BLINKERS, {"color": "blue"})]),
        pod("blue", ("b", from_claim("blue")), command=["sh", "-c", STAY]),
    )
    yard.wait_phase("red", "Running")
    name = blinker_of(yard, "red")
    assert yard.inside("red", "env | grep ^BLINKER_COLOR_") == [
        f"BLINKER_COLOR_BLINKER__{name.upper()}=red"
    ]
    assert "choose one of" in yard.event("blue", 'color is "blue"')
    assert yard.held() == {name}
    read = json.loads("".join(yard.inside("red", "read-metadata claim red blinker")))
    ((found,),) = [request["Devices"] for request in read["Requests"]]
    assert (found["Driver"], found["Name"]) == (BLINKERS, name)
    yard.delete("pod", "red")
    yard.delete("pod", "blue")
    wait_for("the blinker to be free", lambda: not yard.held())
    assert cdi_files(yard.cluster, yard.node, driver=BLINKERS) == set()


THIEFS_STATE = "/run/thief"
BURGLARY = """
cd /run/drakit
rm -rf ../blinkers ../../backends/blinkers
ln ../blinkers/blinkers.sock hard.sock
ln -s /var/lib/kubelet/plugins/drakit.dev/backends/blinkers/blinkers.sock link.sock
ls -a . ..
"""
"""Attempts of a program in a backend's pod to take over the socket of another backend."""


@pytest.mark.disruptive
@pytest.mark.serial
def test_a_backend_that_announces_the_name_of_another_one_never_gets_it(yard):
    with_blinker(yard, "user")
    yard.wait_phase("user", "Running")
    name = blinker_of(yard, "user")
    before = yard.published(BLINKERS)
    own = yard.cluster.node_path(yard.node, BACKENDS) / "blinkers" / "blinkers.sock"
    inode = own.stat().st_ino
    thief = blinkers_set("thief", driver=BLINKERS, directory=BLINKERS_DIRECTORY)
    burglar = daemon_set(
        "burglar",
        TEST_IMAGE,
        ["sh", "-c", f"{BURGLARY}; sleep 3600"],
        {"/run/drakit": f"{BACKENDS}/thief"},
    )
    with with_set(yard, thief), with_set(yard, burglar):
        message = yard.node_event("BackendRefused", "the backend at", "thief.sock")
        assert f"it reports the name {BLINKERS}, but only {THIEF_BACKEND} can register" in message
        assert f"the directory of {BLINKERS} is {BACKENDS}/blinkers" in message
        # The node plugin does not follow a link, and the pod does not contain the other directory
        # at all.
        assert "not a socket" in yard.node_event("BackendRefused", "link.sock")
        assert own.stat().st_ino == inode
        assert not (own.parents[1] / "thief" / "hard.sock").exists()
        assert yard.published(BLINKERS) == before
        assert not yard.tainted(BLINKERS)

        # The name is free, but its claims still wait for the backend that prepared them.
        yard.remove(BACKEND_SET)
        wait_for("its devices to be tainted", lambda: yard.tainted(BLINKERS) == {STOPPED})
        yard.delete("pod", "user")
        with_blinker(yard, "next")
        yard.refused("next")
        assert yard.held() == {name}
        yard.place(BACKEND_SET)
        yard.wait_phase("next", "Running")
        wait_for("what was left to be undone", lambda: yard.held() == {blinker_of(yard, "next")})
        state = yard.cluster.node_path(yard.node, THIEFS_STATE)
        assert [path for path in state.iterdir() if not path.name.startswith(".")] == []
    (own.parents[1] / "thief" / "link.sock").unlink()


@pytest.mark.disruptive
@pytest.mark.serial
def test_a_backend_is_killed_and_the_node_plugin_too_and_nothing_is_lost(yard):
    with_blinker(yard, "user")
    yard.wait_phase("user", "Running")
    name = blinker_of(yard, "user")
    before = yard.published(BLINKERS)
    yard.kill(BACKEND_SET)
    yard.wait_untainted(BLINKERS)
    assert yard.published(BLINKERS) == before

    with written(yard.cluster, BLINKERS, LOCAL, PLUGINS):
        yard.kill_plugin()
        with_blinker(yard, "next")
        yard.wait_phase("next", "Running")
    assert yard.published(BLINKERS) == before
    assert yard.held() == {name, blinker_of(yard, "next")}
    assert restarts(yard.get("pod", "user")) == 0
    # Neither this daemon nor this backend has prepared the claim that they undo.
    yard.delete("pod", "user")
    yard.delete("pod", "next")
    wait_for("both blinkers to be free", lambda: not yard.held())
