"""Tokens: read again when they are old or rejected, and kept when their source fails."""

import asyncio
import json
from pathlib import Path

import pytest
from blockbuster import BlockingError

from drakit_daemon.kube import ApiError, ConfigError, Overrides, UnauthorizedError, connect
from drakit_daemon.kube.session import (
    Credentials,
    ServiceAccount,
    Session,
    _read_token,
    find_cluster,
)

PATH = "/api/v1/nodes"


def answering(*answers):
    left, asked = list(answers), []

    async def fetch(refused):
        asked.append(refused)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return fetch, asked


@pytest.mark.looptime
async def test_a_token_is_read_again_when_it_is_old():
    fetch, asked = answering("one", "two")
    credentials = Credentials(fetch)
    for _ in range(29):
        assert await credentials.current() == "one"
        await asyncio.sleep(1)
    await asyncio.sleep(1)
    assert await credentials.current() == "two"
    assert asked == [False, False]


@pytest.mark.looptime
async def test_an_old_token_is_better_than_none(caplog):
    fetch, asked = answering("one", OSError("secret"), "two")
    credentials = Credentials(fetch)
    await credentials.current()
    await asyncio.sleep(31)
    assert await credentials.current() == "one"
    assert await credentials.current() == "one"
    assert len(asked) == 2, "a source that fails is not asked on each request"
    assert "secret" not in caplog.text
    await asyncio.sleep(31)
    assert await credentials.current() == "two"


@pytest.mark.looptime
async def test_a_token_of_an_hour_that_the_kubelet_replaces_in_time_is_never_too_old(looptime):
    """The kubelet replaces a token when a fifth of its life is left."""
    lifetime, replaced_after = 3600, 2880

    async def read(refused):
        return looptime // replaced_after * replaced_after  # the time when the token was issued

    credentials = Credentials(read)
    ages = []
    while looptime < 4 * lifetime:
        ages.append(looptime - await credentials.current())
        await asyncio.sleep(7)
    assert replaced_after < max(ages) < lifetime


async def test_a_refused_token_is_replaced_once_by_many_requests():
    fetch, asked = answering("one", "two")
    credentials = Credentials(fetch)
    await credentials.current()
    results = await asyncio.gather(*(credentials.replace("one") for _ in range(5)))
    assert results == [True] * 5
    assert asked == [False, True]


@pytest.fixture
def account(tmp_path):
    """A pod's service account; its CA is of no use here, but must be a certificate."""
    from cryptography.hazmat.primitives.serialization import Encoding

    (tmp_path / "token").write_text("one\n")
    (tmp_path / "ca.crt").write_bytes(certificate().public_bytes(Encoding.PEM))
    return ServiceAccount(folder=tmp_path)


def certificate():
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1)
    )
    return builder.sign(key, hashes.SHA256())


@pytest.fixture
async def in_pod(account, api_server):
    """A session as of a pod, led to the API server in memory."""
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    access, credentials = await find_cluster(None, environ=environ, account=account)
    assert access.server == "https://10.0.0.1:443"
    access.server = api_server.url
    async with Session(access, credentials, user_agent="t") as session:
        yield session


async def test_a_pods_token_that_was_replaced_is_read_at_once(in_pod, account, api_server):
    api_server.token = "one"
    await in_pod.get(PATH)
    api_server.token = "two"
    account.token.write_text("two")
    await in_pod.create(PATH, {"metadata": {"name": "n"}, "spec": {"x": 1}})
    assert api_server.requests == [("GET", PATH), ("POST", PATH), ("POST", PATH)]
    assert api_server.object(f"{PATH}/n")["spec"] == {"x": 1}, "its body was sent again"
    await in_pod.get(PATH)
    assert len(api_server.requests) == 4, "the new token is kept"


async def test_a_watch_gets_the_new_token_too(in_pod, account, api_server):
    api_server.token = "two"
    account.token.write_text("two")
    api_server.end_watches_at_once = True
    assert [e async for e in in_pod.watch(PATH, resource_version="1")] == []


