"""Detection of processes that serve a driver, and of work that belongs to another one."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from drakit_nodeplugin.kubelet.ownership import Ownership, RunningInstances, new_owner, socket_paths
from tests.fakes.file_poller import with_poller

DRIVER = "camera.example.com"


@pytest.fixture
def instance():
    """Make the instances as a process of a pod sees them; its own lock is taken."""
    root = Path(tempfile.mkdtemp(prefix="dk", dir="/tmp"))
    owned: list[Ownership] = []

    async def make(uid: str) -> tuple[RunningInstances, Ownership]:
        paths = socket_paths(DRIVER, kubelet_root=root, instance_uid=uid)
        ownership = Ownership(DRIVER, paths)
        await asyncio.to_thread(ownership.acquire)
        owned.append(ownership)
        return RunningInstances(DRIVER, ownership, instance_uid=uid), ownership

    yield make
    for ownership in owned:
        ownership.release()
    shutil.rmtree(root)


async def test_one_process_is_alone_and_primary(instance):
    instances, _ = await instance("pod-1")
    assert not instances.alone(), "before the first check nothing is known"
    await instances.check()
    assert instances.alone()
    assert instances.primary.is_set()


async def test_the_first_of_two_instances_stays_primary_until_it_leaves(instance):
    old, ownership = await instance("pod-1")
    await old.check()
    new, _ = await instance("pod-2")
    for instances in (new, old):
        await instances.check()
        assert not instances.alone()
    assert [old.primary.is_set(), new.primary.is_set()] == [True, False]

    await asyncio.to_thread(ownership.leave_primary)
    await new.check()
    assert new.primary.is_set()
    await old.check()
    assert not old.primary.is_set()
    await asyncio.to_thread(ownership.release)
    await new.check()
    assert new.alone()


async def test_work_of_a_living_process_is_owned_and_that_of_a_dead_one_is_not(instance):
    _, ownership = await instance("pod-1")
    new, _ = await instance("pod-2")
    owner = new_owner("pod-1")
    assert await new.works(owner)
    await asyncio.to_thread(ownership.release)
    assert not await new.works(owner)


async def test_a_container_that_was_restarted_does_not_wait_for_its_former_self(instance):
    instances, _ = await instance("pod-1")
    assert new_owner("pod-1") != new_owner("pod-1")
    assert not await instances.works(new_owner("pod-1"))


@pytest.mark.parametrize("owner", ["", "pod-1"])
async def test_an_entry_without_owner_is_not_owned(instance, owner):
    instances, _ = await instance("pod-2")
    assert not await instances.works(owner)


async def test_an_unknown_state_counts_as_work(instance, monkeypatch):
    instances, ownership = await instance("pod-1")

    def fail(instance_uid: str) -> bool:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(ownership, "alive", fail)
    assert await instances.works("pod-2/abcd")


async def test_a_dead_process_whose_lock_file_was_left_is_seen_when_it_comes_back(instance):
    instances, own = await instance("pod-1")
    dead = own.paths.data / "instance-dead.lock"
    dead.touch()
    # The directory does not change any more: neither now, nor when that one comes back.
    await asyncio.to_thread(os.utime, own.paths.data, (1, 1))
    await instances.check()
    assert instances.alone()
    with dead.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        await instances.check()
        assert not instances.alone()
    await instances.check()
    assert instances.alone()


async def test_a_change_of_the_primary_instance_is_notified(instance):
    old, ownership = await instance("pod-1")
    new, _ = await instance("pod-2")
    await old.check()
    running = asyncio.create_task(with_poller(new.run))
    changed = asyncio.Event()
    new.on_change = changed.set
    await asyncio.to_thread(ownership.release)
    async with asyncio.timeout(5):
        await changed.wait()
        assert new.primary.is_set()
        while not new.alone():
            await asyncio.sleep(0.005)
    running.cancel()
