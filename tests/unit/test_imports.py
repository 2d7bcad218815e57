"""Modules that a program must not load: each costs memory on every node, or for every driver."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

HOSTDEV = """
import json, sys
import drakit_nodeplugin.__main__
import drakit_nodeplugin.app
from drakit_drivers.hostdev import HostDevices
print(json.dumps(sorted(sys.modules)))
"""

DRIVER_PROCESS = """
import json, sys
from drakit_driver.__main__ import main
sys.argv = ["drakit-driver", "--driver", "rotor:Rotor", "--socket", "/a.sock", "--node-name", "n"]
try:
    main()  # it imports the rest
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)))
"""

OURS = ("drakit.testing", "drakit_cli", "drakit_explain", "drakit_operator")
"""Parts for other programs, or for settings that few nodes have."""

THEIRS = (
    "dateutil",
    "google.protobuf.json_format",
    "http.server",
    "kopf",
    "kubernetes_asyncio",
    "multiprocessing",
    "pydantic.deprecated",
    "pydantic.networks",
    "pydantic.type_adapter",
    "pydantic.v1",
    "requests",
    "unittest",
    "xml",
)
"""Modules that a dependency, or one more import of ours, can load unnoticed. A session loads a few
modules of kubernetes_asyncio later."""


@pytest.mark.parametrize(
    ("program", "needed", "ours", "theirs"),
    [
        pytest.param(
            HOSTDEV,
            {"pydantic", "grpc.aio"},
            (
                "drakit_explain.cel",
                "drakit_daemon.kube.lease",
                "drakit_drivers.simulated",
                "drakit_nodeplugin.allowed",
                "drakit_nodeplugin.endpoints.backend.connection",
                "drakit_nodeplugin.endpoints.deviceplugin.plugins",
            ),
            ("aiohttp.web", "certifi", "prometheus_client.exposition", "urllib3"),
            id="the-node-plugin-with-hostdev",
        ),
        pytest.param(
            DRIVER_PROCESS,
            {"grpc.aio"},
            (
                "drakit_daemon.kube",
                "drakit_driver.device_plugin",
                "drakit_driver.plugin_devices",
                "drakit_nodeplugin",
                "drakit_proto.kubelet",
            ),
            ("aiohttp", "prometheus_client", "sqlite3"),
            id="a-drivers-own-process",
        ),
    ],
)
def test_a_program_loads_no_module_that_it_does_not_need(program, needed, ours, theirs):
    unneeded = (*OURS, *ours)
    assert all(find_spec(name) for name in unneeded), "a module of ours has another name"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=25
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert needed.issubset(loaded)
    below = tuple(f"{name}." for name in (*unneeded, *THEIRS, *theirs))
    assert [name for name in loaded if f"{name}.".startswith(below)] == []
