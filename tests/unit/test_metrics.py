from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from drakit_daemon.kube import NotFoundError
from drakit_daemon.metrics import text_of
from drakit_driver.runtime.order import Order
from drakit_nodeplugin.app import _Probed
from drakit_nodeplugin.claims import errors
from drakit_nodeplugin.claims.errors import ClaimError
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.claims.source import ApiClaims
from drakit_nodeplugin.claims.work import ClaimResult
from drakit_nodeplugin.devices.counts import DEVICE_STATES, DeviceCounts
from drakit_nodeplugin.metrics import MAX_POD_DEVICES, OTHER_PODS, OTHER_POOLS, Metrics
from drakit_nodeplugin.state.podresources import ListedDevice
from tests.fakes.claims import DRIVER, claim_body, reference

A, B = reference("uid-a"), reference("uid-b")


def not_found() -> NotFoundError:
    return NotFoundError(
        status=404,
        reason="NotFound",
        message="gone",
        method="GET",
        path="/x",
        details={"name": A.name},
    )


class Engine:
    """Answers the first claim after 3 s, the second after 7 s."""

    def __init__(self) -> None:
        self.answers = [ClaimResult(), ClaimResult()]
        self.failure: Exception | None = None

    async def prepare(self, works) -> None:
        for seconds, work, answer in zip((3, 4), works, self.answers, strict=False):
            await asyncio.sleep(seconds)
            work.finish(answer)
        if self.failure is not None:
            raise self.failure

    unprepare = prepare


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"driver": DRIVER, **labels})


@pytest.mark.looptime
@pytest.mark.parametrize("operation", ["prepare", "unprepare"])
async def test_each_claim_of_a_call_is_measured_when_it_is_answered(metrics, operation):
    engine = Engine()
    engine.answers[1] = ClaimResult(error="cam-0 is taken", reason="DeviceTaken")
    queue = ClaimQueue(DRIVER, engine, order=Order(), observers=[metrics.for_driver(DRIVER)])

    answers = await queue.ask(operation, [A, B], timeout_seconds=40)

    assert answers == {A.uid: engine.answers[0], B.uid: engine.answers[1]}
    seconds = "drakit_claim_operation_duration_seconds"
    for result, total in (("success", 3), ("error", 7)):
        labels = {"operation": operation, "result": result}
        assert value(metrics, f"{seconds}_count", **labels) == 1
        assert value(metrics, f"{seconds}_sum", **labels) == total
    reason = {"operation": operation, "reason": "DeviceTaken"}
    assert value(metrics, "drakit_claim_errors_total", **reason) == 1


@pytest.mark.looptime
async def test_claims_that_a_fault_of_the_engine_left_unanswered_are_counted(metrics):
    engine = Engine()
    engine.answers.pop()
    engine.failure = RuntimeError("a bug")
    queue = ClaimQueue(DRIVER, engine, order=Order(), observers=[metrics.for_driver(DRIVER)])

    answers = await queue.ask("prepare", [A, B], timeout_seconds=40)

    assert "an internal error of the node plugin" in (answers[B.uid].error or "")
    assert value(metrics, "drakit_claim_errors_total", operation="prepare", reason="Fault") == 1


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("answer", "result"),
    [
        pytest.param(claim_body("uid-a"), "success", id="read"),
        pytest.param(not_found(), "gone", id="gone"),
        pytest.param(TimeoutError(), "no_response", id="no-response"),
        pytest.param({}, "error", id="no-claim"),
    ],
)
async def test_reading_a_claim_is_measured_by_its_result(metrics, answer, result):
    class Session:
        async def get(self, path, *, timeout_seconds):
            await asyncio.sleep(timeout_seconds / 2)
            if isinstance(answer, Exception):
                raise answer
            return answer

    session = asyncio.get_running_loop().create_future()
    session.set_result(Session())
    source = ApiClaims(session, observe=metrics.for_driver(DRIVER).fetched)
    await asyncio.gather(source.fetch(A, timeout_seconds=3), return_exceptions=True)
    assert value(metrics, "drakit_claim_fetch_duration_seconds_sum", result=result) == 1.5


def test_metrics_of_the_parts_of_a_driver_are_exposed(metrics):
    driver = metrics.for_driver(DRIVER)
    driver.transaction(0.0004)
    driver.collected("gone")
    driver.restored(0)
    driver.restored(2)
    driver.set_claims({"prepared": 7})
    driver.set(checkpoint_unusable=True)

    told = text_of(metrics.registry).decode()

    for line in (
        f'drakit_checkpoint_transaction_duration_seconds_bucket{{driver="{DRIVER}",le="0.0005"}} 1',
        f'drakit_stale_claims_collected_total{{driver="{DRIVER}",reason="gone"}} 1',
        f'drakit_cdi_files_restored_total{{driver="{DRIVER}"}} 2',
        f'drakit_claims{{driver="{DRIVER}",state="prepared"}} 7',
        f'drakit_checkpoint_unusable{{driver="{DRIVER}"}} 1',
    ):
        assert f"{line}.0\n" in told, told


