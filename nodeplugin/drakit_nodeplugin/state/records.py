"""
The stored form of a prepared claim (the content of a checkpoint row), and the serialization of
claim and endpoint rows.

These few types are separate from the engine's types, so that no change to the engine changes a row
or its checksum. A new field gets a default here, and readers ignore unknown fields. Therefore, each
version can read the rows of its predecessor and of its successor (:mod:`.schema`).

Does not depend on SQLite.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

import orjson

from drakit.device import ClaimReference

State = Literal["preparing", "prepared", "unpreparing"]
STATES: tuple[State, ...] = get_args(State)

Hold = Literal["exclusive", "share", "admin"]
"""How a claim holds a device: exclusively, as a share, or with admin access."""

RecordT = TypeVar("RecordT")

Rebuilt = Literal["listed", "confirmed"]
"""The source of a rebuilt entry. ``listed``: the devices are known only from the kubelet's list, so
requests, configs and admin access are unknown. ``confirmed``: the API server has also confirmed
that the claim still has the devices."""


class DamagedRowError(Exception):
    """A row's content differs from what was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredNode:
    """A device node whose hardware its driver has identified, or a node of a rebuilt claim."""

    type: str
    """The type of the node: ``b`` or ``c``."""

    major: int
    minor: int
    identity: str
    """The identity of the hardware (:attr:`drakit.DeviceNode.identity`). Empty if it is unknown,
    because only the CDI file of a rebuilt claim has the number."""

    current: bool = True
    """Whether the CDI file contains this number. If not, only containers that were started before
    the hardware got a different number can still use it."""

    @property
    def number(self) -> tuple[str, int, int]:
        """The device number: type, major and minor."""
        return self.type, self.major, self.minor


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredDevice:
    """A device of a claim, named as in the allocation."""

    pool: str
    device: str
    request: str
    share_id: str | None = None
    admin_access: bool = False
    consumed_capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    configs: tuple[int, ...] = ()
    """The indexes of the claim's configs that apply to the device, in order."""

    consumes: Mapping[str, Mapping[str, str]] | None = field(default=None, compare=False)
    """The consumption from the pool's counter sets, as in the main inventory. None if it is
    unknown, because the entry was rebuilt. Ignored in comparisons, because a changed inventory does
    not make it a different device."""

    cdi_devices: tuple[str, ...] = field(default=(), compare=False)
    """The qualified names of other CDI devices that the container also gets, as returned by the
    driver. Ignored in comparisons."""

    nodes: tuple[StoredNode, ...] = field(default=(), compare=False)
    """The device nodes that have an identity, or all known device nodes of a rebuilt claim. Ignored
    in comparisons, because the kernel can give the same device a different number."""

    @property
    def hold(self) -> Hold:
        """The kind of the hold. Admin access does not hold anything, not even a share."""
        if self.admin_access:
            return "admin"
        return "exclusive" if self.share_id is None else "share"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredClaim:
    """A claim of one driver that this node has begun to prepare."""

    uid: str
    namespace: str
    name: str
    state: State
    boot_id: str
    """The ID of the boot in which the claim was prepared. After a reboot, everything that is not on
    disk is lost."""

    devices: tuple[StoredDevice, ...]
    configs: tuple[str, ...] = ()
    """The opaque parameters with which the claim was prepared. The driver may need them to
    unprepare the claim. Each config is stored once, regardless of the number of devices, and as a
    string, because parsed objects take far more memory. The lowest precedence comes first. Keys are
    sorted, so that equal parameters have equal strings."""

    data: str | None = None
    """The rest of the claim as it was read, as JSON, if the driver needs it. If the claim is
    prepared again without the API server, the driver gets the same data."""

    cdi_spec: str | None = None
    """The content of the claim's CDI file once it is prepared, so that a lost file can be restored
    without the driver."""

    pod_claim_name: str | None = None
    """For a claim from a template, the name of the pod's entry, which is part of paths of metadata
    files. None for other claims."""

    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """The content of the claim's metadata files: JSON, keyed by the full request name. Empty if the
    driver does not use metadata."""

    metadata_generation: int = 0
    """The number of versions that the claim's metadata files have had so far."""

    side_effects: bool = True
    """Whether the driver had side effects to undo when the claim was prepared."""

    rebuilt: Rebuilt | None = None
    """Set if the entry was rebuilt after damage. The claim's containers may be running, but the
    driver must prepare the claim again when the kubelet requests it."""

    generation: int = 0
    """The generation of the row. The checkpoint sets it at each write, and never reuses it. A
    writer must know the stored generation, so that work that finishes late cannot overwrite newer
    work. 0 means that there is no entry."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def reference(self) -> ClaimReference:
        """The identity of the claim."""
        return ClaimReference(namespace=self.namespace, name=self.name, uid=self.uid)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEndpoint:
    """An endpoint that had devices."""

    name: str
    pools: Mapping[str, tuple[str, ...]]
    """The device names, keyed by the API name of the pool."""

    gone: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The devices among them that the endpoint no longer listed, keyed by pool."""

    evicting: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The devices among them whose pods are evicted if the device is gone, keyed by pool."""

    held: Mapping[str, str] = field(default_factory=dict[str, str])
    """The published state of devices that claims hold, keyed by pool: JSON with ``devices``,
    ``fallback`` and ``sharedCounters`` as in a ResourceSlice. A reboot may lose both the devices
    and the slices."""

    stopped_at: float | None = None
    """The time at which the endpoint stopped, as a Unix timestamp. None if it was available when
    the row was written."""

    removing: bool = False
    """Whether the endpoint's grace period has ended, and its pools are being deleted."""


