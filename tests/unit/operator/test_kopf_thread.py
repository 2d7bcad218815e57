"""One run of Kopf: it ends soon when told to, and says so when it ends by itself."""

import asyncio
import gc
import threading
from dataclasses import replace

from drakit.kube import GoneError, connect
from drakit_operator.intake import Intake
from drakit_operator.kinds import CLAIMS, KINDS, NODES, RULES, Served
from drakit_operator.watching.thread import KopfThread

VERSION_OF = {RULES: "v1beta2"}
RESOURCE = "/apis/resource.k8s.io/v1"


def make_thread(connect, seen, *, since="1", skipped=None):
    """A run of Kopf that watches all kinds from a version on."""
    return KopfThread(
        connect=connect,
        versions={Served(kind=kind, version=VERSION_OF.get(kind, "v1")): since for kind in KINDS},
        intake=Intake(asyncio.get_running_loop(), seen.extend),
        on_skipped=lambda kind, metadata, reason: skipped.append((str(kind), metadata["name"])),
    )


async def test_it_stops_on_request(cluster, tmp_path):
    kubeconfig = cluster.write_kubeconfig(tmp_path)
    seen = []
    thread = make_thread(lambda: connect(kubeconfig, user_agent="test"), seen, since="1")
    cluster.add_class("gpu.example", "d")
    thread.start()
    async with asyncio.timeout(20):
        while not seen:
            assert not thread.ended.done(), repr(thread.ended.result())
            await asyncio.sleep(0.02)
    assert [(each.kind.plural, each.name.name) for each in seen] == [
        ("deviceclasses", "gpu.example")
    ]
    assert ("GET", f"{RESOURCE}/deviceclasses") not in cluster.requests, "it lists nothing"
    assert thread.silent_seconds < 2
    assert await thread.stop(timeout_seconds=2)
    assert await thread.ended is None
    cluster.add_class("late.example", "d")
    await asyncio.sleep(0.1)
    assert len(seen) == 1


async def test_it_can_be_stopped_while_kopf_opens_connections(cluster, tmp_path, caplog):
    kubeconfig = cluster.write_kubeconfig(tmp_path)
    connecting = threading.Event()

    async def connect_slowly():
        session = await connect(kubeconfig, user_agent="test")
        at_once = session.http.connector.connect

        async def late(*args, **options):
            connection = await at_once(*args, **options)
            connecting.set()
            try:
                while not session.http.closed:
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                connection.close()
                raise
            return connection

        session.http.connector.connect = late
        return session

    thread = make_thread(connect_slowly, [])
    thread.start()
    assert await asyncio.to_thread(connecting.wait, 20)
    assert await thread.stop(timeout_seconds=5)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_it_can_be_stopped_while_it_waits_for_its_session():
    async def hang():
        await asyncio.sleep(3600)
        raise AssertionError("nobody has stopped it")

    thread = make_thread(hang, [])
    thread.start()
    assert await thread.stop(timeout_seconds=5)
    assert await thread.ended is None


async def test_without_a_session_it_ends_at_once():
    async def refuse():
        raise OSError("no way to an API server")

    thread = make_thread(refuse, [])
    thread.start()
    error = await asyncio.wait_for(asyncio.shield(thread.ended), 20)
    assert error is not None
    assert await thread.stop(timeout_seconds=1), "what has ended can still be stopped"


def nested(levels):
    return "[" * levels + "]" * levels


def configured(parameters):
    """A claim whose opaque parameters are these."""
    config = {"opaque": {"driver": "d", "parameters": parameters}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "spec": {"devices": {"config": [config], "requests": []}},
    }


