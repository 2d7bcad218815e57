"""The content of claims reaches the driver and the right containers."""

from __future__ import annotations

import json

import pytest

from e2e.cluster.api import Capability
from e2e.kit import (
    claim,
    container,
    device_class,
    from_claim,
    from_template,
    pod,
    ready,
    restarts,
    template,
    wait_for,
)
from e2e.scripted.control import Rule
from e2e.scripted.stage import HORNS, LAMPS, Stage, number, opaque, wait_began

pytestmark = [pytest.mark.e2e, pytest.mark.feature("claims")]


def facts(stage: Stage, pod_name: str, container_name: str | None = None) -> dict[str, dict]:
    """Return the allocations that a container sees, by device."""
    text = wait_for("the container's output", lambda: stage.logs(pod_name, container_name))
    devices = [line.partition("=") for line in text.splitlines() if line.startswith("SCRIPTED_")]
    return {facts["device"]: facts for facts in (json.loads(value) for _, _, value in devices)}


ENV = ("sh", "-c", "env && sleep 3600")


def test_each_container_gets_the_devices_of_its_own_request(stage):
    left, right = (("both", side) for side in ("left", "right"))
    stage.apply(
        claim(
            "pair",
            ("left", "lamp.test", number(LAMPS, 0)),
            ("right", "lamp.test", number(LAMPS, 1)),
        ),
        pod(
            "pair",
            ("both", from_claim("pair")),
            inits=[container("first", "both", command=("env",))],
            containers=[
                container("main", left, command=ENV),
                container("other", right, command=ENV),
                container("none", command=ENV),
            ],
        ),
    )
    stage.wait_phase("pair", "Running")

    assert set(facts(stage, "pair", "first")) == {"lamp-0", "lamp-1"}
    assert set(facts(stage, "pair", "main")) == {"lamp-0"}
    assert set(facts(stage, "pair", "other")) == {"lamp-1"}
    assert set(facts(stage, "pair", "none")) == set()


def test_a_claim_that_no_container_uses_is_prepared(stage):
    stage.apply(
        template("lamp", ("lamp", "lamp.test")),
        pod("idle", ("lamp", from_template("lamp")), containers=[container("main")]),
    )
    stage.wait_phase("idle", "Running")
    uid = stage.uid("idle", "lamp")
    assert stage.lamps.story(claim_uid=uid) == ["prepare began", "prepare ended"]
    stage.delete("pod", "idle")
    stage.wait_empty()
    assert stage.lamps.calls("unprepare", "ended", claim_uid=uid)


def test_each_request_gets_the_parameters_of_its_class_before_those_of_its_claim(stage):
    shared = device_class(
        "dimmed.test", LAMPS, config=[opaque(LAMPS, {"of": "class"}), opaque(HORNS, {"of": "horn"})]
    )
    stage.cluster.apply(json.dumps(shared))
    try:
        stage.apply(
            claim(
                "two",
                ("left", "dimmed.test", number(LAMPS, 0)),
                ("right", "lamp.test", number(LAMPS, 1)),
                config=[
                    opaque(LAMPS, {"of": "claim"}),
                    opaque(LAMPS, {"of": "claim, left"}, "left"),
                    opaque(HORNS, {"of": "another driver"}),
                ],
            ),
            pod("two", ("two", from_claim("two")), command=ENV),
        )
        stage.wait_phase("two", "Running")
    finally:
        stage.cluster.kubectl("delete", "deviceclass", "dimmed.test")

    devices = facts(stage, "two")
    assert devices["lamp-0"]["configs"] == [{"of": "class"}, {"of": "claim"}, {"of": "claim, left"}]
    assert devices["lamp-1"]["configs"] == [{"of": "claim"}]
    assert {call.device: call.configs for call in stage.lamps.calls("prepare", "ended")} == {
        name: body["configs"] for name, body in devices.items()
    }


