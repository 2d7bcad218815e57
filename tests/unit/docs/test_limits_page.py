"""docs/reference/limits.md has the numbers of the code, and device-plugins.md agrees with it."""

from __future__ import annotations

import re
from typing import Any, get_args

from drakit.layout import MAX_SOCKET_PATH_BYTES
from drakit_daemon.kube.listing import MAX_OBJECT_BYTES
from drakit_driver import probes
from drakit_driver import server as driver_server
from drakit_driver.runtime import contract, thread
from drakit_driver.runtime import policies as policy_feed
from drakit_drivers.hostdev import container, policy, policy_devices
from drakit_explain import budget, projection, selectors
from drakit_formats import json_schema
from drakit_formats.resource import limits, metadata
from drakit_nodeplugin import allowed, config, metrics
from drakit_nodeplugin.claims import allocation
from drakit_nodeplugin.endpoints import host_paths, wire
from drakit_nodeplugin.endpoints.backend import convert, directory
from drakit_nodeplugin.endpoints.deviceplugin import messages, plugin_registration
from drakit_nodeplugin.host import policies, report
from drakit_nodeplugin.kubelet import health, server
from drakit_operator import admission, announcing, budgets, selecting
from tests.unit.docs.listings import ROOT

PAGE = (ROOT / "docs/reference/limits.md").read_text()


def longest(model: type, field: str) -> int:
    """The maximum length, or value, of a field of a model."""
    (limit,) = [
        getattr(each, name)
        for each in model.model_fields[field].metadata
        for name in ("max_length", "le")
        if hasattr(each, name)
    ]
    return limit


def longest_of(annotation: Any) -> int:
    """The maximum length of an annotated string."""
    (limit,) = [
        each.max_length
        for given in get_args(annotation)[1:]
        for each in given.metadata
        if hasattr(each, "max_length")
    ]
    return limit


def kibibytes(count: int) -> str:
    return f"{count // 2**20} MiB" if count % 2**20 == 0 else f"{count // 2**10} KiB"


PARAMETERS = config.OpaqueParameters()
SPEC = policy.HostDevicePolicySpec
DIRECTORY_BYTES = MAX_SOCKET_PATH_BYTES - config.SOCKET_NAME_BYTES - 1

EXPECTED = [
    # Claims
    f"{PARAMETERS.max_bytes:,} bytes of JSON",
    f"{PARAMETERS.max_values:,}",
    f"{allocation.MAX_CONFIG_DEPTH} levels",
    f"{allocation.MAX_DATA_BYTES:,} bytes of JSON, {allocation.MAX_DATA_ENTRIES:,} entries",
    f"{metadata.MAX_BYTES:,} bytes of JSON, {metadata.MAX_ATTRIBUTES} attributes per device",
    f"{server.RESPONSE_SECONDS:.0f} s",
    f"{contract.CALL_SECONDS:.0f} s",
    # Host device policies
    f"{policies.MAX_POLICIES}",
    f"{longest_of(policy.PolicyName)} characters",
    kibibytes(policy_feed.MAX_SPEC_BYTES),
    f"{policy_devices._MAX_DEVICES:,}",
    f"{longest(policy.Sharing, 'users'):,}",
    f"{longest(SPEC, 'match')}",
    f"{longest(SPEC, 'attributes')}",
    f"{longest(container.Container, 'mounts')}",
    f"{longest(container.Container, 'env')}",
    # Devices
    f"{limits.MAX_ATTRIBUTES_AND_CAPACITIES}",
    f"{limits.MAX_ATTRIBUTE_VALUES}",
    f"{limits.MAX_STRING_BYTES} bytes",
    f"{limits.MAX_VALID_VALUES}",
    f"{limits.MAX_DRIVER_TAINTS}",
    f"{limits.MAX_CONSUMED_COUNTER_SETS}",
    f"{limits.MAX_COUNTERS}",
    f"{limits.MAX_COMPATIBILITY_GROUPS}",
    f"{limits.MAX_BINDING_CONDITIONS}",
    f"{limits.MAX_NODE_RESOURCES}",
    f"{limits.MAX_EXTRA_BYTES:,} bytes of JSON, {limits.MAX_EXTRA_DEPTH} levels",
    f"{limits.MAX_LABEL_LENGTH} characters",
    f"{limits.MAX_IDENTIFIER_LENGTH} characters",
    f"{contract.MAX_DEVICES:,}",
    f"{limits.MAX_POOLS}",
    f"{limits.MAX_TAINTED_DEVICES_PER_SLICE}",
    f"{report.MAX_LISTED}",
    f"{report.MAX_POLICIES}, with {report.MAX_CONFLICTS} conflicts each",
    f"{metrics.MAX_POOLS}",
    f"{limits.MAX_DRIVER_NAME} characters",
    f"{health.MAX_MESSAGE_BYTES:,} bytes",
    f"{thread.MAX_YIELDS:,} per second",
    # Backends
    f"{config.MAX_BACKENDS}",
    f"{allowed.MAX_NAME} characters",
    f"{DIRECTORY_BYTES} bytes",
    f"{directory.MAX_SOCKETS}",
    kibibytes(wire.MAX_MESSAGE_BYTES),
    kibibytes(wire.MAX_PART_BYTES),
    f"{wire.MESSAGES_PER_SECOND:.0f} per second, with bursts of up to {wire.MESSAGES_AT_ONCE:.0f}",
    f"{convert.MAX_EDITS:,}",
    f"{directory.INFO_SECONDS:.0f} s",
    f"{driver_server.MAX_CALLS}",
    f"{probes.MAX_STREAMS}",
    # Device plugins
    f"{config.MAX_RESOURCES}",
    f"{limits.MAX_STRING_BYTES} characters",
    kibibytes(wire.MAX_MESSAGE_BYTES),
    kibibytes(messages.MAX_DEVICE_BYTES),
    f"{messages.MAX_DEVICE_ID} characters",
    kibibytes(messages.MAX_RESPONSE_BYTES),
    f"{messages.MAX_PARTS} of each",
    f"{host_paths.MAX_NODES}",
    f"{plugin_registration.MAX_PER_SECOND:.0f} per second, "
    f"with bursts of up to {plugin_registration.MAX_BURST:.0f}",
    # Operator and kubectl drakit explain
    f"{projection.MAX_EXPRESSION:,} bytes",
    kibibytes(projection.MAX_CONTENT),
    kibibytes(projection.MAX_CONTENT),
    kibibytes(budgets.STORE_BYTES),
    kibibytes(budgets.NODE_BYTES),
    f"{selecting.MAX_OF_OBJECT}",
    "1 s",
    "96 MiB",
    f"{budget.MAX_STEPS:,}",
    f"{projection.MAX_POD_CLAIMS}",
    kibibytes(MAX_OBJECT_BYTES),
]


