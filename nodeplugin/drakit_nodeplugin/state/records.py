"""
The stored form of a prepared claim: the content of a checkpoint row; and how rows of claims and
endpoints are serialized.

A small set of types apart from the engine's, so that no change of the engine changes a row or its
checksum. A new field gets a default here, and a reader ignores unknown fields: a version reads
the rows of its predecessor and of its successor (:mod:`.schema`).

It must not know SQLite, or the meaning of the states.
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
"""The kind of a claim's hold on a device: exclusive, a share, or admin access."""

RecordT = TypeVar("RecordT")

Rebuilt = Literal["listed", "confirmed"]
"""The source of a rebuilt entry. The kubelet listed its devices; the API server confirmed that the
claim still has them, or did not: then requests, configs and admin access are unknown."""


class DamagedRowError(Exception):
    """A row's bytes are not those that were written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredNode:
    """A device node whose hardware its driver has identified, or one of a rebuilt claim."""

    type: str
    """``b`` or ``c``."""

    major: int
    minor: int
    identity: str
    """The identity of the hardware (:attr:`drakit.DeviceNode.identity`); empty if it is unknown,
    because only the CDI file of a rebuilt claim has the number."""

    current: bool = True
    """Whether the CDI file has this number. If not, containers that were started before the
    hardware got a different number can still use it."""

    @property
    def number(self) -> tuple[str, int, int]:
        """The device number: type, major and minor."""
        return self.type, self.major, self.minor


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredDevice:
    """A device of a claim, as the allocation names it."""

    pool: str
    device: str
    request: str
    share_id: str | None = None
    admin_access: bool = False
    consumed_capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    configs: tuple[int, ...] = ()
    """Indexes of the claim's configs that apply to it, in their order."""

    consumes: Mapping[str, Mapping[str, str]] | None = field(default=None, compare=False)
    """The consumption from the pool's counter sets, as in the main inventory; None if it is
    unknown, because the entry was rebuilt. It does not take part in comparisons, because a changed
    inventory does not make it another device."""

    cdi_devices: tuple[str, ...] = field(default=(), compare=False)
    """Qualified names of other CDI devices that its container gets as well, as its driver returned
    them. They do not take part in comparisons."""

    nodes: tuple[StoredNode, ...] = field(default=(), compare=False)
    """Its device nodes that have an identity. They do not take part in comparisons, because the
    kernel can give the same device a different number."""

    @property
    def hold(self) -> Hold:
        """The kind of the hold. Admin access holds nothing, not even a share."""
        if self.admin_access:
            return "admin"
        return "exclusive" if self.share_id is None else "share"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredClaim:
    """A claim that this node has begun to prepare, of one driver."""

    uid: str
    namespace: str
    name: str
    state: State
    boot_id: str
    """The boot in which it was prepared. A reboot loses everything that is not on disk."""

    devices: tuple[StoredDevice, ...]
    configs: tuple[str, ...] = ()
    """The opaque parameters with which it was prepared: its driver may need them to unprepare it.
    Each is stored once, regardless of its devices, and as text, because parsed objects take far
    more memory. The lowest precedence comes first. Keys are sorted, so that equal parameters have
    equal texts."""

    data: str | None = None
    """The rest of the claim as it was read, if its driver needs it, as JSON. A repeat without the
    API server gives the driver the same."""

    cdi_spec: str | None = None
    """The text of the claim's CDI file once it is prepared, so that a lost file can be restored
    without the driver."""

    pod_claim_name: str | None = None
    """The name of the pod's entry for a claim from a template, which paths of metadata files
    contain; None for other claims."""

    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """The content of its metadata files: JSON by the full name of the request. Empty if its driver
    has no metadata."""

    metadata_generation: int = 0
    """The number of contents that its metadata files have had."""

    side_effects: bool = True
    """Whether its driver has side effects to undo, as of its preparation."""

    rebuilt: Rebuilt | None = None
    """Set if the entry was rebuilt after damage: its containers may be running, but the driver must
    prepare it again when the kubelet asks."""

    generation: int = 0
    """Set by the checkpoint at each write, and never used twice. A writer must know the stored one,
    so that work that ends late cannot overwrite newer work. 0: there is no entry."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def reference(self) -> ClaimReference:
        """The claim as drivers and the API know it."""
        return ClaimReference(namespace=self.namespace, name=self.name, uid=self.uid)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEndpoint:
    """An endpoint that had devices."""

    name: str
    pools: Mapping[str, tuple[str, ...]]
    """Names of devices, by the pool's name in the API."""

    gone: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The devices among them that the endpoint no longer listed, by pool."""

    evicting: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The devices among them whose pods are evicted when the device is gone, by pool."""

    held: Mapping[str, str] = field(default_factory=dict[str, str])
    """What is published of the devices that claims hold, by pool: JSON with ``devices``,
    ``fallback`` and ``sharedCounters`` as in a ResourceSlice. A reboot may lose both the devices
    and the slices."""

    stopped_at: float | None = None
    """The time of its stop, in seconds since 1970; None if it was available when the row was
    written."""

    removing: bool = False
    """Its grace period has ended: its pools are being deleted."""


def dump(record: StoredClaim | StoredEndpoint) -> bytes:
    """Return the bytes of a row; raise ValueError if the record is not JSON."""
    try:
        return orjson.dumps(record, default=dict)
    except (TypeError, ValueError) as error:
        # The device manager checks everything but an endpoint's name.
        claim = isinstance(record, StoredClaim)
        name = f"claim {record}" if claim else f"endpoint {record.name!r}"
        raise ValueError(f"{name} cannot be written as JSON: {error}") from error


checksum = zlib.crc32
"""The checksum of a row's bytes. The kubelet's own checkpoint uses the same."""


def load(body: object, *, expected: object) -> StoredClaim:
    """Read the row of a claim; raise :class:`DamagedRowError` if it is not what was written."""
    return _load(body, expected, _claim)


def load_endpoint(name: object, body: object, *, expected: object) -> StoredEndpoint:
    """Read the row of an endpoint; raise :class:`DamagedRowError` as well."""
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
    nodes = device.get("nodes", ())  # an earlier version did not store these
    device["nodes"] = tuple([StoredNode(**_known(_NODE_FIELDS, node)) for node in nodes])
    return StoredDevice(**device)


def _endpoint(body: dict[str, Any]) -> StoredEndpoint:
    endpoint = _known(_ENDPOINT_FIELDS, body)
    for key in ("gone", "evicting", "held"):
        endpoint.setdefault(key, {})  # an earlier version did not store these
    for key in ("pools", "gone", "evicting"):
        endpoint[key] = {pool: tuple(names) for pool, names in endpoint[key].items()}
    return StoredEndpoint(**endpoint)


def _known(names: frozenset[str], body: dict[str, Any]) -> dict[str, Any]:
    """Leave out the fields of a later version."""
    return {name: value for name, value in body.items() if name in names}


_CLAIM_FIELDS = frozenset(field.name for field in fields(StoredClaim))
_NODE_FIELDS = frozenset(field.name for field in fields(StoredNode))
_DEVICE_FIELDS = frozenset(field.name for field in fields(StoredDevice))
_ENDPOINT_FIELDS = frozenset(field.name for field in fields(StoredEndpoint))
