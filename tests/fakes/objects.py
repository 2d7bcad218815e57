"""An API server in memory, with functions that create the objects of users and drivers."""

from __future__ import annotations

from tests.fakes.kube import FakeApiServer


class Objects(FakeApiServer):
    """``pod`` and similar functions create objects of others, in the version that is served."""

    driver = "gpu.example.com"
    version = "v1"
    """The version of resource.k8s.io in which objects are created."""

    def resource(self, plural: str, name: str, body: dict, *, namespace: str = "") -> None:
        where = f"/namespaces/{namespace}" if namespace else ""
        self.store(f"/apis/resource.k8s.io/{self.version}{where}/{plural}/{name}", body)

    def node(self, name: str, *, labels: dict | None = None, **spec: object) -> None:
        ready = {"type": "Ready", "status": "True"}
        body = {"metadata": {"labels": labels or {}}, "spec": spec}
        status = {"conditions": [ready], "allocatable": {"pods": "110"}}
        self.store(f"/api/v1/nodes/{name}", {**body, "status": status})

    def device_class(self, name: str, expression: str = "") -> None:
        selector = {"cel": {"expression": expression or f'device.driver == "{self.driver}"'}}
        self.resource("deviceclasses", name, {"spec": {"selectors": [selector]}})

    def slice(self, name: str, *devices: str, node: str = "n1", **spec: object) -> None:
        basic = {"basic": {}} if self.version == "v1beta1" else {}
        body = {
            "driver": self.driver,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": device, **basic} for device in devices],
        }
        self.resource("resourceslices", name, {"spec": body | spec})

    def claim(
        self,
        name: str,
        *,
        device: str = "",
        pod: str = "",
        namespace: str = "lab",
        device_class: str = "gpu",
        pool: str = "n1",
    ) -> None:
        status: dict = {}
        if device:
            result = {"request": "gpu", "driver": self.driver, "pool": pool, "device": device}
            field = {"key": "metadata.name", "operator": "In", "values": [pool]}
            selector = {"nodeSelectorTerms": [{"matchFields": [field]}]}
            status["allocation"] = {"devices": {"results": [result]}, "nodeSelector": selector}
        if pod:
            status["reservedFor"] = [{"resource": "pods", "name": pod, "uid": pod}]
        body = {"spec": {"devices": {"requests": [self._request(device_class)]}}, "status": status}
        self.resource("resourceclaims", name, body, namespace=namespace)

    def template(self, name: str, *, device_class: str = "gpu") -> None:
        spec = {"devices": {"requests": [self._request(device_class)]}}
        self.resource("resourceclaimtemplates", name, {"spec": {"spec": spec}}, namespace="lab")

    def _request(self, device_class: str) -> dict:
        exact = {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": 1}
        return {"name": "gpu", **(exact if self.version == "v1beta1" else {"exactly": exact})}

    def pod(
        self,
        name: str,
        claim: str = "",
        *,
        message: str = "",
        phase: str = "Pending",
        **spec: object,
    ) -> None:
        condition = {"type": "PodScheduled", "status": "False", "message": message}
        claims = [{"name": "gpu", "resourceClaimName": claim}] if claim else []
        self.store(
            f"/api/v1/namespaces/lab/pods/{name}",
            {
                "spec": {"resourceClaims": claims} | spec,
                "status": {"phase": phase, "conditions": [condition]},
            },
        )