async def test_an_object_that_cannot_be_parsed_costs_itself_alone(cluster, tmp_path):
    kubeconfig, seen, skipped = cluster.write_kubeconfig(tmp_path), [], []
    thread = make_thread(
        lambda: connect(kubeconfig, user_agent="test"), seen, since="1", skipped=skipped
    )
    claims = f"{RESOURCE}/namespaces/lab/resourceclaims"
    cluster.verbatim["@deep"] = nested(1200)
    cluster.store(f"{claims}/deep", configured({"x": "@deep"}))
    cluster.remove(f"{claims}/deep")
    cluster.store(f"{claims}/good", configured({"x": "@odd"}))
    thread.start()
    async with asyncio.timeout(20):
        # Kopf handles the events of one object in order, but not those of different objects.
        last = {}
        while last.keys() != {"deep", "good"} or last["deep"] is not None:
            assert not thread.ended.done(), repr(thread.ended.result())
            await asyncio.sleep(0.02)
            last = {each.name.name: each.fact for each in seen}
    assert set(skipped) == {("resourceclaims.resource.k8s.io", "deep")}
    assert await thread.stop(timeout_seconds=2)


async def body_of(cluster, kubeconfig, kind, path, body):
    """An object as its projection gets it from the watch."""
    seen, bodies = [], []
    cluster.store(path, body)

    def project(body, version):
        bodies.append(body)
        return kind.project(body, version)

    watched = Served(kind=replace(kind, project=project), version="v1")
    thread = KopfThread(
        connect=lambda: connect(kubeconfig, user_agent="test"),
        versions={watched: "1"},
        intake=Intake(asyncio.get_running_loop(), seen.extend),
        on_skipped=lambda *_: None,
    )
    thread.start()
    async with asyncio.timeout(20):
        while not seen:
            await asyncio.sleep(0.02)
    assert await thread.stop(timeout_seconds=2)
    return bodies[0]


async def test_it_gets_no_parameters_of_claims_and_no_data_of_their_devices(cluster, tmp_path):
    entry = {"driver": "d", "conditions": [{"type": "attached"}]}
    claim = configured({"x": [[]] * 10_000})
    claim["metadata"] = {"labels": {"app": "train"}}
    claim["status"] = {"devices": [entry | {"data": {"x": 1}}]}
    path = f"{RESOURCE}/namespaces/lab/resourceclaims/large"
    body = await body_of(cluster, cluster.write_kubeconfig(tmp_path), CLAIMS, path, claim)
    assert body["spec"]["devices"].keys() == {"requests"}
    assert body["status"]["devices"] == [entry]
    assert "labels" not in body["metadata"]


async def test_a_claim_keeps_the_annotation_that_names_its_author(cluster, tmp_path):
    mark = {"resource.kubernetes.io/extended-resource-claim": "true"}
    claim = {"metadata": {"annotations": {**mark, "long": "x"}}, "spec": {"devices": {}}}
    path = f"{RESOURCE}/namespaces/lab/resourceclaims/made"
    body = await body_of(cluster, cluster.write_kubeconfig(tmp_path), CLAIMS, path, claim)
    assert body["metadata"]["annotations"] == mark


async def test_nodes_keep_their_labels(cluster, tmp_path):
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"labels": {"zone": "a"}, "annotations": {"long": "x"}},
        "status": {"images": [{}]},
    }
    kubeconfig = cluster.write_kubeconfig(tmp_path)
    body = await body_of(cluster, kubeconfig, NODES, "/api/v1/nodes/n1", node)
    assert body["metadata"]["labels"] == {"zone": "a"}
    assert "annotations" not in body["metadata"]
    assert body["status"] == {}


async def test_an_expired_version_ends_the_run(cluster, tmp_path):
    kubeconfig = cluster.write_kubeconfig(tmp_path)
    cluster.add_class("gpu.example", "d")
    cluster.expire_history()
    thread = make_thread(lambda: connect(kubeconfig, user_agent="test"), [], since="1")
    thread.start()
    error = await asyncio.wait_for(asyncio.shield(thread.ended), 20)
    assert "410" in repr(error) or isinstance(error, GoneError)
    assert await thread.stop(timeout_seconds=1)
