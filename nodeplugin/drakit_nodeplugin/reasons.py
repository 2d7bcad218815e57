"""
The reasons of the node plugin's Events: fixed sets of words, without variable data.

pyright checks that every place that writes an Event, or counts a diagnostic, uses one of them. A
unit test compares them with the page docs/reference/events.md, which describes each reason.
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
"""Reasons of Events about the Node. The reasons for drivers, backends and device plugins are also
the values of the label `reason` of the metric `drakit_endpoint_diagnostics_total`."""