async def test_a_token_that_stays_wrong_is_reported_after_one_reading(in_pod, api_server):
    api_server.token = "another"
    with pytest.raises(UnauthorizedError, match="does not accept the client's credentials"):
        await in_pod.get(PATH)
    assert len(api_server.requests) == 1, "there was no other token to try"


async def test_a_token_file_that_is_gone_leaves_the_last_token(in_pod, account, api_server):
    api_server.token = "one"
    await in_pod.get(PATH)
    account.token.unlink()
    await in_pod.get(PATH)


@pytest.fixture
async def proxy(monkeypatch):
    """The proxy of the environment, which excludes the Service network as clusters do; counts."""
    seen = []

    async def refuse(reader, writer):
        seen.append(await reader.readline())
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "10.96.0.0/12,.svc")
    yield seen
    server.close()
    await server.wait_closed()


async def test_in_a_cluster_no_proxy_is_used(proxy, in_pod):
    await in_pod.get(PATH)
    assert proxy == []


async def test_a_kubeconfig_uses_the_proxy_of_the_environment(proxy, api_server, tmp_path):
    async with await connect(api_server.write_kubeconfig(tmp_path), user_agent="t") as session:
        with pytest.raises(ApiError):
            await session.get(PATH, timeout_seconds=1)
    assert proxy


def kubeconfig_with(user, api_server, folder):
    path = api_server.write_kubeconfig(folder)
    config = json.loads(path.read_text())
    config["users"][0]["user"] = user
    path.write_text(json.dumps(config))
    return path


async def test_a_token_file_of_a_kubeconfig_is_read_again(api_server, tmp_path):
    token = tmp_path / "token"
    token.write_text("one")
    path = kubeconfig_with({"tokenFile": str(token)}, api_server, tmp_path)
    api_server.token = "one"
    async with await connect(path, user_agent="t") as session:
        await session.get(PATH)
        token.write_text("two")
        api_server.token = "two"
        await session.get(PATH)


async def test_an_exec_plugin_is_asked_again_when_its_token_is_refused(api_server, tmp_path):
    """The token is valid until 2099, so only the rejection can be the reason."""
    answer = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "TOKEN", "expirationTimestamp": "2099-01-01T00:00:00Z"},
    }
    plugin, count, token = tmp_path / "plugin", tmp_path / "count", tmp_path / "token"
    token.write_text("one")
    plugin.write_text(
        f"#!/bin/sh\necho x >> {count}\n"
        f"sed \"s/TOKEN/$(cat {token})/\" <<'END'\n{json.dumps(answer)}\nEND\n"
    )
    plugin.chmod(0o755)
    user = {"exec": {"apiVersion": answer["apiVersion"], "command": str(plugin)}}
    path = kubeconfig_with(user, api_server, tmp_path)
    api_server.token = "one"
    async with await connect(path, user_agent="t") as session:
        for _ in range(3):
            await session.get(PATH)
        calls = len(count.read_text().split())
        token.write_text("two")
        api_server.token = "two"
        await session.get(PATH)
    assert (calls, len(count.read_text().split())) == (1, 2)


async def test_outside_of_a_pod_the_users_kubeconfig_is_used(api_server, tmp_path):
    path = api_server.write_kubeconfig(tmp_path)
    absent = ServiceAccount(folder=tmp_path / "absent")
    access, _ = await find_cluster(None, environ={"KUBECONFIG": str(path)}, account=absent)
    assert access.server == api_server.url


async def test_the_detector_would_notice_a_token_that_is_read_in_the_loop(tmp_path):
    """The other tests of this file rely on it."""
    (tmp_path / "token").write_text("one")
    with pytest.raises(BlockingError):
        _read_token(tmp_path / "token")


# ---------------------------------------------------------------- kubectl's options


