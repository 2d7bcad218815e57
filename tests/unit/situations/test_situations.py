"""
Every situation without a cluster: our verdict by the explainer, by ``kubectl drakit explain`` and
by the operator's Event, and then the remedy, which the control plane in memory confirms.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from drakit_cli.kubectl.main import main
from drakit_explain import evidence
from drakit_explain.cel.gates import DEFAULT_GATES
from drakit_explain.cel.helper import Helper
from drakit_operator import announcing, shared_causes
from e2e.images.go import cel_program
from tests.fakes.control_plane import MINOR, ControlPlane
from tests.programs import needs_go
from tests.situations.api import Api, Body
from tests.situations.explaining import Explaining
from tests.situations.running import begin, check, check_command, check_event, run
from tests.situations.scene import HOSTNAME, REFUSED, Heartbeats, Scene
from tests.situations.table import SITUATIONS, Situation
from tests.unit.operator.conftest import Cluster
from tests.unit.operator.replicas import replica, until

pytestmark = [needs_go, pytest.mark.timeout(1200)]  # the first test builds the program

START_SECONDS = 120
"""A busy machine needs several seconds only for the imports of Kopf."""

FAST = {"debounce": 0.05, "patience": 0.5}


def node(name: str) -> Body:
    return {
        "metadata": {"labels": {HOSTNAME: name}},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "110"},
        },
    }


def gates() -> str:
    return "".join(
        f'kubernetes_feature_enabled{{name="{gate}",stage="BETA"}} 1\n'
        for gate in sorted({*DEFAULT_GATES[MINOR], "APIServerTracing"})
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The API server, while the operator runs in a thread with its own loop."""
    folder = tmp_path_factory.mktemp("cluster")
    started, stopped = threading.Event(), asyncio.Event()
    servers: list[Cluster] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        with Helper(cel_program(MINOR)) as helper, Helper(cel_program(MINOR)) as selectors:
            async with Cluster(cluster=ControlPlane(helper, refused=REFUSED)) as server:
                server.texts |= {
                    "/version": json.dumps({"gitVersion": f"v{MINOR}.3"}),
                    "/metrics": gates(),
                }
                for name in ("node", "other"):
                    server.store(f"/api/v1/nodes/{name}", node(name))
                server.write_kubeconfig(folder)
                servers.append(server)
                async with replica(server, folder, "one", selectors=selectors, events=FAST):
                    await until(server.is_watched, seconds=START_SECONDS)
                    started.set()
                    await stopped.wait()

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    patch = pytest.MonkeyPatch()
    patch.setenv("DRAKIT_CEL", str(cel_program(MINOR)))  # built before the time of the start counts
    patch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    patch.setattr(announcing, "SETTLE_SECONDS", 0.5)
    patch.setattr(evidence, "RETRY_SECONDS", 0.5)
    patch.setattr(shared_causes, "PAUSE_SECONDS", 0.05)
    thread.start()
    try:
        while not started.wait(0.2):
            assert thread.is_alive(), "the operator does not start"
        yield servers[0]
    finally:
        loops[0].call_soon_threadsafe(stopped.set)
        thread.join(30)
        patch.undo()


def explain(namespace: str, target: str) -> tuple[int, Body]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["explain", target, f"--namespace={namespace}", "--output=json"])
    return code, json.loads(out.getvalue())


@pytest.fixture(scope="module")
def api(server: Cluster) -> Api:
    return Api(int(server.url.rpartition(":")[2]))


@pytest.fixture(scope="module")
def explaining(api: Api) -> Iterator[Explaining]:
    with Helper(cel_program(MINOR)) as helper:
        yield Explaining(api, helper, program=cel_program(MINOR), command=explain)


def case(situation: Situation):
    return pytest.param(situation, id=situation.name)


@pytest.fixture
def scene(api: Api, explaining: Explaining, situation: Situation) -> Scene:
    namespace = f"explain-{uuid.uuid4().hex[:8]}"
    return Scene(api, explaining, situation.name, namespace, "node", "other", Heartbeats(api))


@pytest.mark.parametrize("situation", [case(each) for each in SITUATIONS])
def test_the_remedy_that_we_name_lets_the_pod_run(situation: Situation, scene: Scene):
    print(run(situation, scene))


REPORTED = [each for each in SITUATIONS if each.event and not each.slow and not each.settled]


@pytest.mark.parametrize("situation", [case(each) for each in REPORTED[:20]])
def test_a_changed_sentence_fails_in_each_runner(situation: Situation, scene: Scene):
    changed = replace(situation, words=tuple(f"{each}~" for each in situation.words))
    try:
        begin(situation, scene)
        with pytest.raises(AssertionError):
            check(scene.explain(), changed)
        with pytest.raises(AssertionError):
            check_command(changed, scene)
        with pytest.raises(AssertionError):
            check_event(changed, scene, "")
    finally:
        scene.close()