def test_the_chosen_alternative_of_a_prioritized_list_is_prepared_with_its_parameters(stage):
    never = [{"cel": {"expression": "false"}}]
    request = {
        "name": "light",
        "firstAvailable": [
            {"name": "sun", "deviceClassName": "horn.test", "selectors": never},
            {"name": "lamp", "deviceClassName": "lamp.test"},
        ],
    }
    stage.apply(
        claim(
            "light",
            request,
            config=[
                opaque(LAMPS, {"of": "request"}, "light"),
                opaque(LAMPS, {"of": "lamp"}, "light/lamp"),
                opaque(LAMPS, {"of": "sun"}, "light/sun"),
            ],
        ),
        # The pod names the request. The kubelet finds the device only by the base name of the
        # request.
        pod(
            "reader",
            ("light", from_claim("light")),
            containers=[container("main", ("light", "light"), command=ENV)],
        ),
    )
    stage.wait_phase("reader", "Running")

    (devices,) = facts(stage, "reader").values()
    assert devices["request"] == "light/lamp"
    assert devices["configs"] == [{"of": "request"}, {"of": "lamp"}]


def test_an_admin_monitors_a_device_beside_its_user(stage):
    stage.cluster.kubectl(
        "label", "namespace", stage.name, "resource.kubernetes.io/admin-access=true"
    )
    looking = {"deviceClassName": "lamp.test", "allocationMode": "All", "adminAccess": True}
    stage.apply(
        template("lamp", ("lamp", "lamp.test")),
        template("all", {"name": "all", "exactly": looking}),
        pod("user", ("lamp", from_template("lamp"))),
    )
    stage.wait_phase("user", "Running")
    stage.apply(pod("admin", ("all", from_template("all")), command=ENV))
    stage.wait_phase("admin", "Running")
    devices = facts(stage, "admin")
    assert set(devices) == {f"lamp-{index}" for index in range(4)}
    assert all(body["admin"] for body in devices.values())

    stage.delete("pod", "admin")
    uid = stage.uid("user", "lamp")
    (used,) = stage.lamps.calls("prepare", "ended", claim_uid=uid)
    wait_for("the admin's claim to be undone", lambda: len(stage.lamps.held()) == 1)
    assert stage.lamps.held() == {f"{used.device}@{uid}"}
    assert stage.phase("user") == "Running"


def test_a_pod_asks_for_an_extended_resource(stage):
    name = "test.drakit.dev/lamp"
    body = device_class("extended.test", LAMPS, extendedResourceName=name)
    stage.cluster.apply(json.dumps(body))
    try:
        wanted = {"limits": {name: "2"}, "requests": {name: "2"}}
        main = container("main", command=ENV, resources=wanted)
        stage.apply(pod("extended", containers=[main, container("none", command=ENV)]))
        stage.wait_phase("extended", "Running")
        assert len(facts(stage, "extended", "main")) == 2
        assert facts(stage, "extended", "none") == {}
        (made,) = stage.items("resourceclaim")
        assert stage.prepared() == {made["metadata"]["uid"]}
    finally:
        stage.cluster.kubectl("delete", "deviceclass", "extended.test")


def test_a_claim_of_two_drivers_of_one_daemon(stage):
    stage.apply(
        template("both", ("lamp", "lamp.test"), ("horn", "horn.test")),
        pod("both", ("both", from_template("both")), command=ENV),
    )
    stage.wait_phase("both", "Running")
    devices = facts(stage, "both")
    assert {body["request"] for body in devices.values()} == {"lamp", "horn"}
    uid = stage.uid("both", "both")
    for script in stage.scripts:
        assert script.story(claim_uid=uid) == ["prepare began", "prepare ended"]
    stage.delete("pod", "both")
    stage.wait_empty()
    for script in stage.scripts:
        assert script.story(claim_uid=uid)[2:] == ["unprepare began", "unprepare ended"]


def entries(stage: Stage, name: str) -> dict[str, dict]:
    """Return the entries of a claim's status, by driver."""
    devices = stage.get("resourceclaim", name)["status"].get("devices", ())
    return {each["driver"]: each for each in devices}


