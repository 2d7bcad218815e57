"""examples/driver as a device plugin: shares of two rotors, and effects that must be undone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.devicemanager import FakeDeviceManager
from tests.unit.docs.listings import ROOT, module
from tests.unit.driverprocess.test_device_plugin import fast, served
from tests.unit.endpoints.camera import until

__all__ = ("fast",)

ROTOR = "rotors.example.com/rotor"

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT / 'examples/driver'}",
}
"""The variables of a program that finds the example's module."""


@pytest.fixture(autouse=True)
def no_blocking_calls() -> None:
    """Rotors block in the loop of their own thread, as drivers may."""


@pytest.fixture
def rotors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module of examples/driver, and a node with two rotors."""
    source = (ROOT / "examples/driver/rotors.py").read_text()
    loaded: Any = module("rotors", source, monkeypatch)
    for name in ("west", "east"):
        (tmp_path / "rotors" / name).mkdir(parents=True)
    loaded.config = loaded.RotorsConfig(directory=tmp_path / "rotors")
    loaded.Rotors.health_period_seconds = 0.1
    return loaded


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        pytest.param([], "it has no resource; set --resource", id="no-resource"),
        pytest.param(["--resource=rotor"], "--resource: 'rotor' is not the name", id="malformed"),
        pytest.param([f"--resource={ROTOR}"], "set --unprepare-late", id="side-effects"),
    ],
)
def test_the_program_refuses_what_a_device_plugin_cannot_do(options, problem):
    options = options if "unprepare" in problem else [*options, "--unprepare-late"]
    program = subprocess.run(
        [
            *(sys.executable, "-m", "drakit_driver", "--driver=rotors:Rotors", "--node-name=n"),
            *("--device-plugin", *options),
        ],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert program.returncode == 2
    assert problem in program.stderr
    assert program.stderr.count("\n") == 1


async def test_shares_of_rotors_are_undone_before_the_next_container_gets_them(rotors, tmp_path):
    directory = tmp_path / "rotors"
    async with (
        FakeDeviceManager(tmp_path) as kubelet,
        served(rotors.Rotors, tmp_path, ROTOR, config=rotors.config, shares=2, unprepare_late=True),
    ):
        await until(lambda: kubelet.health(ROTOR))
        assert list(kubelet.health(ROTOR)) == ["east::0", "east::1", "west::0", "west::1"]
        assert kubelet.registrations[0].options.pre_start_required
        (directory / "west" / "speed.stale").touch()
        answer = await kubelet.allocate(ROTOR, "west::0", "east::1")
        assert dict(answer.envs) == {"ROTOR_SPEED_ROTOR__WEST": "0", "ROTOR_SPEED_ROTOR__EAST": "0"}
        assert {mount.host_path for mount in answer.mounts} == {
            str(directory / "west"),
            str(directory / "east"),
        }
        (share,) = (directory / "east").glob("speed.*")
        # Its pod has ended, and left a share that turns the rotor. Nobody reports the end.
        share.write_text("900")
        calls: list[str] = []
        for method in ("prepare", "unprepare"):
            original = getattr(rotors.Rotors, method)

            def recorded(self, claim, device, *, method=method, original=original):
                calls.append(f"{method} {claim.name}")
                return original(self, claim, device)

            setattr(rotors.Rotors, method, recorded)
        await kubelet.allocate(ROTOR, "east::1")
        assert calls == ["unprepare east::1", "prepare east::1"]
        assert share.read_text() == "0"
        # After a reboot, the kubelet starts the container without another Allocate.
        share.unlink()
        await kubelet.start_container(ROTOR, "east::1")
        assert calls[2:] == ["prepare east::1"]
        assert share.read_text() == "0"

        (directory / "west" / "fault").write_text("it squeaks")
        await until(
            lambda: (
                kubelet.health(ROTOR)
                == {
                    "east::0": "Healthy",
                    "east::1": "Healthy",
                    "west::0": "Unhealthy",
                    "west::1": "Unhealthy",
                }
            )
        )


@pytest.mark.timeout(60)
async def test_the_program_is_killed_and_the_next_one_undoes_what_it_left(rotors, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"directory: {tmp_path / 'rotors'}\n")
    kubelets = tmp_path / "kubelet"
    kubelets.mkdir()

    async def start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "drakit_driver", "--driver=rotors:Rotors", "--node-name=n"),
            *("--device-plugin", f"--resource={ROTOR}", "--shares=1", "--unprepare-late"),
            *(f"--config={config}", f"--device-plugins-directory={kubelets}"),
            env=ENVIRONMENT,
        )

    both = {"east::0": "Healthy", "west::0": "Healthy"}
    async with FakeDeviceManager(kubelets) as kubelet:
        first = await start()
        await until(lambda: kubelet.health(ROTOR) == both)
        await kubelet.allocate(ROTOR, "west::0")
        (share,) = (tmp_path / "rotors" / "west").glob("speed.*")
        first.kill()
        await first.wait()
        await until(lambda: set(kubelet.health(ROTOR).values()) == {"Unhealthy"})
        # Its container has changed the device, and has ended in the meantime.
        share.write_text("900")
        second = await start()
        await until(lambda: kubelet.health(ROTOR) == both)
        await kubelet.allocate(ROTOR, "west::0")
        assert share.read_text() == "0"
        second.terminate()
        assert await second.wait() == 0
        assert [path.name for path in kubelets.iterdir()] == ["kubelet.sock"]
