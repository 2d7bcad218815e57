"""The admission webhook: what it refuses, of what it warns, and how it is served."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import ssl
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from drakit.testing.apiserver import FakeApiServer
from drakit_daemon.kube import connect
from drakit_drivers.hostdev.policy import HostDevicePolicySpec
from drakit_formats import crds
from drakit_operator import admission
from drakit_operator.__main__ import _name_object
from drakit_operator.admission import Admission
from drakit_operator.app import App
from drakit_operator.config import Admission as Settings
from e2e.cluster.local.pki import Authority
from tests.fakes.tasks import running, until
from tests.unit.operator.replicas import probe, replica

pytestmark = pytest.mark.timeout(120)

DRIVER = "lamps.example.com"
V1 = "lamps.example.com/v1"
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"brightness": {"type": "integer"}, "color": {"type": "string"}},
}
PATH = f"/apis/{crds.API_VERSION}/devicedrivers/{DRIVER}"
NAME = "operator.drakit-system.svc"


class Certificates:
    """The files of a certificate, which the kubelet replaces."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.create(folder / "pki")
        self.folder = folder / "certificates"
        self.folder.mkdir()
        self._client = ssl.create_default_context(cafile=str(folder / "pki" / "ca.crt"))

    def issue(self, *suffixes: str) -> None:
        """Replace both files, or one of them."""
        self.authority.issue("new", common_name=NAME, dns=[NAME])
        for suffix in suffixes or ("crt", "key"):
            new = self.authority.folder / f"new.{suffix}"
            shutil.copy(new, self.folder / f"tls.{suffix}.new")
            (self.folder / f"tls.{suffix}.new").rename(self.folder / f"tls.{suffix}")

    @asynccontextmanager
    async def client(self, port: int, *, keep: bool = True):
        """Return a function that sends a request, as the API server does."""
        connector = aiohttp.TCPConnector(force_close=not keep)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def send(body: Any) -> Any:
                url = f"https://127.0.0.1:{port}/"
                options = {"ssl": self._client, "server_hostname": NAME}
                data = io.BytesIO(json.dumps(body).encode())
                async with session.post(url, data=data, **options) as answer:
                    return await answer.json() if answer.status == 200 else answer.status

            yield send


@pytest.fixture
def certificates(tmp_path, monkeypatch) -> Certificates:
    monkeypatch.setattr(admission, "CERTIFICATE_SECONDS", 0.1)
    found = Certificates(tmp_path)
    found.issue()
    return found


@pytest.fixture
async def server():
    async with FakeApiServer() as server:
        server.store(PATH, {"spec": {"parameters": {"": SCHEMA}}})
        yield server


def webhook_of(server, certificates, tmp_path, *, warn=None, policies=True) -> Admission:
    async def nothing(_: Any) -> list[str]:
        return []

    kubeconfig = server.write_kubeconfig(tmp_path)
    return Admission(
        Settings(listen="127.0.0.1:0", certificates=certificates.folder),
        connect=lambda: connect(kubeconfig, user_agent="test"),
        warn=warn or nothing,
        policy_type=HostDevicePolicySpec if policies else None,
        count=lambda _: None,
    )


@asynccontextmanager
async def served(server, certificates, tmp_path, **options):
    """Serve the webhook; return a function that sends it an object."""
    webhook = webhook_of(server, certificates, tmp_path, **options)
    async with running(webhook.run()):
        await until(lambda: webhook.port, seconds=60)
        async with certificates.client(webhook.port) as send:
            yield webhook, send


PLURALS = {
    "ResourceClaim": "resourceclaims",
    "ResourceClaimTemplate": "resourceclaimtemplates",
    "DeviceClass": "deviceclasses",
    "HostDevicePolicy": crds.POLICIES,
    "DeviceDriver": crds.DRIVERS,
}


def review(body: dict[str, Any], old: dict[str, Any] | None = None, *, plural: str = "") -> Any:
    group, _, version = body["apiVersion"].rpartition("/")
    plural = plural or PLURALS[body["kind"]]
    resource = {"group": group, "version": version, "resource": plural}
    request = {"uid": "u", "resource": resource, "object": body, "oldObject": old}
    request |= {"operation": "UPDATE" if old else "CREATE", "userInfo": {"username": "alice"}}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def config(parameters: Any) -> list[dict[str, Any]]:
    return [{"opaque": {"driver": DRIVER, "parameters": parameters}}]


