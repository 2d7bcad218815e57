"""Device metadata files: what Kubernetes' own reader finds in them, and where a container looks."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from drakit import ClaimReference, Device, NetworkData, Topology, Version
from drakit_formats.resource.claim import parse_claim
from drakit_formats.resource.device import attributes_body, published_attributes
from drakit_formats.resource.metadata import (
    DeviceMetadata,
    InvalidMetadataError,
    container_path,
    file_text,
    request_bodies,
)
from drakit_formats.resource.status import network_data_body
from e2e.images.go import metadata_reader
from tests.programs import needs_go

DRIVER = "camera.example.com"
CLAIM = ClaimReference(namespace="lab", name="cams", uid="3f0d9a52-7c1c-4ad3-a7de-0f6bb5d1fd7a")


def device(name: str, request: str = "front", **fields: Any) -> DeviceMetadata:
    return DeviceMetadata(
        **{
            "driver": DRIVER,
            "pool": "node-1/usb",
            "device": name,
            "request": request,
            "attributes": {"model": {"string": "größe"}},
            **fields,
        }
    )


@needs_go
@pytest.mark.timeout(900)  # the first run builds the reader
def test_kubernetes_own_package_reads_and_accepts_both_versions(tmp_path):
    published = Device(
        name="cam-0",
        attributes={
            "model": "größe",
            "lanes": 4,
            "color": True,
            "firmware": Version("1.2.3"),
            "modes": ("day", "night"),
        },
        topology=Topology(numa_node=0, pci_bus_id="0000:01:00.0"),
    )
    network = NetworkData(interface_name="net1", ips=("192.0.2.5/24",), hardware_address="02:00")
    bodies = request_bodies(
        [
            device("cam-0", "front/big", attributes=published_attributes(published)),
            device("cam-1", "back", attributes={}),
            device(
                "cam-2",
                "front/big",
                attributes=attributes_body({"vendor.example.com/lens": "wide"}),
                network_data=network_data_body(network),
            ),
        ]
    )
    assert [*bodies] == ["front/big", "back"]
    file = tmp_path / "file.json"
    file.write_text(file_text(CLAIM, bodies["front/big"], generation=3, pod_claim="my-cam"))
    command = [metadata_reader(), "validate", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert [*read] == ["v1alpha1", "v1beta1"], "Go sorts them"
    assert read["v1alpha1"] == read["v1beta1"]
    content = read["v1beta1"]
    assert {key: content[key] for key in ("name", "namespace", "uid", "generation")} == {
        "name": "cams",
        "namespace": "lab",
        "uid": CLAIM.uid,
        "generation": 3,
    }
    assert content["PodClaimName"] == "my-cam"
    (request,) = content["Requests"]
    assert request["Name"] == "front/big"
    first, second = request["Devices"]
    assert (first["Driver"], first["Pool"], first["Name"]) == (DRIVER, "node-1/usb", "cam-0")
    assert first["Attributes"] == {
        "model": {"string": "größe"},
        "lanes": {"int": 4},
        "color": {"bool": True},
        "firmware": {"version": "1.2.3"},
        "modes": {"strings": ["day", "night"]},
        "resource.kubernetes.io/numaNode": {"int": 0},
        "resource.kubernetes.io/pciBusID": {"string": "0000:01:00.0"},
    }
    assert first["NetworkData"] is None
    assert second["Attributes"] == {"vendor.example.com/lens": {"string": "wide"}}
    assert second["NetworkData"] == {
        "interfaceName": "net1",
        "ips": ["192.0.2.5/24"],
        "hardwareAddress": "02:00",
    }


def test_the_newest_version_is_the_first_line():
    (body,) = request_bodies([device("cam-0")]).values()
    text = file_text(CLAIM, body, generation=1, pod_claim=None)
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["apiVersion"] for line in lines] == [
        "metadata.resource.k8s.io/v1beta1",
        "metadata.resource.k8s.io/v1alpha1",
    ]
    assert all("podClaimName" not in line for line in lines)


def test_a_claim_is_found_by_its_name_and_one_from_a_template_by_its_name_in_the_pod():
    root = "/var/run/kubernetes.io/dra-device-attributes"
    own = container_path(DRIVER, CLAIM, "front", pod_claim=None)
    assert own == f"{root}/resourceclaims/cams/front/{DRIVER}-metadata.json"
    generated = container_path(DRIVER, CLAIM, "front", pod_claim="my-cam")
    assert generated == f"{root}/resourceclaimtemplates/my-cam/front/{DRIVER}-metadata.json"


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        pytest.param("my-cam", "my-cam", id="set-by-kubernetes"),
        pytest.param("../../etc", None, id="a-path"),
        pytest.param("", None, id="empty"),
        pytest.param("x" * 64, None, id="too-long"),
        pytest.param(7, None, id="not-text"),
    ],
)
def test_an_annotation_that_kubernetes_did_not_set_is_ignored(annotation, expected):
    metadata = {
        "name": "cams",
        "uid": "u",
        "annotations": {"resource.kubernetes.io/pod-claim-name": annotation},
    }
    assert parse_claim({"metadata": metadata}).pod_claim_name == expected


def test_a_device_with_more_attributes_than_readers_accept_is_refused():
    many = {f"a{index}": {"int": index} for index in range(33)}
    with pytest.raises(InvalidMetadataError, match="device cam-1 has 33 attributes"):
        request_bodies([device("cam-0"), device("cam-1", attributes=many)])


def test_a_claim_has_a_budget_for_all_of_its_requests_together():
    large = {f"a{index}": {"string": "ü" * 32} for index in range(32)}
    devices = [device(f"cam-{index}", f"r{index % 2}", attributes=large) for index in range(16)]
    request_bodies(devices)
    with pytest.raises(InvalidMetadataError, match="more than 128 KiB"):
        request_bodies([*devices, *devices])