def files_of(api_server, folder):
    """Write two kubeconfigs; the second one has other names, and a dead server for a used one."""
    first = {
        "current-context": "lab",
        "clusters": [{"name": "main", "cluster": {"server": api_server.url}}],
        "contexts": [{"name": "lab", "context": {"cluster": "main", "user": "a"}}],
        "users": [{"name": "a", "user": {"token": "of-a", "as": "boss", "as-groups": ["g", "h"]}}],
    }
    dead = {"server": "http://127.0.0.1:1"}
    second = {
        "current-context": "other",
        "clusters": [{"name": "main", "cluster": dead}, {"name": "dead", "cluster": dead}],
        "contexts": [{"name": "other", "context": {"cluster": "dead", "user": "b"}}],
        "users": [{"name": "b", "user": {"token": "of-b"}}],
    }
    paths = folder / "first", folder / "second"
    for path, body in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(body))
    return Path(":".join(map(str, (*paths, folder / "absent"))))


async def test_of_several_kubeconfigs_the_first_that_has_a_name_counts(api_server, tmp_path):
    paths = files_of(api_server, tmp_path)
    access, _ = await find_cluster(paths)
    assert (access.server, access.authorization) == (api_server.url, "Bearer of-a")
    access, _ = await find_cluster(paths, context="other")
    assert (access.server, access.authorization) == ("http://127.0.0.1:1", "Bearer of-b")


async def test_cluster_user_and_server_of_a_context_can_be_replaced(api_server, tmp_path):
    paths = files_of(api_server, tmp_path)
    access, _ = await find_cluster(paths, overrides=Overrides(cluster="dead", user="b"))
    assert (access.server, access.authorization) == ("http://127.0.0.1:1", "Bearer of-b")
    overrides = Overrides(server=api_server.url, token="given")
    access, _ = await find_cluster(paths, context="other", overrides=overrides)
    assert (access.server, access.authorization) == (api_server.url, "Bearer given")
    with pytest.raises(ConfigError, match="absent"):
        await find_cluster(paths, overrides=Overrides(user="absent"))


async def test_a_user_can_act_as_another_one(api_server, tmp_path):
    """Both as the kubeconfig says it, and by an option, which replaces the name."""
    paths = files_of(api_server, tmp_path)
    groups = [("Impersonate-Group", "g"), ("Impersonate-Group", "h")]
    access, _ = await find_cluster(paths)
    assert [*access.impersonation] == [("Impersonate-User", "boss"), *groups]
    overrides = Overrides(as_user="me", as_uid="1", as_groups=("x",))
    async with await connect(paths, overrides=overrides, user_agent="test") as session:
        await session.get(PATH)
    sent = {key: value for key, value in api_server.headers[-1].items() if "Imp" in key}
    assert sent == {
        "Impersonate-User": "me",
        "Impersonate-Uid": "1",
        "Impersonate-Group": "x",
    }


async def test_an_option_changes_no_file(api_server, tmp_path):
    paths = files_of(api_server, tmp_path)
    before = (tmp_path / "first").read_text()
    access, _ = await find_cluster(paths, overrides=Overrides(server="http://x", as_user="me"))
    access.loader._config_persister()
    assert (tmp_path / "first").read_text() == before


async def find_server(url, folder):
    """Find a cluster by its URL, without a kubeconfig."""
    account = ServiceAccount(folder=folder / "absent")
    environ = {"KUBECONFIG": str(folder / "absent")}
    access, _ = await find_cluster(
        None, environ=environ, account=account, overrides=Overrides(server=url)
    )
    return access


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "http://127.0.0.1:1"])
async def test_a_server_without_a_kubeconfig_gets_no_credentials(tmp_path, url):
    access = await find_server(url, tmp_path)
    assert (access.server, access.authorization) == (url, None)


async def test_the_url_of_a_server_needs_a_scheme(tmp_path):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1, must begin with https:// or http://"):
        await find_server("127.0.0.1:1", tmp_path)
