from __future__ import annotations

import pytest

from drakit_driver.runtime import endpoint as lifecycle
from drakit_driver.runtime import thread
from tests.unit.endpoints.camera import Behaviour, Camera, Listener, new_endpoint, running


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """Wait for a driver on a busy machine as well: a test that needs it slow sets its own time."""
    monkeypatch.setattr(thread, "START_SECONDS", 20.0)
    monkeypatch.setattr(thread, "LIST_SECONDS", 20.0)


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
async def listener() -> Listener:
    return Listener()


@pytest.fixture
def short_delays(monkeypatch) -> None:
    """Restart endpoints after a hundredth of a second."""
    monkeypatch.setattr(lifecycle, "RECONNECT_SECONDS", (0.01, 0.02))


@pytest.fixture
async def endpoint(behaviour, listener, short_delays):
    async with running(new_endpoint(lambda: Camera(behaviour), listener)) as endpoint:
        await listener.hear()
        yield endpoint
        behaviour.end.set()
