"""What device plugins send is counted and measured before it is read."""

from __future__ import annotations

import itertools

import pytest

from drakit_nodeplugin.endpoints.deviceplugin.messages import (
    BadMessageError,
    allocate_answer,
    devices_in,
)
from drakit_nodeplugin.endpoints.wire import GarbageError
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb


def answered(answer):
    return pb.AllocateResponse(container_responses=[answer]).SerializeToString()


def test_devices_are_as_they_were_listed():
    nodes = [pb.NUMANode(ID=1), pb.NUMANode()]
    devices = [pb.Device(ID="a", health="Healthy", topology={"nodes": nodes}), pb.Device()]
    assert list(devices_in(pb.ListAndWatchResponse(devices=devices).SerializeToString())) == devices


def test_no_device_is_read_before_it_is_taken():
    raw = pb.ListAndWatchResponse(devices=[pb.Device(ID="a")]).SerializeToString() + b"\xff"
    devices = devices_in(raw)
    assert next(devices).ID == "a"
    with pytest.raises(GarbageError):
        next(devices)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        pytest.param({"topology": {"nodes": [{}] * 3000}}, "more than 4 KiB", id="numa-nodes"),
        pytest.param({"health": "x" * 5000}, "more than 4 KiB", id="health"),
    ],
)
def test_a_device_without_end_is_not_read(device, text):
    raw = pb.ListAndWatchResponse(devices=[device]).SerializeToString()
    with pytest.raises(GarbageError, match=text):
        next(devices_in(raw))


def test_an_answer_is_as_it_was_given():
    answer = pb.ContainerAllocateResponse(
        envs={"A": "b"},
        mounts=[{"host_path": "/a"}],
        devices=[{"host_path": "/b"}],
        annotations={"c": "d"},
        cdi_devices=[{"name": "e"}],
    )
    assert allocate_answer(answered(answer)) == answer


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        pytest.param(b"\x0a\x00" * 500_000, "more than 1 container_response", id="answers"),
        pytest.param(
            answered(pb.ContainerAllocateResponse(mounts=itertools.repeat(pb.Mount(), 2001))),
            "more than 2000 entries",
            id="mounts",
        ),
        pytest.param(
            answered(pb.ContainerAllocateResponse(envs={"A": "x" * 140_000})),
            "more than 128 KiB",
            id="environment",
        ),
        pytest.param(b"", "no container_response", id="nothing"),
        pytest.param(b"\x0a\x02\x0a\x05", "no protobuf message", id="garbage"),
    ],
)
def test_an_answer_without_end_is_not_read(raw, text):
    with pytest.raises(BadMessageError, match=text):
        allocate_answer(raw)