def claim(parameters: Any, version: str = "v1") -> dict[str, Any]:
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": "one", "namespace": "lab", "uid": "u"},
        "spec": {"devices": {"config": config(parameters)}},
    }


def template(parameters: Any, version: str = "v1") -> dict[str, Any]:
    body = claim(parameters, version)
    return body | {"kind": "ResourceClaimTemplate", "spec": {"spec": body["spec"]}}


def device_class(parameters: Any, version: str = "v1", **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "DeviceClass",
        "metadata": {"name": "lamps", "labels": labels},
        "spec": {"config": config(parameters)},
    }


def policy(**spec: Any) -> dict[str, Any]:
    match = [{"subsystem": "tty", "paths": ["/dev/ttyUSB*"]}]
    return {
        "apiVersion": crds.API_VERSION,
        "kind": "HostDevicePolicy",
        "metadata": {"name": "serial"},
        "spec": {"match": match, **spec},
    }


def driver(**parameters: Any) -> dict[str, Any]:
    return {
        "apiVersion": crds.API_VERSION,
        "kind": "DeviceDriver",
        "metadata": {"name": DRIVER},
        "spec": {"parameters": parameters},
    }


def message(answer: Any) -> str:
    assert answer["response"]["uid"] == "u"
    status = answer["response"].get("status", {"message": "", "code": None})
    assert answer["response"]["allowed"] is not bool(status["message"])
    assert status["code"] == (422 if status["message"] else None)
    return status["message"]


GOOD, BAD = {"brightness": 5}, {"brightnes": 5}
PROBLEM = (
    f"opaque.parameters: the parameters for driver {DRIVER} are invalid: brightnes: is not a known "
    "key; known keys: brightness, color"
)
TWICE = device_class(GOOD)
TWICE["spec"]["config"] *= 2


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
@pytest.mark.parametrize("make", [claim, template, device_class])
async def test_parameters_that_do_not_fit_are_refused_in_each_version(
    server, certificates, tmp_path, make, version
):
    async with served(server, certificates, tmp_path) as (_, send):
        assert message(await send(review(make(GOOD, version)))) == ""
        assert message(await send(review(make(BAD, version)))).endswith(PROBLEM)


async def test_tenants_cannot_fill_the_log_with_refusals(server, certificates, tmp_path, caplog):
    async with served(server, certificates, tmp_path) as (_, send):
        assert message(await send(review(claim(BAD))))
    lines = [each for each in caplog.records if each.name.startswith("kopf.objects")]
    assert lines
    assert not [each.getMessage() for each in lines if _name_object(each)]


@pytest.mark.parametrize(
    ("body", "old", "sentence"),
    [
        pytest.param(device_class(BAD, a="b"), device_class(BAD), "", id="label-of-a-bad-class"),
        pytest.param(device_class(BAD), TWICE, PROBLEM, id="class-gets-bad"),
        pytest.param(policy(), None, "", id="policy"),
        pytest.param(
            policy(match=[{"subsystem": "mem", "paths": ["/dev/mem"]}]),
            None,
            "spec: match[0].paths[0]: /dev/mem is dangerous",
            id="policy-that-CEL-does-not-understand",
        ),
        pytest.param(
            policy(attributes={"serial": {"string": "a"}}),
            None,
            "spec: attributes: serial: this attribute is reserved for the driver",
            id="reserved-attribute",
        ),
        pytest.param(driver(**{"": SCHEMA}), None, "", id="driver"),
        pytest.param(
            driver(**{V1: {"type": 5}}),
            None,
            f"spec.parameters['{V1}']: type: fits none of the allowed forms",
            id="malformed-schema",
        ),
        pytest.param(
            driver(**{V1: {"type": 5}}), driver(**{V1: {"type": 5}}), "", id="schema-of-before"
        ),
    ],
)
async def test_objects_are_refused_for_what_is_new_in_them(
    server, certificates, tmp_path, body, old, sentence
):
    async with served(server, certificates, tmp_path) as (_, send):
        found = message(await send(review(body, old)))
        assert sentence in found
        assert bool(found) is bool(sentence)