def test_the_status_of_a_claim_has_what_its_drivers_returned(stage):
    stage.apply(
        claim("both", ("lamp", "lamp.test"), ("horn", "horn.test")),
        pod("both", ("both", from_claim("both")), command=ENV),
    )
    stage.wait_phase("both", "Running")
    found = wait_for("both entries", lambda: len(known := entries(stage, "both")) == 2 and known)
    status = stage.get("resourceclaim", "both")["status"]
    for result in status["allocation"]["devices"]["results"]:
        entry = found[result["driver"]]
        assert {key: entry[key] for key in ("pool", "device")} == {
            key: result[key] for key in ("pool", "device")
        }
        assert entry["data"] == {"kind": result["request"]}
        assert entry["networkData"] == {"interfaceName": result["device"]}
        (condition,) = entry["conditions"]
        assert (condition["type"], condition["status"]) == ("Ready", "True")
    assert [user["name"] for user in status["reservedFor"]] == ["both"]
    stage.delete("pod", "both")
    wait_for("no entry to be left", lambda: not entries(stage, "both"))


@pytest.mark.slow
@pytest.mark.disruptive
@pytest.mark.needs(Capability.STOP_API_SERVER)
def test_a_status_that_cannot_be_written_delays_no_pod(stage):
    stage.lamps.play(Rule(operation="prepare", hang="cooperative"))
    stage.apply(
        claim("late", ("lamp", "lamp.test")), pod("late", ("late", from_claim("late")), command=ENV)
    )
    wait_began(stage.lamps, "prepare")
    logs = stage.cluster.node_path(stage.node, "/var/log/pods")
    stage.cluster.stop_api_server()
    try:
        stage.lamps.play()
        # The container starts as fast as with an API server.
        wait_for(
            "the container to start",
            lambda: [*logs.glob(f"{stage.name}_late_*/*/*.log")],
            seconds=10,
        )
    finally:
        stage.cluster.start_api_server()
    wait_for("the entry", lambda: LAMPS in entries(stage, "late"), seconds=90)


def test_a_claim_of_drivers_in_two_daemons(stage, release):
    command = ["sh", "-c", "env && test -c $HOSTDEV_TUN && exec sleep 3600"]
    stage.apply(
        template("both", ("lamp", "lamp.test"), ("tun", "tun.drakit.dev")),
        pod("both", ("both", from_template("both")), command=command),
    )
    stage.wait_phase("both", "Running")
    assert {body["request"] for body in facts(stage, "both").values()} == {"lamp"}
    assert "HOSTDEV_TUN=/dev/net/tun" in stage.logs("both")


def test_a_restarted_container_keeps_its_claim_and_the_end_of_the_pod_gives_it_back(stage):
    # A container's first process ends on SIGTERM only if it handles the signal.
    script = "trap 'exit 0' TERM; sleep 3605 & wait"
    stage.apply(
        claim("kept", ("lamp", "lamp.test")),
        template("made", ("lamp", "lamp.test")),
        pod(
            "again",
            ("kept", from_claim("kept")),
            ("made", from_template("made")),
            command=["sh", "-c", script],
            restart="OnFailure",
        ),
    )

    def end(signal: str) -> None:
        argv = ["pkill", f"-{signal}", "-f", "--", "^sh -c trap .* sleep 3605"]
        stage.cluster.exec_on_node(stage.node, argv)

    stage.wait_phase("again", "Running")
    claims = {body["metadata"]["uid"] for body in stage.items("resourceclaim")}
    assert stage.prepared() == claims
    end("KILL")
    wait_for("the container's restart", lambda: restarts(stage.get("pod", "again")) == 1)
    wait_for("the container to run", lambda: ready(stage.get("pod", "again")))
    assert {body["metadata"]["uid"] for body in stage.items("resourceclaim")} == claims
    assert len(stage.lamps.calls("prepare", "ended")) == 2

    end("TERM")
    stage.wait_phase("again", "Succeeded")
    stage.wait_empty()

    def given_back() -> bool:
        bodies = stage.items("resourceclaim")
        names = [body["metadata"]["name"] for body in bodies]
        return names == ["kept"] and not bodies[0]["status"].get("reservedFor")

    wait_for("the reservation's end", given_back)
