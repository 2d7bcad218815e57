"""The feature gates in the metrics of an API server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from drakit.testing import FakeApiServer
from drakit_daemon.kube import ForbiddenError, connect
from drakit_explain.cel.gates import (
    ALLOCATOR_GATES,
    DEFAULT_GATES,
    GatesUnknownError,
    allocator_gates,
    gates_of,
    read_all_gates,
    rules_work,
)
from drakit_explain.selectors import FeatureGates

BEFORE = '# HELP go_goroutines Number.\ngo_goroutines 9\nkubernetes_build_info{major="1"} 1\n'


def enabled(**gates: int) -> str:
    lines = [
        f'kubernetes_feature_enabled{{name="{name}",stage="BETA"}} {value}\n'
        for name, value in gates.items()
    ]
    return "# TYPE kubernetes_feature_enabled gauge\n" + "".join(lines)


class Text:
    """The metrics of an API server; notes how much of them was read."""

    def __init__(self, text: str) -> None:
        self._lines = text.encode().splitlines()
        self.read = 0

    async def lines(self, path: str):
        assert path == "/metrics"
        for line in self._lines:
            self.read += 1
            yield line


@pytest.mark.parametrize(
    ("text", "gates"),
    [
        pytest.param(
            enabled(DRAConsumableCapacity=1, DRAListTypeAttributes=0, Other=1),
            FeatureGates(consumable_capacity=True, list_attributes=False),
            id="both-named",
        ),
        pytest.param(
            enabled(DRAConsumableCapacity=0, DRAListTypeAttributes=1),
            FeatureGates(consumable_capacity=False, list_attributes=True),
            id="the-other-way-round",
        ),
        pytest.param(
            enabled(DynamicResourceAllocation=1),
            FeatureGates(consumable_capacity=False, list_attributes=False),
            id="an-older-version-names-neither",
        ),
    ],
)
async def test_gates_are_read_from_metrics(text, gates):
    assert gates_of(await read_all_gates(Text(BEFORE + text + "z_total 1\n"))) == gates


async def test_the_rest_of_the_metrics_is_not_read():
    text = Text(BEFORE + enabled(DRAConsumableCapacity=1) + "z_total 1\n" * 100_000)
    await read_all_gates(text)
    assert text.read < 10


@pytest.mark.parametrize(
    "text", [pytest.param("", id="no-metrics"), pytest.param(BEFORE, id="other-metrics")]
)
async def test_metrics_without_gates_leave_them_unknown(text):
    with pytest.raises(GatesUnknownError, match="kubernetes_feature_enabled"):
        await read_all_gates(Text(text))


async def test_metrics_that_are_too_large_leave_them_unknown(monkeypatch):
    monkeypatch.setattr("drakit_explain.cel.gates.MAX_BYTES", 1000)
    with pytest.raises(GatesUnknownError, match="more than 1000 bytes"):
        await read_all_gates(Text("a_total 1\n" * 1000 + enabled(DRAConsumableCapacity=1)))


@pytest.mark.looptime
async def test_metrics_that_take_too_long_leave_them_unknown(looptime):
    class Slow(Text):
        async def lines(self, path: str):
            while True:
                await asyncio.sleep(1)
                yield b"a_total 1"

    with pytest.raises(GatesUnknownError, match="within 15 s"):
        await read_all_gates(Slow(""))
    assert looptime == 15


async def test_gates_are_read_over_http(tmp_path):
    async with FakeApiServer() as server:
        # More than one chunk, and more than one read of the socket.
        rest = f'apiserver_request_total{{path="{"x" * 900}"}} 1\n' * 2_000
        server.texts["/metrics"] = rest + enabled(DRAConsumableCapacity=1)
        async with await connect(server.write_kubeconfig(tmp_path), user_agent="test") as session:
            gates = gates_of(await read_all_gates(session))
            assert gates == FeatureGates(consumable_capacity=True, list_attributes=False)
            server.fail("GET", "/metrics", status=403, reason="Forbidden", message="no")
            with pytest.raises(ForbiddenError):
                await read_all_gates(session)


def test_the_allocators_gates_are_those_of_the_helper():
    source = (Path(__file__).parents[3] / "operator/cel/release.go").read_text()
    named = set(re.findall(r'"(DRA\w+)"', source))
    assert named == set(ALLOCATOR_GATES)
    assert all(defaults < named for defaults in DEFAULT_GATES.values())


def test_a_gate_that_the_cluster_does_not_name_is_off():
    gates = allocator_gates({"DRAAdminAccess": True, "DRAPrioritizedList": False, "Other": True})
    assert gates.keys() == set(ALLOCATOR_GATES)
    assert {name for name, on in gates.items() if on} == {"DRAAdminAccess"}


@pytest.mark.parametrize(
    ("enabled", "work"),
    [
        pytest.param({"DRADeviceTaints": True}, True, id="1.34"),
        pytest.param({"DRADeviceTaints": False}, False, id="1.34-off"),
        pytest.param({"DRADeviceTaints": True, "DRADeviceTaintRules": False}, False, id="1.36-off"),
        pytest.param({"DRADeviceTaints": True, "DRADeviceTaintRules": True}, True, id="1.36"),
        pytest.param({}, True, id="without-gates"),
    ],
)
def test_rules_work_where_their_gate_is_on(enabled, work):
    assert rules_work(enabled) is work
