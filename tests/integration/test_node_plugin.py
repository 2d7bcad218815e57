"""The node plugin as a separate process, with a fake kubelet and an API server in memory."""

from __future__ import annotations

import json

import pytest

from drakit.layout import driver_directory
from tests.fakes.kubelet import FakeKubelet, reference
from tests.integration.rig import CLAIMS, DRIVER, stop


async def test_the_way_of_a_claim(rig):
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    claim = reference("uid-a")
    async with rig.serving() as (kubelet, dra, process):
        await rig.until(lambda: rig.published() == ["atlas"])
        for version in ("v1", "v1beta1"):
            answer = (await kubelet.prepare(dra, claim, version=version))["uid-a"]
            assert (answer.error, answer.devices[0].device_name) == ("", "atlas")
        (file,) = rig.files()
        spec = json.loads((rig.cdi / file).read_text())
        assert spec["devices"][0]["containerEdits"]["env"] == ["BOOK=atlas"]

        (rig.cdi / file).unlink()
        await rig.until(lambda: rig.files() == {file})

        assert await kubelet.unprepare(dra, claim) == {"uid-a": ""}
        assert rig.files() == set()
        code, errors = await stop(process)
    assert code == 0, errors
    assert rig.left() == {"checkpoint.db"}
    assert rig.published() == ["atlas"], "a stop leaves the slices to the next start"


async def test_hostdev_without_policies_starts_registers_and_publishes_nothing(rig):
    """Run the plugin with the configuration of a plain install of the chart."""
    rig.config["drivers"] = [{"driver": "hostdev", "config": {"policies": {}}}]
    async with rig.serving() as (_, _, process):
        code, errors = await stop(process)
    assert code == 0, errors
    assert rig.published() == []


async def test_a_restart_writes_no_slice_and_knows_what_was_prepared(rig):
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: kubelet.sockets() and rig.published())
        await kubelet.prepare(await kubelet.register(), reference("uid-a"))
        process.kill()
        await process.communicate()
        (stale,) = kubelet.sockets()
    (file,) = rig.files()
    (rig.cdi / file).unlink()
    writes = rig.writes()

    rig.api_server.fail("GET", CLAIMS, disconnect=True, times=1000)
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: rig.files() == {file})
        # One listing: between two, the stale socket may vanish before the new one appears.
        await rig.until(lambda: kubelet.sockets() not in ([], [stale]))
        dra = await kubelet.register()
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error == ""
        assert await kubelet.unprepare(dra, reference("uid-a")) == {"uid-a": ""}
        await stop(process)
    assert rig.writes() == writes
    assert rig.left() == {"checkpoint.db"}


async def test_a_damaged_checkpoint_is_quarantined_and_reported(rig):
    data = driver_directory(rig.root, DRIVER)
    data.mkdir(parents=True)
    (data / "checkpoint.db").write_text("not a database, but long enough to be taken for one" * 99)
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: any("events" in path for _, path in rig.api_server.writes()))
        assert kubelet.sockets()
        code, _ = await stop(process)
    assert code == 0
    assert any(name.startswith("checkpoint.db.damaged-") for name in rig.left())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param({"kubletRoot": "/x"}, "kubletRoot: is not a known key", id="unknown-key"),
        pytest.param(
            {"bootIDFile": "/no/such/file"}, "bootIDFile: [Errno 2] No such file", id="no-boot-id"
        ),
        pytest.param(
            {
                "drivers": [
                    {"driver": "tests.fakes.shelf:Shelf", "config": {"directory": "/no/such"}}
                ]
            },
            "drivers[0].config: directory: /no/such is not a directory",
            id="driver-refuses",
        ),
        pytest.param(
            {
                "drivers": [
                    {
                        "driver": "hostdev",
                        "config": {
                            "policies": {
                                "x": {"match": [{"subsystem": "misc", "paths": ["/dev/[a"]}]}
                            }
                        },
                    }
                ]
            },
            "drivers[0].config.policies.x.match[0].paths[0]",
            id="bad-glob",
        ),
        pytest.param(
            {"listen": {"probes": "127.0.0.1:99999"}},
            "listen.probes: '127.0.0.1:99999' is not host:port",
            id="listen",
        ),
        pytest.param(
            {"listen": {"metrics": "192.0.2.1:8080"}},
            "listen.metrics: 192.0.2.1:8080 cannot be used",
            id="listen-elsewhere",
        ),
    ],
)
async def test_a_mistake_in_the_configuration_is_refused_with_file_key_and_reason(
    rig, change, sentence
):
    rig.config |= change
    async with rig.plugin() as process:
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert f"{rig.root}/plugin.yaml: " in errors.decode()
    assert sentence in errors.decode()
    assert rig.left() <= {"checkpoint.db"}


async def test_a_claim_that_fails_gets_an_event_and_another_one_when_it_recovers(rig):
    events = "/apis/events.k8s.io/v1/namespaces/lab/events"
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    rig.allocate("uid-b", "atlas")
    async with rig.serving() as (kubelet, dra, process):
        await kubelet.prepare(dra, reference("uid-a"))
        refused = (await kubelet.prepare(dra, reference("uid-b")))["uid-b"].error
        await rig.until(lambda: rig.api_server.objects(events))
        (event,) = rig.api_server.objects(events)
        assert (event["type"], event["reason"], event["note"]) == (
            "Warning",
            "PrepareFailed",
            refused,
        )
        assert event["regarding"]["kind"] == "ResourceClaim"
        assert event["regarding"]["uid"] == "uid-b"

        await kubelet.unprepare(dra, reference("uid-a"))
        await kubelet.prepare(dra, reference("uid-b"))
        await rig.until(lambda: len(rig.api_server.objects(events)) == 2)
        assert {e["reason"] for e in rig.api_server.objects(events)} == {
            "PrepareFailed",
            "Prepared",
        }
        await stop(process)
