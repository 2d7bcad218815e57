"""Modules that the node plugin with hostdev must not load: each costs memory on every node."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

LOADED = """
import json, sys
import drakit_nodeplugin.__main__
import drakit_nodeplugin.app
from drakit_drivers.hostdev import HostDevices
print(json.dumps(sorted(sys.modules)))
"""

OURS = (
    "drakit_explain.cel",
    "drakit_cli",
    "drakit_explain",
    "drakit_daemon.kube.lease",
    "drakit.testing",
    "drakit_drivers.simulated",
    "drakit_nodeplugin.allowed",
    "drakit_nodeplugin.endpoints.backend.connection",
    "drakit_nodeplugin.endpoints.deviceplugin.plugins",
    "drakit_operator",
)
"""Parts for other programs, or for settings that few nodes have."""

THEIRS = (
    "aiohttp.web",
    "certifi",
    "dateutil",
    "google.protobuf.json_format",
    "http.server",
    "kopf",
    "kubernetes_asyncio",
    "multiprocessing",
    "prometheus_client.exposition",
    "pydantic.deprecated",
    "pydantic.networks",
    "pydantic.type_adapter",
    "pydantic.v1",
    "requests",
    "unittest",
    "urllib3",
    "xml",
)
"""Modules that a dependency, or one more import of ours, can load unnoticed. A session loads a few
modules of kubernetes_asyncio later."""


def test_the_node_plugin_with_hostdev_loads_no_module_that_it_does_not_need():
    assert all(find_spec(name) for name in OURS), "a module of ours has another name"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADED], capture_output=True, text=True, timeout=25
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert "pydantic" in loaded
    assert "grpc.aio" in loaded
    below = tuple(f"{name}." for name in (*OURS, *THEIRS))
    assert [name for name in loaded if f"{name}.".startswith(below)] == []