def test_the_page_has_the_limits_of_the_code():
    rows = re.findall(r"^\| ([A-Z`].*?) \| (\d.*?) \|", PAGE, re.M)
    assert [maximum for _, maximum in rows] == EXPECTED


def test_the_sentences_of_the_page_have_the_limits_of_the_code():
    assert f"An Event has at most {announcing.NOTE_CHARACTERS} characters" in PAGE
    assert (
        f"at most {announcing.PER_SECOND:.0f} Events per second, with bursts of up to "
        f"{announcing.BURST:,}" in PAGE
    )
    assert f"Every {thread.COUNTED_DEVICES:,} devices in a list add one inventory" in PAGE
    assert f"Evaluation of a selector for {selectors.BATCH:,} devices" in PAGE
    go = (ROOT / "proto/go/calls.go").read_text()
    assert f"\tmaxCalls = {driver_server.MAX_CALLS}\n" in go
    assert f"\tmaxStreams = {probes.MAX_STREAMS}\n" in go
    assert "const selectTimeout = time.Second\n" in (ROOT / "operator/cel/select.go").read_text()
    assert "\thardMemory = 96 << 20\n" in (ROOT / "operator/cel/memory.go").read_text()


def test_the_page_about_the_protocol_has_the_limits_of_the_code():
    text = (ROOT / "docs/reference/device-plugins.md").read_text()
    assert f"`Allocate` responses of up to {kibibytes(messages.MAX_RESPONSE_BYTES)}" in text
    assert f"other messages of up to {kibibytes(wire.MAX_MESSAGE_BYTES)}" in text


def test_the_operators_page_has_the_time_of_an_expensive_selector():
    text = " ".join((ROOT / "docs/reference/operator.md").read_text().split())
    assert f"again after {selecting.EXPENSIVE_SECONDS / 60:.0f} minutes" in text


def test_the_operators_page_has_the_limits_of_the_webhook():
    text = (ROOT / "docs/reference/operator.md").read_text()
    section = text.partition("## Admission webhook")[2].partition("\n## ")[0]
    assert [int(each.replace(",", "")) for each in re.findall(r"[\d,]*\d", section)] == [
        admission.MAX_REQUEST_BYTES // 2**20,
        admission.MAX_VALUES,
        json_schema.MAX_STEPS,
        admission.MAX_CONNECTIONS,
        admission.TEMPLATES_A_SECOND,
    ]
