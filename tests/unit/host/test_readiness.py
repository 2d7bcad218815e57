"""When a hosted driver makes the node plugin unready (docs/reference/node-plugin.md, Probes)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from drakit_nodeplugin.host.driver import HostedDriver
from drakit_nodeplugin.kubelet.server import RegistrationStatus

REGISTERED = RegistrationStatus(state="registered")


def problem(
    *,
    foreign: bool,
    status: RegistrationStatus = REGISTERED,
    unusable: str | None = None,
    waiting: str | None = None,
    stopped: str | None = None,
) -> str | None:
    """The problem of a driver in this state; `foreign`: it is a backend's or device plugins'."""
    manager = SimpleNamespace(waiting=waiting, stop_reason=stopped)
    driver = SimpleNamespace(
        _checkpoint=SimpleNamespace(unusable=unusable),
        _devices=SimpleNamespace(manager=manager),
        _foreign=foreign,
        _server=SimpleNamespace(status=status),
    )
    return HostedDriver.readiness_problem(cast("Any", driver))


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
    assert "is stopped" in (problem(foreign=False, stopped="it has exited") or "")
    assert problem(foreign=False) is None
