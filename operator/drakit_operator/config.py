"""
The operator's settings: one frozen model that is read once. Unknown keys are rejected.

The docstrings below the fields are their documentation: the schema, the chart's values and the docs
are generated from them. Every setting has a default, so that no file is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from drakit.settings import Address, Listen, Logging, Seconds, Settings, describe, read_file
from drakit.settings import SettingsError as ConfigError


class Election(Settings):
    """The election of the replica that writes Events."""

    lease_name: str = "drakit-operator"
    """The name of the Lease in the operator's namespace."""

    lease_duration: Annotated[Seconds, Field(ge=1, multiple_of=1)] = 15.0
    """How long the other replicas wait for a leader that does not renew the Lease. Must be
    a whole number of seconds."""

    renew_deadline: Seconds = 10.0
    """How long a leader keeps trying to renew the Lease. Then its process ends, and the kubelet
    restarts the container. Must be less than ``leaseDuration``."""

    retry_period: Seconds = 2.0
    """How long to wait between two attempts to renew or acquire the Lease."""

    @model_validator(mode="after")
    def _leaders_do_not_overlap(self) -> Self:
        if not self.retry_period < self.renew_deadline < self.lease_duration:
            raise ValueError(
                "retryPeriod must be shorter than renewDeadline, and renewDeadline shorter than "
                "leaseDuration; otherwise, two replicas could lead at the same time"
            )
        return self


class Events(Settings):
    """The Events that the operator writes."""

    debounce: Seconds = 1.0
    """The minimum age of a pod or template before the operator writes Events about it. The
    scheduler might be about to schedule a younger pod."""

    change_pause: Seconds = 60.0
    """The minimum time between two Events that have the same object and reason, but different
    messages."""

    repeat_pause: Seconds = 1800.0
    """The time after which the operator repeats an unchanged Event. By default, the API server
    deletes Events after 1 h."""

    patience: Seconds = 300.0
    """How long a state that is normal during an update must last before the operator reports it.
    Examples are an incomplete pool and a DeviceClass without devices."""

    name_holders: Literal["namespace", "all"] = "namespace"
    """The claims that a pod's Event may name as holders of devices. With ``namespace``, Events name
    claims in the pod's own namespace, and count the others. With ``all``, anyone who can read
    Events can read the names of claims and pods in other namespaces."""


class Admission(Settings):
    """The admission webhook, which checks objects when they are written."""

    enabled: bool = False
    """Whether each replica serves the webhook. The chart sets this to its value
    ``operator.admission.enabled``."""

    listen: Address = "[::]:8443"
    """The address on which a replica serves the webhook over HTTPS."""

    certificates: Path = Path("/var/run/drakit/admission")
    """The directory with ``tls.crt`` and ``tls.key``. A replica loads them again when they
    change."""


class Config(Settings):
    """Settings of ``drakit-operator``."""

    listen: Listen = Listen()
    logging: Logging = Logging()
    election: Election = Election()
    events: Events = Events()
    admission: Admission = Admission()

    host_device_policies: bool = True
    """Whether the operator reconciles HostDevicePolicies. The chart sets this to its value
    ``hostdev.enabled``."""

    restrict_namespaces: bool = False
    """Whether an admission policy enforces ``allowedNamespaces`` of HostDevicePolicies. If not, a
    HostDevicePolicy that sets this field has no DeviceClass. The chart sets this setting to its
    value ``hostdev.restrictNamespaces``."""

    device_maintenance: bool = False
    """Whether the operator reconciles DeviceMaintenances: it taints devices, and evicts the pods
    that use them. The chart sets this to its value ``maintenance.enabled``."""

    driver_taints: bool = False
    """Whether the operator taints a driver's devices while its plugin is unavailable, if its
    DeviceDriver sets ``taintAfterSeconds``. The chart sets this to its value
    ``operator.driverTaints.enabled``."""

    resync_period: Seconds = 300.0
    """How often the operator checks its permissions, the API versions and the feature gates, and
    evaluates all waiting pods again."""

    workers: Annotated[int, Field(ge=1, le=64)] = 16
    """Maximum number of claims, and of other objects, that the operator sends requests about
    concurrently. It checks one object at a time."""


def read_config(path: Path | None) -> Config:
    """Read the file, if there is one. If it is invalid, raise a ConfigError that names the file,
    key and reason."""
    try:
        return Config.model_validate({} if path is None else read_file(path))
    except ValidationError as error:
        raise ConfigError(describe(error, file=str(path))) from None
