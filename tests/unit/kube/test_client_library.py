"""The client library is imported without its models; the usual way if its layout has changed."""

import json
import subprocess
import sys

import pytest

LOOK = """
import asyncio, json, logging, sys
from pathlib import Path
logging.basicConfig()
{before}
import drakit_daemon.kube
assert "kubernetes_asyncio" not in sys.modules or {imported}
async def main():
    async with await drakit_daemon.kube.connect(Path(sys.argv[1]), user_agent="test") as session:
        return session.server
server = asyncio.run(main())
names = [name for name in sys.modules if name.startswith("kubernetes_asyncio")]
print(json.dumps([server, names]))
"""


def look(kubeconfig, *, before="", imported=False):
    """The modules of the library that a new interpreter has loaded after it has made a session."""
    program = LOOK.format(before=before, imported=imported)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(kubeconfig)],
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert done.returncode == 0, done.stderr
    server, names = json.loads(done.stdout)
    assert server == "https://example.test:6443"
    return names, done.stderr


@pytest.fixture
def kubeconfig(tmp_path):
    path = tmp_path / "kubeconfig"
    named = {
        "current-context": "a",
        "clusters": [{"name": "a", "cluster": {"server": "https://example.test:6443"}}],
        "users": [{"name": "a", "user": {"token": "t"}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
    }
    path.write_text(json.dumps(named))
    return path


def models(names):
    return [name for name in names if name.startswith("kubernetes_asyncio.client.models.")]


def test_no_model_is_loaded(kubeconfig):
    names, told = look(kubeconfig)
    assert "kubernetes_asyncio.config.kube_config" in names
    assert models(names) == []
    assert not [name for name in names if ".client.api." in name]
    assert len(names) < 20
    assert told == ""


def test_a_changed_layout_is_imported_the_usual_way(kubeconfig):
    hide = """
import importlib
real, hidden = importlib.import_module, ["kubernetes_asyncio.client.rest"]
def import_module(name, *rest):
    if name in hidden:
        hidden.remove(name)
        raise ImportError(name + " has moved")
    return real(name, *rest)
importlib.import_module = import_module
"""
    names, told = look(kubeconfig, before=hide)
    assert len(models(names)) > 100
    assert told.count("WARNING:drakit_daemon.kube.client_library:") == 1
    assert "reduced import" in told


def test_a_library_that_is_already_loaded_is_used_as_it_is(kubeconfig):
    names, told = look(kubeconfig, before="import kubernetes_asyncio", imported=True)
    assert len(models(names)) > 100
    assert told == ""


USE = """
import asyncio, json, sys
from pathlib import Path
import drakit_daemon.kube
async def main():
    async with await drakit_daemon.kube.connect(Path(sys.argv[1]), user_agent="test"):
        return "urllib3.util" in sys.modules
loaded = asyncio.run(main())
import urllib3.util
from urllib3 import PoolManager
print(json.dumps([loaded, PoolManager().headers, urllib3.util.make_headers(basic_auth="a:b")]))
"""


def test_urllib3_is_loaded_when_it_is_used(kubeconfig):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", USE, str(kubeconfig)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [False, {}, {"authorization": "Basic YTpi"}]


RACE = """
import sys, threading
import drakit_daemon.kube.client_library as library
sys.setswitchinterval(1e-5)
library._import_parts()
barrier = threading.Barrier(4)
def use():
    barrier.wait()
    from urllib3 import PoolManager, Retry
threads = [threading.Thread(target=use) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_threads_that_use_urllib3_first_at_the_same_time_all_get_it():
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=True)
    assert done.stderr == ""
