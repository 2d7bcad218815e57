"""`drakit new --container`: the chart, the entry in drakit's values, and when the command asks."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from drakit import Device, Health
from drakit_cli.main import main
from drakit_driver.__main__ import parser
from drakit_driver.plugin_devices import resource_of
from drakit_nodeplugin.config import NodePluginConfig
from tests.unit.chart.conftest import helm
from tests.unit.cli.projects import CONTAINERS, DEVICE_DRIVER, commands, files_of, readme, write
from tests.unit.docs.listings import ROOT, listings, validated
from tests.unit.docs.listings import commands as page_commands

__all__ = ("helm",)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project `lamps`, which tests only read."""
    return write(tmp_path_factory.mktemp("new") / "lamps", "--container")


# ------------------------------------------------------------ drakit's values


@pytest.mark.parametrize("arguments", CONTAINERS)
def test_the_entry_allows_the_driver_and_readme_and_output_have_it(arguments, tmp_path, capsys):
    project = write(tmp_path, *arguments)
    said = capsys.readouterr().out
    values = yaml.safe_load((project / "drakit-values.yaml").read_text())
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", readme(project), re.M | re.S)
    assert yaml.safe_load(shown) == values
    assert yaml.safe_load(said[said.index("backends:\n") :].partition("\n\n")[0]) == values
    validated(values)
    ((name, entry),) = NodePluginConfig.model_validate(values).backends.allowed.items()
    own = yaml.safe_load((project / "chart" / "values.yaml").read_text())
    assert own["backend"] == name
    assert entry.mounts == {own["config"]["directory"]: "ro"}
    assert yaml.safe_load((project / "deviceclass.yaml").read_text())["metadata"]["name"] == (
        entry.driver
    )


def test_the_page_shows_the_commands_of_the_readme(container):
    shown = page_commands("docs/vendors/container-driver.md")
    assert "drakit package" in shown
    told = ("kubectl describe", "kubectl get", "kubectl -n lamps get", "kubectl -n lamps logs")
    # The page ends with a pod that uses a device through DRA.
    before = readme(container).partition("## Use it without DRA")[0]
    for line in commands(before):
        if line.startswith(("docker", "drakit", "helm", "kubectl")) and not line.startswith(told):
            assert line in shown or line == "drakit schema lamps > chart/devicedriver.yaml", line


async def test_the_page_calls_an_sdk_in_a_thread():
    (source,) = listings("docs/vendors/container-driver.md", "python")
    names = {"asyncio": asyncio, "Device": Device, "Health": Health}
    exec(source, names)
    threads = set()

    class Sdk:
        def status(self, name: str) -> str:
            threads.add(threading.current_thread())
            return "ok" if name == "cold" else "it is hot"

    driver = SimpleNamespace(sdk=Sdk())
    assert await names["health"](driver, Device(name="cold")) == Health.healthy()
    assert await names["health"](driver, Device(name="hot")) == Health.unhealthy("it is hot")
    assert threading.current_thread() not in threads


# ------------------------------------------------------------ the chart