def test_the_reasons_of_all_errors_are_words_without_data():
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    reasons = {kind.reason for kind in found if issubclass(kind, ClaimError)}
    assert len(reasons) > 10
    assert all(reason.isalpha() and len(reason) <= 32 for reason in reasons)


def test_a_driver_costs_few_series_however_many_claims_there_are(metrics):
    metrics.for_driver("first.example.com")
    one = sum(len(family.samples) for family in metrics.registry.collect())
    metrics.for_driver("second.example.com")
    two = sum(len(family.samples) for family in metrics.registry.collect())
    assert two - one == one < 250


def test_a_driver_has_series_for_few_pools_and_one_for_the_sum_of_the_others(metrics, monkeypatch):
    """A backend names its pools, and may rename them all."""

    def shown() -> dict[str, float]:
        pools = [f"{prefix}{n:02}" for n in range(20) for prefix in "ab"]
        found = {p: value(metrics, "drakit_devices", pool=p, state="free") for p in pools}
        found["others"] = value(metrics, "drakit_devices", pool=OTHER_POOLS, state="free")
        return {pool: count for pool, count in found.items() if count is not None}

    driver = metrics.for_driver(DRIVER)
    # It searches all series.
    monkeypatch.setattr(metrics.devices, "remove_by_labels", None)
    driver.set_devices({f"b{n:02}": DeviceCounts(free=n) for n in range(16)})
    assert shown() == {f"b{n:02}": n for n in range(16)}
    driver.set_devices(
        {f"{pool}{n:02}": DeviceCounts(free=n) for n in range(2, 20) for pool in "ab"}
    )
    kept = {"a02": 2, "a03": 3, **{f"b{n:02}": n for n in range(2, 16)}}
    assert shown() == {**kept, "others": 2 * sum(range(2, 20)) - sum(kept.values())}
    driver.set_devices({"a07": DeviceCounts(free=1)})
    assert shown() == {"a07": 1}
    assert len(next(iter(metrics.devices.collect())).samples) == len(DEVICE_STATES)


def test_the_devices_of_pods_have_series_up_to_a_limit(metrics):
    def listed(pod: str, device: str) -> ListedDevice:
        return ListedDevice(
            namespace="lab",
            pod=pod,
            claim=f"{pod}-gpu",
            driver=DRIVER,
            pool="node",
            device=device,
            share_id=None,
            cdi_names=(),
        )

    def shown() -> dict[tuple[str, str], float]:
        (family,) = metrics.pod_devices.collect()
        return {(s.labels["pod_name"], s.labels["device"]): s.value for s in family.samples}

    driver, other = metrics.for_driver(DRIVER), metrics.for_driver("other.example.com")
    assert shown() == {}
    # Two containers of a pod have the same device, and two pods share another one.
    driver.set_pod_devices(
        [listed("a", "gpu-0"), listed("a", "gpu-0"), listed("a", "gpu-1"), listed("b", "gpu-1")]
    )
    assert shown() == {("a", "gpu-0"): 1, ("a", "gpu-1"): 1, ("b", "gpu-1"): 1}
    labels = {"pool": "node", "device": "gpu-0", "pod_namespace": "lab", "pod_name": "a"}
    assert value(metrics, "drakit_pod_devices", **labels) == 1
    other.set_pod_devices([listed("c", "gpu-2")])
    driver.set_pod_devices(
        listed(f"pod-{number:04}", "gpu-1") for number in range(MAX_POD_DEVICES + 7)
    )
    assert len(shown()) == MAX_POD_DEVICES + 2
    assert shown()[OTHER_PODS, ""] == 7
    driver.set_pod_devices([])
    assert shown() == {("c", "gpu-2"): 1}


async def test_a_driver_that_cannot_be_measured_keeps_no_other_from_it(caplog):
    measured: list[str] = []

    async def measure() -> None:
        measured.append("good")

    async def fail() -> None:
        raise KeyError("pool")

    served = [SimpleNamespace(name="bad", measure=fail), SimpleNamespace(measure=measure)]
    await _Probed(cast("Any", SimpleNamespace(served=served))).measure()
    assert measured == ["good"]
    assert "driver cannot be measured" in caplog.messages
