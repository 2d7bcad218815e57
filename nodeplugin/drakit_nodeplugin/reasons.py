"""
The reasons of the node plugin's Events: closed sets of words, without data.

pyright checks each place that writes an Event, or counts a diagnostic, against them. A unit test
compares them with the page docs/reference/events.md, which describes each.
"""

from __future__ import annotations

from typing import Literal

ClaimReason = Literal["DeviceRenumbered", "Prepared", "PrepareFailed", "UnprepareFailed"]
"""Reasons of Events about a ResourceClaim."""

NodeReason = Literal[
    "AnnotationsUnsupported",
    "BackendDirectory",
    "BackendRefused",
    "BackendUnreachable",
    "CheckpointDamaged",
    "DevicePluginStopped",
    "DeviceRejected",
    "EndpointStopped",
    "FieldsDropped",
    "KubeletResourcesUnknown",
    "NodePluginRestarted",
    "RegistrationRefused",
    "ResourceServedByKubelet",
    "SliceNameTaken",
]
"""Reasons of Events about the Node. Those of drivers, backends and device plugins are also the
label `reason` of the metric `drakit_endpoint_diagnostics_total`."""
