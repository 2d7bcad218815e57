"""
Builds the content of device metadata files (KEP-5304), and their paths in a container.

A container reads the attributes of its devices from one file per request and driver. The file is a
stream of JSON objects with the same content in each version of ``metadata.resource.k8s.io``, newest
first, one object per line. A reader uses the first version that it knows.

For a claim that the pod spec names, the path contains the claim's name. The name of a claim from a
template is generated, so its path contains the name of the pod's entry for the claim
(``spec.resourceClaims[]``) instead.

Does not depend on files, CDI, or checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from drakit.device import ClaimReference
from drakit_formats.resource.objects import Object

CONTAINER_DIRECTORY = "/var/run/kubernetes.io/dra-device-attributes"

VERSIONS = ("v1beta1", "v1alpha1")
"""The versions of ``metadata.resource.k8s.io``, newest first. Kubernetes 1.36 reads only
v1alpha1."""

MAX_ATTRIBUTES = 32
"""Maximum number of attributes of a device. Readers that validate a file reject it if a device has
more."""

MAX_BYTES = 128 * 1024
"""Maximum size of the JSON for all requests of a claim, in bytes: 4 KiB for each of 32 devices. It
is limited because the checkpoint stores the JSON."""


class InvalidMetadataError(ValueError):
    """Readers would reject the metadata, or it is too large. The message is a clause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMetadata:
    """The metadata of one allocated device."""

    driver: str
    pool: str
    device: str
    request: str
    """The full name, with ``/subrequest`` if the request is a prioritized list."""

    attributes: Object
    """The attributes, as in a ResourceSlice."""

    network_data: Object | None = None
    """The network data, as in ``ResourceClaim.status.devices[].networkData``."""


def container_path(
    driver: str, claim: ClaimReference, request: str, *, pod_claim: str | None
) -> str:
    """Return the path of the metadata file in the container. `request` is a base request."""
    folder = f"resourceclaims/{claim.name}"
    if pod_claim is not None:
        folder = f"resourceclaimtemplates/{pod_claim}"
    return f"{CONTAINER_DIRECTORY}/{folder}/{request}/{driver}-metadata.json"


def request_bodies(devices: Iterable[DeviceMetadata]) -> dict[str, str]:
    """
    Return the JSON of each request (``DeviceMetadata.requests[]``), keyed by its full name.

    Raises :class:`InvalidMetadataError`.
    """
    bodies: dict[str, dict[str, Any]] = {}
    for each in devices:
        if len(each.attributes) > MAX_ATTRIBUTES:
            raise InvalidMetadataError(
                f"device {each.device} has {len(each.attributes)} attributes, published ones "
                f"included, and a metadata file can have {MAX_ATTRIBUTES} for a device"
            )
        body: dict[str, Any] = {"driver": each.driver, "pool": each.pool, "name": each.device}
        if each.attributes:
            body["attributes"] = dict(each.attributes)
        if each.network_data:
            body["networkData"] = dict(each.network_data)
        request = bodies.setdefault(each.request, {"name": each.request, "devices": []})
        request["devices"].append(body)
    texts = {name: _json(body) for name, body in bodies.items()}
    if sum(map(len, texts.values())) > MAX_BYTES:
        raise InvalidMetadataError(
            f"the metadata of its devices has more than {MAX_BYTES // 1024} KiB"
        )
    return texts


def file_text(
    claim: ClaimReference, request_body: str, *, generation: int, pod_claim: str | None
) -> str:
    """Return the content of one request's file, from the request's JSON. `generation` increases
    with each change to the claim's files."""
    metadata = {
        "name": claim.name,
        "namespace": claim.namespace,
        "uid": claim.uid,
        "generation": generation,
    }
    pod_claim_name = "" if pod_claim is None else f'"podClaimName":{_json(pod_claim)},'
    rest = f'"metadata":{_json(metadata)},{pod_claim_name}"requests":[{request_body}]}}'
    return "".join(
        f'{{"apiVersion":"metadata.resource.k8s.io/{version}","kind":"DeviceMetadata",{rest}\n'
        for version in VERSIONS
    )


def _json(value: Mapping[str, Any] | str) -> str:
    # Write only ASCII, so that the number of characters equals the number of bytes.
    return json.dumps(value, separators=(",", ":"))
