"""Names and numbers on the wire: a kubelet that reads another field reports no error."""

from __future__ import annotations

import pytest

from drakit_proto.kubelet.dra.v1 import dra_pb2 as v1
from drakit_proto.kubelet.dra.v1beta1 import dra_pb2 as v1beta1
from drakit_proto.kubelet.drahealth.v1 import health_pb2 as health_v1
from drakit_proto.kubelet.drahealth.v1alpha1 import health_pb2 as health_v1alpha1
from drakit_proto.kubelet.pluginregistration.v1 import registration_pb2 as registration
from drakit_proto.kubelet.podresources.v1 import podresources_pb2 as podresources

CLAIM = {"namespace": 1, "uid": 2, "name": 3}
DEVICE = {"request_names": 1, "pool_name": 2, "device_name": 3, "cdi_device_ids": 4}

DEVICE_ID = {"pool_name": 1, "device_name": 2}
HEALTH = {
    "device": 1,
    "health": 2,
    "last_updated_time": 3,
    "health_check_timeout_seconds": 4,
    "message": 5,
}


@pytest.mark.parametrize(
    ("module", "service", "methods"),
    [
        (
            registration,
            "pluginregistration.Registration",
            ["GetInfo", "NotifyRegistrationStatus"],
        ),
        (
            v1,
            "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
            ["NodePrepareResources", "NodeUnprepareResources"],
        ),
        (
            v1beta1,
            "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
            ["NodePrepareResources", "NodeUnprepareResources"],
        ),
        (health_v1, "v1.DRAResourceHealth", ["NodeWatchResources"]),
        (health_v1alpha1, "v1alpha1.DRAResourceHealth", ["NodeWatchResources"]),
        (
            podresources,
            "v1.PodResourcesLister",
            ["List", "GetAllocatableResources", "Get"],
        ),
    ],
    ids=["registration", "dra-v1", "dra-v1beta1", "health-v1", "health-v1alpha1", "podresources"],
)
def test_services_have_the_kubelets_names(module, service, methods):
    (found,) = module.DESCRIPTOR.services_by_name.values()
    assert found.full_name == service
    assert [method.name for method in found.methods] == methods


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (
            registration.PluginInfo,
            {"type": 1, "name": 2, "endpoint": 3, "supported_versions": 4},
        ),
        (registration.RegistrationStatus, {"plugin_registered": 1, "error": 2}),
        (v1.Claim, CLAIM),
        (v1.Device, {**DEVICE, "share_id": 5}),
        (v1.NodePrepareResourceResponse, {"devices": 1, "error": 2}),
        (v1.NodePrepareResourcesResponse, {"claims": 1}),
        (v1.NodeUnprepareResourceResponse, {"error": 1}),
        (v1beta1.Claim, CLAIM),
        (v1beta1.Device, DEVICE),
        (v1beta1.NodePrepareResourceResponse, {"devices": 1, "error": 2}),
        (v1beta1.NodeUnprepareResourceResponse, {"error": 1}),
        (health_v1.NodeWatchResourcesResponse, {"devices": 1}),
        (health_v1.DeviceIdentifier, DEVICE_ID),
        (health_v1.DeviceHealth, HEALTH),
        (health_v1alpha1.NodeWatchResourcesResponse, {"devices": 1}),
        (health_v1alpha1.DeviceIdentifier, DEVICE_ID),
        (health_v1alpha1.DeviceHealth, HEALTH),
        (podresources.ListPodResourcesResponse, {"pod_resources": 1}),
        (podresources.PodResources, {"name": 1, "namespace": 2, "containers": 3}),
        (
            podresources.ContainerResources,
            {"name": 1, "devices": 2, "cpu_ids": 3, "memory": 4, "dynamic_resources": 5},
        ),
        (
            podresources.DynamicResource,
            {"claim_name": 2, "claim_namespace": 3, "claim_resources": 4},
        ),
        (
            podresources.ClaimResource,
            {"cdi_devices": 1, "driver_name": 2, "pool_name": 3, "device_name": 4, "share_id": 5},
        ),
        (podresources.CDIDevice, {"name": 1}),
        (podresources.GetPodResourcesRequest, {"pod_name": 1, "pod_namespace": 2}),
    ],
    ids=lambda value: getattr(getattr(value, "DESCRIPTOR", None), "full_name", ""),
)
def test_fields_have_the_kubelets_numbers(message, fields):
    assert {field.name: field.number for field in message.DESCRIPTOR.fields} == fields


@pytest.mark.parametrize("module", [health_v1, health_v1alpha1], ids=["v1", "v1alpha1"])
def test_health_has_the_kubelets_numbers(module):
    assert dict(module.HealthStatus.items()) == {"UNKNOWN": 0, "HEALTHY": 1, "UNHEALTHY": 2}