async def test_schemas_are_those_of_the_cluster(server, certificates, tmp_path):
    async with served(server, certificates, tmp_path) as (_, send):

        async def refused(body: Any) -> bool:
            return bool(message(await send(review(body))))

        assert await refused(claim(BAD))
        server.store(PATH, {"spec": {"parameters": {V1: SCHEMA}}})
        await becomes(True, lambda: refused(claim(GOOD)))
        server.store(PATH, {"spec": {"parameters": {"": {"type": 5}}}})
        await becomes(False, lambda: refused(claim(BAD)))
        server.store(PATH, {"spec": {"parameters": {"": SCHEMA}}})
        await becomes(True, lambda: refused(claim(BAD)))
        async with await connect(server.write_kubeconfig(tmp_path), user_agent="test") as session:
            await session.delete(PATH)
        await becomes(False, lambda: refused(claim(BAD)))


async def becomes(wanted: bool, look: Any) -> None:
    async with asyncio.timeout(30):
        while await look() is not wanted:
            await asyncio.sleep(0.02)


async def test_a_template_gets_warnings_and_a_slow_leader_gives_none(
    server, certificates, tmp_path, monkeypatch
):
    asked: list[Any] = []

    async def warn(body: Any) -> list[str]:
        asked.append(body)
        if body["metadata"]["name"] == "slow":
            await asyncio.Event().wait()
        return ["no node has such a device"]

    monkeypatch.setattr(admission, "TEMPLATE_SECONDS", 0.2)
    monkeypatch.setattr(admission, "TEMPLATES_A_SECOND", 0.001)
    async with served(server, certificates, tmp_path, warn=warn) as (_, send):
        answer = await send(review(template(GOOD)))
        assert answer["response"]["allowed"]
        assert answer["response"]["warnings"] == ["no node has such a device"]
        slow = template(GOOD)
        slow["metadata"] = {"name": "slow"}
        assert "warnings" not in (await send(review(slow)))["response"]
        # A tenant who writes many of them does not occupy the leader.
        for _ in range(100):
            await send(review(template(GOOD)))
        assert len(asked) == admission.TEMPLATES_AT_ONCE


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(review(claim(GOOD), plural="others"), id="unknown-kind"),
        pytest.param(review(policy(match=[])), id="kind-that-is-not-checked"),
        pytest.param({"x": "y" * admission.MAX_REQUEST_BYTES}, id="bytes"),
        pytest.param(review(claim([[]] * admission.MAX_VALUES)), id="values"),
        pytest.param([], id="no-request"),
    ],
)
async def test_what_cannot_be_checked_is_an_error_and_no_refusal(
    server, certificates, tmp_path, body
):
    async with served(server, certificates, tmp_path, policies=False) as (_, send):
        assert await send(body) == 500
        assert message(await send(review(claim(BAD)))).endswith(PROBLEM)


async def test_a_defect_refuses_nothing(server, certificates, tmp_path, monkeypatch):
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(admission, "parameter_problems", broken)
    async with served(server, certificates, tmp_path) as (_, send):
        assert await send(review(claim(BAD))) == 500


