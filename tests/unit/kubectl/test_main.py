"""The program: arguments, kubeconfig, credentials, completion, and what it imports."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys

import pytest

from drakit_cli.connection import fetch, find_kubeconfig
from drakit_cli.kubectl.arguments import parser
from drakit_cli.kubectl.main import main
from drakit_cli.options import duration
from drakit_explain import cel

EXEC = """\
import json, os
assert json.loads(os.environ["KUBERNETES_EXEC_INFO"])["kind"] == "ExecCredential"
status = {"token": os.environ["GIVEN"]}
kind = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
print(json.dumps(kind | {"status": status}))
"""


@pytest.fixture
def kubeconfig(site, tmp_path):
    """Write a kubeconfig with two contexts: `dead` is the current one, `live` has a namespace."""

    def write(user: dict) -> list[str]:
        body = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "dead",
            "clusters": [
                {"name": "live", "cluster": {"server": site.url}},
                {"name": "dead", "cluster": {"server": "http://127.0.0.1:1"}},
            ],
            "users": [{"name": "user", "user": user}],
            "contexts": [
                {"name": name, "context": {"cluster": name, "user": "user", "namespace": "lab"}}
                for name in ("live", "dead")
            ],
        }
        path = tmp_path / "contexts"
        path.write_text(json.dumps(body))
        return ["--kubeconfig", str(path)]

    return write


async def test_a_context_is_chosen_with_its_namespace(site, kubeconfig, capsys):
    site.claim("mine")
    given = kubeconfig({})
    code = await asyncio.to_thread(main, ["claims", *given, "--context", "live"])
    assert code == 0
    assert "mine" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["claims", *given]) == 3, "the current one is dead"


async def test_an_exec_plugin_gives_the_credentials(site, kubeconfig, capsys):
    site.claim("mine")
    site.token = "from-the-plugin"
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": sys.executable,
        "args": ["-c", EXEC],
        "env": [{"name": "GIVEN", "value": "from-the-plugin"}],
        "interactiveMode": "IfAvailable",
    }
    given = kubeconfig({"exec": plugin})
    assert await asyncio.to_thread(main, ["claims", *given, "--context", "live"]) == 0
    assert "mine" in capsys.readouterr().out


async def test_a_request_has_a_limit(site, kubeconfig, capsys):
    site.delay(30, times=10)
    given = [*kubeconfig({}), "--context", "live", "--request-timeout", "200ms"]
    assert await asyncio.to_thread(main, ["claims", *given]) == 3
    assert "did not respond within 0.2 s" in capsys.readouterr().err


async def test_the_cluster_of_a_context_can_be_replaced(site, kubeconfig, capsys):
    site.claim("mine")
    given = [*kubeconfig({}), "--context", "dead"]
    assert await asyncio.to_thread(main, ["claims", *given, "--cluster", "live"]) == 0
    assert "mine" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["claims", *given, "-s", site.url]) == 0
    assert await asyncio.to_thread(main, ["claims", *given, "--cluster", "absent"]) == 2


@pytest.mark.parametrize("environ", [{}, {"KUBECONFIG": "/absent"}])
async def test_a_server_needs_no_kubeconfig(site, tmp_path, monkeypatch, capsys, environ):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    for name, value in {"HOME": str(tmp_path), **environ}.items():
        monkeypatch.setenv(name, value)
    site.token = "right"
    for name in ("mine", "other"):
        site.claim(name)
    given = ["claims", "-n", "lab", "-s", site.url]
    assert await asyncio.to_thread(main, [*given, "--token", "right"]) == 0
    assert "mine" in capsys.readouterr().out
    assert await asyncio.to_thread(main, given) == 3, "nobody is logged in"
    missing = [*given, "--kubeconfig", "/absent"]
    assert await asyncio.to_thread(main, missing) == 2, "it was meant to exist"
    assert await asyncio.to_thread(main, [*given, "--context", "other"]) == 2
    assert "no API server is configured" in capsys.readouterr().err


async def test_a_user_can_be_impersonated(site, kubeconfig, capsys):
    given = [*kubeconfig({}), "--context", "live"]
    options = ["--as", "alice", "--as-group", "dev", "--as-uid", "7"]
    assert await asyncio.to_thread(main, ["claims", *given, *options]) == 0
    sent = site.headers[-1]
    names = ("Impersonate-User", "Impersonate-Group", "Impersonate-Uid")
    assert [sent[name] for name in names] == ["alice", "dev", "7"]
    assert await asyncio.to_thread(main, ["claims", *given, "--as-group", "dev"]) == 2


async def test_rejected_credentials_are_named(site, kubeconfig, capsys):
    site.token = "right"
    given = kubeconfig({"token": "wrong"})
    code = await asyncio.to_thread(main, ["claims", *given, "--context", "live"])
    assert code == 3
    error = capsys.readouterr().err
    assert "does not accept the client's credentials" in error
    assert "wrong" not in error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param(["--kubeconfig", "/absent"], "/absent does not exist", id="no-file"),
        pytest.param(["--context", "other"], "other", id="no-such-context"),
    ],
)
async def test_an_unusable_kubeconfig_is_wrong_usage(kubeconfig, capsys, arguments, text):
    given = arguments if "--kubeconfig" in arguments else [*kubeconfig({}), *arguments]
    assert await asyncio.to_thread(main, ["claims", *given]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("command", ["devices", "doctor"])
def test_without_an_evaluator_of_selectors_every_command_names_the_extra(
    monkeypatch, capsys, command
):
    """The environment has only drakit[testing]."""
    monkeypatch.setattr(cel, "find_helper", lambda *_: None)
    monkeypatch.setattr(cel, "find_spec", lambda name: None)
    assert main([command]) == 2
    assert "pip install 'drakit[kubectl]'" in capsys.readouterr().err


def test_the_users_kubeconfig_comes_before_a_service_account(tmp_path):
    home = {"HOME": str(tmp_path)}
    assert find_kubeconfig(None, home) is None
    file = tmp_path / ".kube" / "config"
    file.parent.mkdir()
    file.write_text("{}")
    assert find_kubeconfig(None, home) == file
    listed = {"KUBECONFIG": f"/absent:{file}"}
    assert str(find_kubeconfig(None, listed)) == listed["KUBECONFIG"]
    assert find_kubeconfig(tmp_path, listed) == tmp_path
    assert find_kubeconfig(None, {"KUBECONFIG": "/absent:/too", **home}) is None, "as with kubectl"
    assert find_kubeconfig(None, {"HOME": "/" + "x" * 300}) is None, "a home that cannot be read"


def test_an_answer_is_not_written_as_text_when_the_loop_ends(tmp_path):
    written = []

    class Answer:
        """A result that can be as large as the cluster."""

        def __repr__(self):
            written.append(self)
            return ""

    async def ask(session, namespace):
        return Answer()

    cluster = {"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}]}
    contexts = {"contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps({"users": [], **cluster, **contexts}))
    options = parser().parse_args(["claims", "--kubeconfig", str(file)])
    answer = fetch(options, ask)
    assert (type(answer), written) == (Answer, [])


@pytest.mark.parametrize(
    "arguments",
    [["absent"], ["completion"], ["devices", "-o", "xml"], ["doctor", "-o", "name"]],
)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("30s", 30), ("1m30s", 90), ("1.5h", 5400), ("500ms", 0.5), ("0", 0)],
)
def test_a_duration_is_read_as_kubectl_reads_it(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 m", "1d", "-3"])
def test_other_words_are_no_duration(text):
    with pytest.raises(argparse.ArgumentTypeError):
        duration(text)


FRESH = """
import sys
from drakit_cli.kubectl.main import main
for command in (["devices"], ["claims"], ["doctor"], ["explain", "claim/mine"]):
    assert main([*command, *sys.argv[1:]]) == 0, command
for name in ("grpc", "drakit_proto", "kopf", "drakit_nodeplugin", "drakit_operator"):
    assert name not in sys.modules, name
"""


async def test_the_commands_import_neither_grpc_nor_the_daemons(site, tmp_path):
    site.node("n1")
    site.device_class("gpu")
    site.slice("s1", "a")
    site.claim("mine")
    kubeconfig = site.write_kubeconfig(tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FRESH, "--kubeconfig", str(kubeconfig), "-n", "lab"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PATH": "/nonexistent"},
    )
    out, error = await process.communicate()
    assert (process.returncode, error) == (0, b"")
    assert out
