"""When a hosted driver makes the node plugin unready (docs/reference/node-plugin.md, Probes)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drakit_nodeplugin.changes import FilePoller
from drakit_nodeplugin.host.active_driver import ActiveDriver
from drakit_nodeplugin.host.driver import HostedDriver
from drakit_nodeplugin.kubelet.server import RegistrationStatus
from drakit_nodeplugin.state.lock import DriverLock

REGISTERED = RegistrationStatus(state="registered")


def problem(
    *,
    foreign: bool,
    status: RegistrationStatus = REGISTERED,
    unusable: str | None = None,
    waiting: str | None = None,
    stopped: str | None = None,
) -> str | None:
    """The problem of an active driver in this state; `foreign`: it is a backend's or device
    plugins'."""
    manager = SimpleNamespace(waiting=waiting, stop_reason=stopped)
    active: Any = SimpleNamespace(
        _checkpoint=SimpleNamespace(unusable=unusable),
        _devices=SimpleNamespace(manager=manager),
        _foreign=foreign,
        readiness_problem=lambda: ActiveDriver.readiness_problem(active),
    )
    registration = SimpleNamespace(status=status)
    driver = SimpleNamespace(_active=active, _server=SimpleNamespace(registration=registration))
    return HostedDriver.readiness_problem(cast("Any", driver))


def inactive_problem(lock: DriverLock) -> str | None:
    """The problem of a driver that is not active."""
    return HostedDriver.readiness_problem(
        cast("Any", SimpleNamespace(_active=None, _failure=None, _lock=lock))
    )


@pytest.mark.parametrize("foreign", [True, False], ids=["backend", "python-driver"])
@pytest.mark.parametrize(
    ("state", "named"),
    [
        pytest.param({"status": RegistrationStatus()}, "has not registered", id="not-registered"),
        pytest.param(
            {"status": RegistrationStatus(state="rejected", reason="no")}, "rejected", id="rejected"
        ),
        pytest.param({"unusable": "the disk is full"}, "the disk is full", id="checkpoint"),
        pytest.param({"waiting": "policies"}, "waits: policies", id="waits"),
    ],
)
def test_a_driver_of_any_kind_makes_the_plugin_unready(foreign, state, named):
    assert named in (problem(foreign=foreign, **state) or "")


def test_a_backend_that_is_stopped_does_not_make_the_plugin_unready():
    assert problem(foreign=True, stopped="it has exited") is None
    assert "is unavailable" in (problem(foreign=False, stopped="it has exited") or "")
    assert problem(foreign=False) is None


async def test_an_instance_is_unready_until_it_is_active_and_ready_after_it_has_handed_over(
    tmp_path,
):
    old, new = (DriverLock("lamps", tmp_path, instance_uid=uid) for uid in ("old", "new"))
    assert await old.try_acquire()
    assert inactive_problem(old) == "the driver is starting"
    assert not await new.try_acquire()
    assert "another instance" in (inactive_problem(new) or "")
    poller = FilePoller(period_seconds=0.01)
    polling = asyncio.create_task(poller.run())
    asking = asyncio.create_task(new.acquire(may_ask=lambda: True))
    assert await old.until_asked(poller) == "asked"
    polling.cancel()
    await old.release()
    assert inactive_problem(old) is None
    await asking
    assert inactive_problem(new) == "the driver is starting"
    await new.release()