def dump(record: StoredClaim | StoredEndpoint) -> bytes:
    """Return the bytes of a row. Raises ValueError if the record cannot be encoded as JSON."""
    try:
        return orjson.dumps(record, default=dict)
    except (TypeError, ValueError) as error:
        # The device manager validates everything in an endpoint except its name.
        claim = isinstance(record, StoredClaim)
        name = f"claim {record}" if claim else f"endpoint {record.name!r}"
        raise ValueError(f"{name} cannot be written as JSON: {error}") from error


checksum = zlib.crc32
"""The checksum function for a row's bytes. The kubelet's own checkpoint uses the same algorithm."""


def load(body: object, *, expected: object) -> StoredClaim:
    """Read the row of a claim. Raises :class:`DamagedRowError` if its content differs from what was
    written."""
    return _load(body, expected, _claim)


def load_endpoint(name: object, body: object, *, expected: object) -> StoredEndpoint:
    """Read the row of an endpoint. Raises :class:`DamagedRowError`."""
    endpoint = _load(body, expected, _endpoint)
    if endpoint.name != name:
        raise DamagedRowError("it has another endpoint's content")
    return endpoint


def _load(body: object, expected: object, read: Callable[[dict[str, Any]], RecordT]) -> RecordT:
    if not isinstance(body, bytes) or checksum(body) != expected:
        raise DamagedRowError("its checksum does not match")
    try:
        return read(orjson.loads(body))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedRowError(f"it cannot be read: {error}") from error


def _claim(body: dict[str, Any]) -> StoredClaim:
    claim = _known(_CLAIM_FIELDS, body)
    if claim["state"] not in STATES:
        raise ValueError(f"its state is {claim['state']!r}")
    claim["devices"] = tuple([_device(device) for device in claim["devices"]])
    claim["configs"] = tuple(claim.get("configs", ()))
    return StoredClaim(**claim)


def _device(body: dict[str, Any]) -> StoredDevice:
    device = _known(_DEVICE_FIELDS, body)
    for name in ("configs", "cdi_devices"):
        device[name] = tuple(device.get(name, ()))
    nodes = device.get("nodes", ())  # an earlier version did not store nodes
    device["nodes"] = tuple([StoredNode(**_known(_NODE_FIELDS, node)) for node in nodes])
    return StoredDevice(**device)


def _endpoint(body: dict[str, Any]) -> StoredEndpoint:
    endpoint = _known(_ENDPOINT_FIELDS, body)
    for key in ("gone", "evicting", "held"):
        endpoint.setdefault(key, {})  # an earlier version did not store these fields
    for key in ("pools", "gone", "evicting"):
        endpoint[key] = {pool: tuple(names) for pool, names in endpoint[key].items()}
    return StoredEndpoint(**endpoint)


def _known(names: frozenset[str], body: dict[str, Any]) -> dict[str, Any]:
    """Omit the fields of a later version."""
    return {name: value for name, value in body.items() if name in names}


_CLAIM_FIELDS = frozenset(field.name for field in fields(StoredClaim))
_NODE_FIELDS = frozenset(field.name for field in fields(StoredNode))
_DEVICE_FIELDS = frozenset(field.name for field in fields(StoredDevice))
_ENDPOINT_FIELDS = frozenset(field.name for field in fields(StoredEndpoint))