@pytest.fixture
def rendered(container, helm):
    """Render the project's chart with some values: the DaemonSet and the config."""

    def render(**values: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        done = helm(
            *("template", "lamps", str(container / "chart"), "--namespace", "lamps"), values=values
        )
        assert done.returncode == 0, done.stderr
        objects = {body["kind"]: body for body in yaml.safe_load_all(done.stdout)}
        assert set(objects) == {"DaemonSet", "ConfigMap"}
        return objects["DaemonSet"]["spec"]["template"]["spec"], objects["ConfigMap"]["data"]

    return render


@pytest.mark.parametrize("enabled", [False, True], ids=["backend", "device-plugin"])
def test_a_rollout_waits_until_the_devices_are_known(rendered, enabled):
    (only,) = rendered(devicePlugin={"enabled": enabled})[0]["containers"]
    port = parser().parse_args(only["args"]).probe_port
    assert only["ports"] == [{"name": "probes", "containerPort": port}]
    for probe, path in (("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
        assert only[probe]["httpGet"] == {"path": path, "port": "probes"}


def test_the_chart_serves_drakit_from_the_directory_of_the_entry(rendered, container):
    pod, config = rendered()
    (only,) = pod["containers"]
    arguments = parser().parse_args(only["args"])
    assert (arguments.driver, arguments.device_plugin) == ("lamps", False)
    mounts = {each["mountPath"]: each["name"] for each in only["volumeMounts"]}
    paths = {each["name"]: each.get("hostPath", {}).get("path") for each in pod["volumes"]}
    assert {mount: paths[name] for mount, name in mounts.items()} == {
        "/etc/driver": None,
        "/run/drakit": "/var/lib/kubelet/plugins/drakit.dev/backends/lamps",
        "/var/lib/lamps.example.com": "/var/lib/lamps.example.com",
    }
    assert mounts[str(arguments.directory)] == "socket"
    assert mounts[str(arguments.config.parent)] == "config"
    assert yaml.safe_load(config[arguments.config.name]) == {
        "directory": "/var/lib/lamps.example.com"
    }
    assert only["image"] == "registry.example.com/lamps:0.1.0"
    assert f"docker push {only['image']}" in commands(readme(container))
    assert not pod["automountServiceAccountToken"]
    assert [env["name"] for env in only["env"]] == ["NODE_NAME"]
    assert only["securityContext"] == {
        "runAsUser": 0,
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": []},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


@pytest.mark.parametrize(
    ("values", "context"),
    [
        pytest.param({"privileged": True}, {"privileged": True}, id="privileged"),
        pytest.param(
            {"capabilities": ["NET_ADMIN"]},
            {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            id="a-capability",
        ),
        # The API server does not accept SYS_ADMIN with allowPrivilegeEscalation: false.
        pytest.param(
            {"capabilities": ["SYS_ADMIN"]},
            {
                "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            id="sys-admin",
        ),
    ],
)
def test_values_set_the_privileges_and_the_paths_of_the_host(rendered, values, context):
    paths = [{"path": "/dev"}, {"path": "/sys/firmware", "readOnly": True, "type": "Directory"}]
    pod, _ = rendered(**values, hostPaths=paths)
    (only,) = pod["containers"]
    assert only["securityContext"] == {"runAsUser": 0, "readOnlyRootFilesystem": True, **context}
    assert [(each["mountPath"], each["readOnly"]) for each in only["volumeMounts"][2:]] == [
        ("/dev", False),
        ("/sys/firmware", True),
    ]
    assert [each["hostPath"] for each in pod["volumes"][2:]] == [
        {"path": "/dev", "type": ""},
        {"path": "/sys/firmware", "type": "Directory"},
    ]


def test_the_chart_has_the_schema_of_the_driver_if_the_cluster_has_the_kind(
    container, helm, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(container / "src")
    capsys.readouterr()
    assert main(["schema", "lamps.driver:LampsDriver"]) == 0
    assert (container / "chart" / "devicedriver.yaml").read_text() == capsys.readouterr().out
    arguments = ("template", "lamps", str(container / "chart"), "--api-versions", DEVICE_DRIVER)
    done = helm(*arguments, values={})
    assert done.returncode == 0, done.stderr
    (body,) = [each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "DeviceDriver"]
    assert body["metadata"]["name"] == "lamps.example.com"


def test_values_make_it_a_device_plugin(rendered, container):
    more = {"shares": 2, "unprepareLate": True}
    pod, _ = rendered(devicePlugin={"enabled": True, **more}, kubeletRoot="/var/lib/k0s/kubelet")
    (only,) = pod["containers"]
    arguments = parser().parse_args(only["args"])
    assert (arguments.device_plugin, arguments.shares, arguments.unprepare_late) == (True, 2, True)
    directory = "/var/lib/k0s/kubelet/device-plugins"
    assert str(arguments.device_plugins_directory) == directory
    (socket,) = [each for each in only["volumeMounts"] if each["name"] == "socket"]
    assert socket["mountPath"] == directory
    (volume,) = [each for each in pod["volumes"] if each["name"] == "socket"]
    assert volume["hostPath"] == {"path": directory, "type": "Directory"}
    (resource,) = map(resource_of, arguments.resource)
    wanting = yaml.safe_load((container / "device-plugin-pod.yaml").read_text())
    (main,) = wanting["spec"]["containers"]
    assert main["resources"]["limits"] == {resource.name: 1}
    pod, _ = rendered(devicePlugin={"enabled": True})
    arguments = parser().parse_args(pod["containers"][0]["args"])
    assert (arguments.shares, arguments.unprepare_late) == (None, False)


# ------------------------------------------------------------ the question


@pytest.mark.parametrize(
    ("options", "answer", "in_container"),
    [
        pytest.param([], "2", True, id="the-second"),
        pytest.param([], "1", False, id="the-first"),
        pytest.param([], "", False, id="the-default"),
        pytest.param(["--container"], None, True, id="not-asked-with-container"),
        pytest.param(["--plugin"], None, False, id="not-asked-with-plugin"),
    ],
)
def test_on_a_terminal_it_asks_where_the_driver_runs(
    options, answer, in_container, tmp_path, monkeypatch
):
    asked: list[str] = []

    def reply(question: str) -> str:
        asked.append(question)
        assert answer is not None
        return answer

    monkeypatch.setattr("builtins.input", reply)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["new", "lamps", *options, "--directory", str(tmp_path)]) == 0
    assert len(asked) == (answer is not None)
    assert ("chart/values.yaml" in files_of(tmp_path)) == in_container
    assert ("values.yaml" in files_of(tmp_path)) != in_container


def test_another_answer_is_refused_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda question: "maybe")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["new", "lamps", "--directory", str(tmp_path)]) == 2
    assert "'maybe' is neither 1 nor 2; set --plugin or --container" in capsys.readouterr().err
    assert not files_of(tmp_path)


def test_for_go_it_does_not_ask_and_refuses_the_node_plugin(tmp_path, monkeypatch, capsys):
    def fail(question: str) -> str:
        raise AssertionError(question)

    monkeypatch.setattr("builtins.input", fail)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    given = ["new", "lamps", "--language", "go", "--checkout", str(ROOT)]
    assert main([*given, "--plugin", "--directory", str(tmp_path)]) == 2
    assert "--plugin is for Python" in capsys.readouterr().err
    assert not files_of(tmp_path)
    assert main([*given, "--directory", str(tmp_path)]) == 0
    assert "main.go" in files_of(tmp_path)
