"""docs/vendors/backend.md and examples/backend show what exists, and it works as shown."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from drakit_nodeplugin.allowed import AllowedBackend
from drakit_nodeplugin.config import NodePluginConfig
from drakit_proto.backend.v1 import backend_pb2 as pb
from drakit_proto.backend.v1.backend_pb2_grpc import BackendStub
from e2e.images.go import ENVIRONMENT
from tests.programs import needs_go
from tests.unit.docs.listings import ROOT, commands, listing, listings

PAGE = "docs/vendors/backend.md"
FOLDER = ROOT / "examples" / "backend"

with_go = [
    needs_go,
    # The first time gRPC is compiled.
    pytest.mark.timeout(900),
]


def command_of(program: str) -> str:
    """Return the page's command of a program, with the path of this repository."""
    (found,) = [line for line in commands(PAGE) if line.startswith(program)]
    return found.replace("$DRAKIT/", f"{ROOT}/")


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a manifest by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text())}


@pytest.fixture
def folder() -> Iterator[Path]:
    # The folders of pytest have long names, and a socket's path is short.
    with tempfile.TemporaryDirectory(prefix="lab-") as made:
        yield Path(made)


@pytest.fixture
def backend(folder: Path) -> Iterator[BackendStub]:
    """The example, built and started by the commands of the page."""
    (text,) = [text for text in listings(PAGE, "bash") if "go build" in text]
    text = text.replace("/tmp/lab", str(folder)).replace("/tmp/blinkers", str(folder / "program"))
    before, last = text.rstrip().rsplit("\n", 1)
    environment = {**os.environ, **ENVIRONMENT, "DRAKIT": str(ROOT)}
    subprocess.run(["bash", "-ec", before], env=environment, check=True, timeout=600)
    program = subprocess.Popen(shlex.split(last), cwd=FOLDER, stderr=subprocess.PIPE, text=True)
    try:
        assert program.stderr is not None
        line = program.stderr.readline()
        socket = re.search(r" serving .*socket=(\S+)", line)
        assert socket is not None, line
        with grpc.insecure_channel(f"unix:{socket[1]}") as channel:
            yield BackendStub(channel)
    finally:
        program.terminate()
        program.communicate(timeout=30)
        assert program.returncode == 0


class TestPage:
    def test_names_where_the_node_plugin_searches(self):
        assert f"`{_parent()}/gpu`" in _page()

    def test_makes_the_stubs_for_python_that_it_lists(self, folder):
        command = command_of("python -m grpc_tools.protoc ")
        subprocess.run(
            [sys.executable, *shlex.split(command)[1:]], cwd=folder, check=True, timeout=60
        )
        # As from a script in this folder, where drakit is not installed: without -S it would be.
        imported = subprocess.run(
            [
                sys.executable,
                "-S",
                "-c",
                "import drakit_proto.backend.v1.backend_pb2_grpc as m; print(m)",
            ],
            cwd=folder,
            env={"PYTHONPATH": sysconfig.get_path("purelib")},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert str(folder) in imported.stdout


class TestExample:
    pytestmark = with_go

    def test_is_built_and_started_as_on_the_page(self, backend):
        assert (
            backend.GetInfo(pb.GetInfoRequest(), timeout=10).driver_name == "blinkers.example.com"
        )
        first = next(iter(backend.WatchDevices(pb.WatchDevicesRequest(), timeout=10)))
        assert [device.name for device in first.devices] == ["desk"]
        # The parameters of the example's pod.
        (config,) = manifests("pod.yaml")["ResourceClaimTemplate"]["spec"]["spec"]["devices"][
            "config"
        ]
        device = pb.AllocatedDevice(
            name="desk",
            request="blinker",
            parameters=json.dumps(config["opaque"]["parameters"]),
        )
        claim = pb.Claim(namespace="lab", name="blinker", uid="uid-a", devices=[device])
        answer = backend.PrepareClaims(pb.PrepareClaimsRequest(claims=[claim]), timeout=10)
        (result,) = answer.claims
        assert result.error == ""
        assert result.edits[0].env["BLINKER_COLOR_BLINKER__DESK"] == "red"


class TestTheAllowList:
    def test_is_one_that_the_node_plugin_takes(self):
        page = yaml.safe_load(listing(PAGE, "values.yaml"))
        example = yaml.safe_load((FOLDER / "values.yaml").read_text())
        for given in (page, example):
            assert NodePluginConfig.model_validate(given).backends.allowed

    def test_has_the_keys_of_an_entry(self):
        section = _page().split("### The allow list")[1].split("\n## ")[0]
        keys = re.findall(r"^\| `(\w+)` \|", section, re.M)
        assert set(keys) == {field.alias for field in AllowedBackend.model_fields.values()}


def _page() -> str:
    return (ROOT / PAGE).read_text()


def _parent() -> Path:
    """The parent of the directories of backends if nobody chooses another."""
    return NodePluginConfig.model_validate({"backends": {"enabled": True}}).backends_directory