async def test_clients_that_send_nothing_do_not_keep_others_away(
    server, certificates, tmp_path, monkeypatch
):
    """Neither connections without a handshake, nor those without a request, nor slow bodies."""
    monkeypatch.setattr(admission, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(admission, "REQUEST_SECONDS", 60.0)
    async with served(server, certificates, tmp_path) as (webhook, _):
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        idle = [
            await asyncio.open_connection("127.0.0.1", webhook.port, **options)
            for options in [{}] * 40 + [{"ssl": unchecked}] * 20
        ]
        for _, writer in idle[-8:]:
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n")
        async with asyncio.timeout(30), certificates.client(webhook.port) as send:
            assert message(await send(review(claim(BAD)))).endswith(PROBLEM)
        assert await idle[0][0].read() == b""
        for _, writer in idle:
            writer.close()


async def test_nothing_is_served_before_the_schemas_are_known(server, certificates, tmp_path):
    server.fail("*", PATH.rpartition("/")[0], status=503, times=1000)
    webhook = webhook_of(server, certificates, tmp_path)
    async with running(webhook.run()):
        await asyncio.sleep(0.5)
        assert webhook.port == 0
        server.heal()
        await until(lambda: webhook.port, seconds=60)


async def test_a_new_certificate_is_served_without_a_dropped_request(
    server, certificates, tmp_path
):
    async with served(server, certificates, tmp_path) as (webhook, _):
        stop, answers = asyncio.Event(), 0

        async def load(*, keep: bool) -> None:
            nonlocal answers
            async with certificates.client(webhook.port, keep=keep) as request:
                while not stop.is_set():
                    assert message(await request(review(claim(GOOD)))) == ""
                    answers += 1

        async with asyncio.TaskGroup() as group:
            for keep in (True, False, False):
                group.create_task(load(keep=keep))
            serials = {await serial_of(webhook.port)}
            for _ in range(3):
                certificates.issue()
                await becomes(True, lambda: changed(webhook.port, serials))
                more = answers + 20
                await until(lambda more=more: answers > more, seconds=20)
            stop.set()
        assert len(serials) == 4


async def serial_of(port: int) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


async def changed(port: int, serials: set[bytes]) -> bool:
    before = len(serials)
    serials.add(await serial_of(port))
    return len(serials) > before


async def test_a_certificate_without_its_key_leaves_the_served_one(server, certificates, tmp_path):
    async with served(server, certificates, tmp_path) as (webhook, _):
        before = await serial_of(webhook.port)
        certificates.issue("crt")
        await asyncio.sleep(0.5)
        assert await serial_of(webhook.port) == before
        certificates.issue()
        await becomes(True, lambda: changed(webhook.port, {before}))


async def test_files_of_the_kubelet_are_from_one_directory(server, certificates, tmp_path):
    """The kubelet has links to a directory, which it replaces as a whole."""

    def place(name: str) -> None:
        target = certificates.folder / name
        target.mkdir()
        for file in ("tls.crt", "tls.key"):
            (certificates.folder / file).rename(target / file)
        (certificates.folder / "new").symlink_to(name)
        (certificates.folder / "new").rename(certificates.folder / "..data")
        for file in ("tls.crt", "tls.key"):
            (certificates.folder / file).symlink_to(f"..data/{file}")

    place("..1")
    async with served(server, certificates, tmp_path) as (webhook, _):
        serials = {await serial_of(webhook.port)}
        certificates.issue()
        place("..2")
        await becomes(True, lambda: changed(webhook.port, serials))


@pytest.mark.parametrize("content", [None, "no certificate"])
async def test_without_a_certificate_nothing_is_served_until_there_is_one(
    server, certificates, tmp_path, content
):
    for name in ("tls.crt", "tls.key"):
        (certificates.folder / name).unlink()
        if content:
            (certificates.folder / name).write_text(content)
    webhook = webhook_of(server, certificates, tmp_path)
    async with running(webhook.run()):
        await asyncio.sleep(0.5)
        assert webhook.port == 0
        certificates.issue()
        await until(lambda: webhook.port, seconds=60)


async def test_each_replica_serves_it_and_the_leader_warns(
    cluster, certificates, tmp_path, monkeypatch
):
    # On a busy machine, the leader may take longer.
    monkeypatch.setattr(admission, "TEMPLATE_SECONDS", 60)
    monkeypatch.setattr(admission, "REQUEST_SECONDS", 60)
    cluster.device_class("gpu")
    settings = {"enabled": True, "listen": "127.0.0.1:0", "certificates": str(certificates.folder)}
    options = {"admission": settings, "hostDevicePolicies": False}
    body = template(GOOD)
    body["spec"]["spec"]["devices"]["requests"] = [
        {"name": "a", "exactly": {"deviceClassName": "none", "count": 1}}
    ]

    async def answer(app: App) -> Any:
        await until(lambda: app.admission and app.admission.port, seconds=60)
        async with certificates.client(app.admission.port) as send:
            return (await send(review(body)))["response"]

    async with replica(cluster, tmp_path, "one", **options) as leader:
        await until(lambda: leader._leader and leader._leader.sources.is_current, seconds=60)
        async with replica(cluster, tmp_path, "two", **options) as standby:
            first, second = await answer(leader), await answer(standby)
            await becomes(True, lambda: is_ready(standby))
    assert first["allowed"]
    assert 'DeviceClass "none"' in first["warnings"][0]
    assert second == {"uid": "u", "allowed": True}


async def is_ready(app: App) -> bool:
    await until(lambda: app.servers.probes._listener, seconds=60)
    return (await probe(app, "/readyz"))[0] == 200
