"""``drakit node claim forget``: what is released, what is refused, and what is left undone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from drakit_nodeplugin.state import inspection
from drakit_nodeplugin.state.checkpoint import Checkpoint
from drakit_nodeplugin.state.lock import DriverLock
from tests.fakes.checkpoints import DRIVER, stored_claim, stored_device
from tests.fakes.checkpoints import prepared_claim as prepared
from tests.fakes.podresources import OWN_POD_ENVIRONMENT, FakePodResources

FORGET = ("node", "claim", "forget")


async def uids(site, driver=DRIVER):
    checkpoint = Checkpoint(site.path(driver))
    await checkpoint.open()
    found = await checkpoint.uids()
    await checkpoint.close()
    return found


@pytest.fixture(autouse=True)
def in_the_pod(monkeypatch):
    """The command runs in the node plugin's pod."""
    for name, value in OWN_POD_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
async def kubelet(site):
    async with FakePodResources(site.socket) as kubelet:
        yield kubelet


@pytest.mark.parametrize(
    ("state", "shown"),
    [("preparing", "being prepared"), ("unpreparing", "being unprepared")],
)
async def test_a_stuck_claim_is_released_and_skipped_work_is_reported(site, state, shown):
    two = (stored_device("cam-0"), stored_device("cam-1"))
    await site.store(replace(prepared("a", devices=two), state=state), prepared("b"))

    code, out, error = await site.run_beside(*FORGET, "uid-a")

    assert (code, error) == (0, "")
    assert out == (
        f"forgot claim lab/a (uid-a), which was {shown}\n"
        f"released: node-1/cam-0, node-1/cam-1\n"
        f"removed: {site.spec('uid-a')}\n"
        f"driver {DRIVER} did not unprepare node-1/cam-0, node-1/cam-1: the changes that it made "
        "remain until you undo them or reboot the node\n"
    )
    assert await uids(site) == {"uid-b"}
    assert not site.spec("uid-a").exists()
    assert site.spec("uid-b").exists()


async def test_a_claim_that_no_container_uses_is_forgotten(site, kubelet):
    kubelet.add("b", "cam-b", uid="uid-b")
    await site.store(prepared("a"), prepared("b"))
    assert (await site.run_beside(*FORGET, "uid-a"))[0] == 0
    assert await uids(site) == {"uid-b"}


@pytest.mark.parametrize("cdi", [True, False], ids=["by-uid", "by-name"])
async def test_a_claim_that_a_container_uses_is_refused_without_force(site, kubelet, cdi):
    kubelet.add("a", "cam-a", uid="uid-a", cdi=cdi)
    await site.store(prepared("a"))

    code, out, error = await site.run_beside(*FORGET, "uid-a")

    assert (code, out) == (1, "")
    assert (
        "claim lab/a (uid-a) was not forgotten: the kubelet lists a container that uses it" in error
    )
    assert await uids(site) == {"uid-a"}
    assert site.spec("uid-a").exists()
    assert (await site.run_beside(*FORGET, "uid-a", "--force"))[0] == 0
    assert await uids(site) == set()


@pytest.mark.parametrize(
    ("unknown", "told"),
    [
        pytest.param(
            "no-kubelet",
            "cannot determine whether a container uses it: the kubelet's podresources",
            id="the-kubelet-does-not-answer",
        ),
        pytest.param(
            "not-synced",
            "the kubelet does not list the node plugin's own pod",
            id="the-kubelet-has-not-read-its-pods",
        ),
        pytest.param(
            "outside",
            "the node plugin does not know which pod it runs in",
            id="outside-the-pod",
        ),
    ],
)
async def test_force_is_needed_where_use_is_unknown(site, kubelet, monkeypatch, unknown, told):
    if unknown == "no-kubelet":
        site.socket.unlink()
    elif unknown == "not-synced":
        kubelet.synced = False
    else:
        monkeypatch.delenv("POD_NAME")
    await site.store(prepared("a"))
    code, _, error = await site.run_beside(*FORGET, "uid-a")
    assert code == 1
    assert told in error
    assert "or use --force" in error
    assert await uids(site) == {"uid-a"}
    assert (await site.run_beside(*FORGET, "uid-a", "--force"))[0] == 0


async def test_what_was_prepared_before_a_reboot_needs_no_force(site):
    await site.store(prepared("a", boot_id="boot-0"))
    assert (await site.run_beside(*FORGET, "uid-a"))[0] == 0
    assert await uids(site) == set()


@pytest.fixture
async def plugin(site):
    """The checkpoint of an active instance that does not respond to requests."""
    path = site.path()
    lock = DriverLock(DRIVER, path.parent, instance_uid="pod-1")
    assert await lock.try_acquire()
    plugin = Checkpoint(path)
    await plugin.open()
    yield plugin
    await plugin.close()
    await lock.release()


async def test_a_plugin_that_does_not_answer_is_reported_and_the_request_withdrawn(
    site, plugin, monkeypatch
):
    monkeypatch.setattr(inspection, "FORGET_SECONDS", 0.3)
    await plugin.write([stored_claim("a")])
    code, out, error = await site.run_beside(*FORGET, "uid-a")
    assert (code, out) == (1, "")
    assert error == "error: the node plugin did not respond within 0.3 s; check its log\n"
    assert await plugin.uids() == {"uid-a"}
    assert not list(site.path().parent.glob("forget-*"))


async def test_the_file_of_an_unknown_claim_is_removed(site):
    await site.store(prepared("a"))
    site.spec("uid-z").write_text("{}")
    code, out, _ = await site.run_beside(*FORGET, "uid-z")
    assert (code, out) == (0, f"removed {site.spec('uid-z')}; no checkpoint contains its claim\n")
    assert not site.spec("uid-z").exists()


@pytest.mark.parametrize("uid", ["uid-none", "", "../../etc/passwd"])
async def test_an_unknown_claim(site, uid):
    await site.store(prepared("a"))
    code, out, error = await site.run_beside(*FORGET, uid)
    assert (code, out) == (1, "")
    where = f"{site.root}/kubelet/plugins/drakit.dev/drivers"
    assert error == f"error: no checkpoint in {where} contains claim {uid}\n"


async def test_of_a_claim_of_two_drivers_one_must_be_named(site):
    other = "gpu.example.com"
    await site.store(stored_claim("a"))
    await site.store(stored_claim("a"), driver=other)
    code, _, error = await site.run_beside(*FORGET, "uid-a")
    assert code == 2
    assert f"has devices of several drivers ({DRIVER}, {other}): set --driver" in error
    assert (await site.run_beside(*FORGET, "uid-a", "--driver", other))[0] == 0
    assert await uids(site, other) == set()
    assert await uids(site) == {"uid-a"}


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        pytest.param("PRAGMA user_version = 99", "it needs schema version 99 or later", id="newer"),
        pytest.param(
            "UPDATE bodies SET checksum = 1 WHERE id = 1",
            "no checkpoint in",
            id="a-damaged-row-is-not-known",
        ),
    ],
)
async def test_a_database_that_cannot_be_used_stays_as_it_is(site, statement, told):
    await site.store(stored_claim("a"))
    with closing(sqlite3.connect(site.path())) as connection, connection:
        connection.execute(statement)
    before = site.path().read_bytes()
    code, out, error = await site.run_beside(*FORGET, "uid-a")
    assert (code, out) == (1, "")
    assert told in error
    assert site.path().read_bytes() == before
