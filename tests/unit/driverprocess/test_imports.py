"""Modules that a driver's own process must not load: each costs memory for every driver."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

LOADED = """
import json, sys
from drakit_driver.__main__ import main
sys.argv = ["drakit-driver", "--driver", "rotor:Rotor", "--socket", "/a.sock", "--node-name", "n"]
try:
    main()  # it imports the rest
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)))
"""

OURS = (
    "drakit.testing",
    "drakit_cli",
    "drakit_daemon.kube",
    "drakit_driver.device_plugin",
    "drakit_driver.plugin_devices",
    "drakit_explain",
    "drakit_nodeplugin",
    "drakit_operator",
    "drakit_proto.kubelet",
)

THEIRS = (
    "aiohttp",
    "dateutil",
    "google.protobuf.json_format",
    "http.server",
    "kopf",
    "kubernetes_asyncio",
    "multiprocessing",
    "prometheus_client",
    "pydantic.deprecated",
    "pydantic.networks",
    "pydantic.type_adapter",
    "pydantic.v1",
    "requests",
    "sqlite3",
    "unittest",
    "xml",
)


def test_a_drivers_own_process_loads_no_module_that_it_does_not_need():
    assert all(find_spec(name) for name in OURS), "a module of ours has another name"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADED], capture_output=True, text=True, timeout=25
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert "grpc.aio" in loaded
    below = tuple(f"{name}." for name in (*OURS, *THEIRS))
    assert [name for name in loaded if f"{name}.".startswith(below)] == []
