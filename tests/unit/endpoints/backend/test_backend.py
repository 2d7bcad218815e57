"""A correct backend: found, listed, called, gone, and available again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from drakit.device import (
    AllocatedDevice,
    ClaimConfig,
    ClaimConsumer,
    ClaimData,
    ClaimOwner,
    Device,
    Health,
    Inventory,
    OtherDevice,
    PreparedDevice,
)
from drakit_daemon.logs import request_scope
from drakit_driver.messages import claims_of
from drakit_driver.runtime.contract import DeviceKey, HealthReport
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError
from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.fakes.backend import Refusal, device
from tests.fakes.direct import call
from tests.unit.endpoints.backend.conftest import CLAIM, DRIVER, GPU, OTHER, call_both, new_endpoint
from tests.unit.endpoints.camera import NODE, running, until

SECOND = AllocatedDevice(name="gpu-1", pool=f"{NODE}/gpus", request="main")


async def test_a_backend_that_appears_is_reported_once_with_its_devices(
    backend, found, endpoint, listener
):
    assert await listener.hear() == Inventory(devices=(Device(name="gpu-0"),))
    backend.send_devices(device("gpu-0"), device("gpu-1", pool="gpus"))
    assert await listener.names() == ["gpu-0", "gpu-1"]
    assert (found.appeared, found.diagnostics) == ([DRIVER], [])
    assert endpoint.unavailable() is None
    info = backend.called("GetInfo")[0]
    assert (info.node_name, bool(info.plugin_version)) == (NODE, True)


async def test_the_claims_of_a_pod_are_one_call_with_an_answer_each(served, backend):
    with request_scope("k7f3"):
        first, other = await call_both(served.prepare, (CLAIM, GPU), (OTHER, SECOND))
    assert [dict(each.edits.env) for each in (*first, *other)] == [
        {"GPU": "gpu-0"},
        {"GPU": "gpu-1"},
    ]
    (request,) = backend.called("prepare")
    assert [
        (each.namespace, each.name, each.uid, [(d.name, d.pool) for d in each.devices])
        for each in request.claims
    ] == [
        ("lab", "train", "uid-a", [("gpu-0", "")]),
        ("lab", "infer", "uid-b", [("gpu-1", "gpus")]),
    ]
    assert backend.metadata[-1]["drakit-request-id"] == "k7f3"


BAD_DEVICES = {
    "data-is-a-list": ({"data": "[1]"}, "data is not a JSON object"),
    "data-without-end": ({"data": "[" * 9000}, "data is not valid JSON"),
    "conditions-without-end": (
        {"conditions": [pb.Condition()] * 10_000},
        "conditions have 10,000 entries, more than 8",
    ),
}


@pytest.mark.parametrize(("device", "problem"), BAD_DEVICES.values(), ids=BAD_DEVICES)
async def test_what_the_api_would_refuse_fails_its_claim_alone(served, backend, device, problem):
    async def prepare(request):
        good, bad = request.claims
        return pb.PrepareClaimsResponse(
            claims=[
                pb.PreparedClaim(uid=good.uid, edits=[pb.Edits()]),
                pb.PreparedClaim(
                    uid=bad.uid, edits=[pb.Edits()], devices=[pb.PreparedDevice(**device)]
                ),
            ]
        )

    backend.prepare = prepare
    good, bad = await call_both(served.prepare, (CLAIM, GPU), (OTHER, SECOND))
    assert good == [PreparedDevice()]
    assert isinstance(bad, DeviceFailedError)
    assert f"its backend returned a device whose {problem}" in str(bad)


async def test_parameters_are_sent_one_by_one_and_merged(served, backend):
    configs = ({"mode": "a", "size": 1}, {"mode": "\ud800"})
    await call(served.prepare, CLAIM, [replace(GPU, configs=configs)])
    (request,) = backend.called("prepare")
    (asked,) = request.claims[0].devices
    assert list(asked.configs) == ['{"mode":"a","size":1}', '{"mode":"\\ud800"}']
    assert asked.parameters == '{"mode":"\\ud800","size":1}'


async def test_a_backend_that_asks_for_it_gets_the_rest_of_a_claim(found, backend, listener):
    async def info(request):
        return pb.GetInfoResponse(driver_name=DRIVER, claim_data=True, metadata_files=True)

    backend.info = info
    attributes = {
        "model": pb.Attribute(string="A1"),
        "cores": pb.Attribute(int=3),
        "ecc": pb.Attribute(bool=True),
        "driver": pb.Attribute(version="1.2.3"),
        "modes": pb.Attribute(strings=pb.StringList(values=["a", "b"])),
        "lanes": pb.Attribute(ints=pb.IntList(values=[4, 8])),
        "ports": pb.Attribute(bools=pb.BoolList(values=[True, False])),
        "apis": pb.Attribute(versions=pb.StringList(values=["1.0.0"])),
    }
    capacity = {
        "memory": pb.Capacity(value="8Gi"),
        "slots": pb.Capacity(value="4", default="1", valid_values=["1", "2"]),
    }
    first = device("gpu-0", attributes=attributes, capacity=capacity)
    backend.listed = pb.WatchDevicesResponse(devices=[first, device("gpu-1", pool="gpus")])
    data = ClaimData(
        labels={"team": "vision"},
        annotations={"note": "\u00e9"},
        owners=(ClaimOwner(api_version="v1", kind="Pod", name="p", uid="u", controller=True),),
        reserved_for=(
            ClaimConsumer(resource="pods", name="p", uid="u"),
            ClaimConsumer(api_group="batch.example.com", resource="trains", name="t", uid="v"),
        ),
        configs=(
            ClaimConfig(source="FromClass", requests=("main",), parameters={"mode": "a"}),
            ClaimConfig(source="FromClaim", parameters={"a": [None]}),
        ),
        other_devices=(
            OtherDevice(driver="nic", pool="f", name="nic-0", request="r"),
            OtherDevice(
                driver="nic",
                pool="f",
                name="nic-1",
                request="r",
                share_id="s",
                admin_access=True,
                consumed_capacity={"bandwidth": "1G"},
            ),
        ),
    )
    gone = AllocatedDevice(name="gpu-7", pool=NODE, request="main")
    async with found.watched(), running(new_endpoint(found, listener)) as endpoint:
        await listener.names()
        assert endpoint.traits.claim_data
        assert endpoint.traits.metadata_files
        await call(endpoint.prepare, CLAIM, [replace(GPU, claim_data=data), gone])
    (asked,) = backend.called("prepare")[0].claims
    assert dict(asked.devices[0].attributes) == attributes
    assert dict(asked.devices[0].capacity) == {"memory": "8Gi", "slots": "4"}
    assert not asked.devices[1].attributes, "it is not listed any more"
    assert [each.from_class for each in asked.data.configs] == [True, False]
    (read,) = claims_of([asked])
    assert [each.claim_data for each in read.devices] == [data, data]


async def test_a_backend_that_does_not_ask_gets_the_claim_as_before(served, backend):
    data = ClaimData(labels={"team": "vision"})
    await call(served.prepare, CLAIM, [replace(GPU, claim_data=data)])
    assert not served.traits.claim_data
    assert not served.traits.metadata_files
    (asked,) = backend.called("prepare")[0].claims
    assert not asked.HasField("data")


async def test_methods_that_a_backend_lacks_are_asked_for_once_and_are_success(served, backend):
    backend.unprepare = backend.check = None
    for _ in range(2):
        await call(served.unprepare, CLAIM, [GPU])
        assert await call(served.check, CLAIM, [GPU]) is True
    assert len(backend.called("unprepare")) == len(backend.called("check")) == 1


def hot(name, status=pb.HEALTH_STATUS_UNHEALTHY, *, pool="") -> pb.DeviceHealth:
    health = pb.Health(status=status, message="hot")
    return pb.DeviceHealth(name=name, pool=pool, health=health)


async def test_health_is_reported_for_listed_devices_and_kept_for_later_ones(
    served, backend, listener
):
    await until(lambda: backend.healths)
    devices = [hot("gpu-0"), hot("gpu-1", pb.HEALTH_STATUS_HEALTHY)]
    backend.send_health(pb.WatchHealthResponse(devices=devices))
    assert await listener.hear() == HealthReport(
        devices={DeviceKey("", "gpu-0"): Health.unhealthy("hot")}
    )
    backend.send_devices(device("gpu-0"), device("gpu-1"))
    assert await listener.names() == ["gpu-0", "gpu-1"]
    assert await listener.hear() == HealthReport(
        devices={DeviceKey("", "gpu-1"): Health("healthy", "hot")}
    )


async def test_health_of_devices_of_pools_that_no_node_owns_is_reported(served, backend, listener):
    await until(lambda: backend.healths)
    devices = [hot("port-1", pool="fabric"), hot("gpu-1"), hot("gpu-2", pool="left")]
    backend.send_health(pb.WatchHealthResponse(devices=devices))
    bad = Health.unhealthy("hot")
    port, early = DeviceKey("fabric", "port-1"), DeviceKey("left", "gpu-2")
    assert await listener.hear() == HealthReport(devices={}, unlisted={port: bad, early: bad})
    backend.send_devices(device("gpu-0"), device("gpu-2", pool="left"))
    assert await listener.names() == ["gpu-0", "gpu-2"]
    assert await listener.hear() == HealthReport(devices={early: bad}, unlisted={port: bad})


async def test_a_backend_without_health_is_not_asked_for_it_again(backend, endpoint, listener):
    backend.tells_health = False
    await listener.names()
    backend.send_devices(device("gpu-1"))
    await listener.names()
    assert len(backend.called("WatchHealth")) == 1
    assert endpoint.unavailable() is None


async def test_a_backend_that_died_is_connected_again_at_once_at_a_new_socket(
    slow_reconnect, served, backend, listener
):
    await backend.stop()
    assert await listener.reason() == "the connection to its backend was lost"
    with pytest.raises(EndpointStoppedError):
        await call(served.prepare, CLAIM, [GPU])
    backend.listed = pb.WatchDevicesResponse(devices=[device("gpu-9")])
    await backend.start()
    assert await listener.names() == ["gpu-9"]
    assert served.unavailable() is None


async def test_the_start_waits_for_the_devices_of_a_backend_that_is_there(backend, found, listener):
    async with running(new_endpoint(found, listener)) as endpoint:
        await until(lambda: endpoint.unavailable() is None)
        assert await listener.names() == ["gpu-0"]


async def test_without_a_backend_the_start_reports_nothing(found, listener):
    endpoint = new_endpoint(found, listener)
    async with asyncio.timeout(1):
        await endpoint.start()
    assert listener.told == []
    assert str(endpoint.unavailable()).startswith(
        "driver gpu.example.com is unavailable: no backend has registered in "
    )
    await endpoint.close()


async def test_the_status_of_a_failed_call_is_shown_to_users(served, backend):
    async def prepare(request):
        raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "no firmware\n" + "x" * 5000)

    backend.prepare = prepare
    with pytest.raises(DeviceFailedError) as caught:
        await call(served.prepare, CLAIM, [GPU])
    text = str(caught.value)
    assert text.startswith(f"driver {DRIVER}: its backend failed in PrepareClaims: no firmware x")
    assert text.endswith("(failed precondition)")
    assert len(text) < 1200
