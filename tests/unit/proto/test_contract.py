"""The contract with backends: additions pass, and what breaks programs built on it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.contract import (
    BASELINE,
    CONTRACT,
    ROOT,
    breaking_changes,
    described,
    read_baseline,
    write_baseline,
)

SOURCES = ROOT / "proto"

# Where it is not in the cache yet, buf is built first.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def changed(tmp_path: Path):
    """Replace text of the contract, once for each pair, and return what is broken by it."""
    if shutil.which("go") is None:
        pytest.skip("buf is built with Go")

    def check(*changes: tuple[str, str]) -> list[str]:
        text = (SOURCES / CONTRACT).read_text()
        for old, new in changes:
            assert old in text, f"{CONTRACT} has no {old!r} any more: take something else"
            text = text.replace(old, new, 1)
        path = tmp_path / CONTRACT
        path.parent.mkdir(parents=True)
        path.write_text(text)
        now = described(SOURCES, comments=False)
        return breaking_changes(described(tmp_path, comments=True), old=now)

    return check


CAPACITY_RANGE = "optional CapacityRange valid_range = 4;"
LAST_METHOD = "rpc WatchHealth(WatchHealthRequest) returns (stream WatchHealthResponse);"
LAST_MESSAGE = "message CheckedClaim {"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param(
            (
                "message UnpreparedClaim {\n  // The UID of the claim.\n  string uid = 1;",
                "message UnpreparedClaim {",
            ),
            "FIELD_NO_DELETE",
            id="a-field-is-removed",
        ),
        pytest.param(
            (
                "message UnpreparedClaim {\n  // The UID of the claim.\n  string uid = 1;",
                'message UnpreparedClaim {\n  reserved 1; reserved "uid";',
            ),
            "FIELD_NO_DELETE",
            id="a-field-is-removed-and-reserved",
        ),
        pytest.param(
            ("string driver_name = 1;", "string driver = 1;"),
            "FIELD_SAME_NAME",
            id="a-field-is-renamed",
        ),
        pytest.param(
            ("string driver_name = 1;", 'string driver_name = 1 [json_name = "driver"];'),
            "FIELD_SAME_JSON_NAME",
            id="a-field-gets-another-json-name",
        ),
        pytest.param(
            ("string driver_name = 1;", "string driver_name = 3;"),
            "FIELD_NO_DELETE",
            id="a-field-gets-another-number",
        ),
        pytest.param(
            ("optional int32 numa_node = 1;", "optional int64 numa_node = 1;"),
            "FIELD_SAME_TYPE",
            id="a-field-gets-another-type-that-the-wire-would-bear",
        ),
        pytest.param(
            (CAPACITY_RANGE, "optional Capacity valid_range = 4;"),
            "FIELD_SAME_TYPE",
            id="a-field-gets-another-message",
        ),
        pytest.param(
            ("TaintEffect effect = 3;", "HealthStatus effect = 3;"),
            "FIELD_SAME_TYPE",
            id="a-field-gets-another-enum",
        ),
        pytest.param(
            ("string version = 2;", "repeated string version = 2;"),
            "FIELD_SAME_CARDINALITY",
            id="a-field-becomes-a-list",
        ),
        pytest.param(
            ("optional int32 numa_node = 1;", "int32 numa_node = 1;"),
            "FIELD_SAME_CARDINALITY",
            id="a-field-cannot-be-told-from-zero-any-more",
        ),
        pytest.param(
            ("map<string, string> counters = 2;", "map<string, int64> counters = 2;"),
            "FIELD_SAME_TYPE",
            id="a-map-gets-other-values",
        ),
        pytest.param(
            (
                "string uid = 1;\n\n  // Whether all",
                "oneof by { string uid = 1; }\n\n  // Whether all",
            ),
            "FIELD_SAME_ONEOF",
            id="a-field-goes-into-a-oneof",
        ),
        pytest.param(
            ("oneof value {", "oneof content {"),
            "ONEOF_NO_DELETE",
            id="a-oneof-is-renamed",
        ),
        pytest.param(
            ("  HEALTH_STATUS_UNHEALTHY = 2;\n", ""),
            "ENUM_VALUE_NO_DELETE",
            id="a-value-of-an-enum-is-removed",
        ),
        pytest.param(
            ("TAINT_EFFECT_NONE = 1;", "TAINT_EFFECT_TELLS = 1;"),
            "ENUM_VALUE_SAME_NAME",
            id="a-value-of-an-enum-is-renamed",
        ),
        pytest.param(
            (LAST_METHOD, ""),
            "RPC_NO_DELETE",
            id="a-method-is-removed",
        ),
        pytest.param(
            ("rpc GetInfo(", "rpc Info("),
            "RPC_NO_DELETE",
            id="a-method-is-renamed",
        ),
        pytest.param(
            ("rpc GetInfo(GetInfoRequest)", "rpc GetInfo(WatchDevicesRequest)"),
            "RPC_SAME_REQUEST_TYPE",
            id="a-method-gets-another-request",
        ),
        pytest.param(
            ("returns (GetInfoResponse)", "returns (CheckClaimsResponse)"),
            "RPC_SAME_RESPONSE_TYPE",
            id="a-method-gets-another-response",
        ),
        pytest.param(
            ("(stream WatchDevicesResponse)", "(WatchDevicesResponse)"),
            "RPC_SAME_SERVER_STREAMING",
            id="a-stream-becomes-one-answer",
        ),
        pytest.param(
            ("(PrepareClaimsRequest)", "(stream PrepareClaimsRequest)"),
            "RPC_SAME_CLIENT_STREAMING",
            id="a-request-becomes-a-stream",
        ),
        pytest.param(
            ("service Backend {", "service Backends {"),
            "SERVICE_NO_DELETE",
            id="the-service-is-renamed",
        ),
        pytest.param(
            ("package drakit.backend.v1;", "package drakit.backends.v1;"),
            "FILE_SAME_PACKAGE",
            id="the-package-is-renamed",
        ),
        pytest.param(
            ('"drakit.dev/backend/v1;backendv1"', '"drakit.dev/backend/v1"'),
            "FILE_SAME_GO_PACKAGE",
            id="the-go-package-is-another",
        ),
    ],
)
def test_what_breaks_a_backend_is_refused(changed, change, rule):
    broken = changed(change)
    assert any(f"({rule})" in line for line in broken), broken
    assert all(line.startswith(f"{CONTRACT}:") for line in broken)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="nothing-changes"),
        pytest.param(
            [("// Returns the identity of the backend.", "// Gives the identity of it.")],
            id="a-comment",
        ),
        pytest.param(
            [("string version = 2;\n}", "string version = 2;\n  optional string vendor = 3;\n}")],
            id="a-field-is-added",
        ),
        pytest.param(
            [("StringList versions = 8;", "StringList versions = 8;\n    double ratio = 9;")],
            id="a-field-is-added-to-a-oneof",
        ),
        pytest.param(
            [(LAST_MESSAGE, f"message Later {{ string name = 1; }}\n\n{LAST_MESSAGE}")],
            id="a-message-is-added",
        ),
        pytest.param(
            [("HEALTH_STATUS_UNHEALTHY = 2;", "HEALTH_STATUS_UNHEALTHY = 2;\n  WORSE = 3;")],
            id="a-value-is-added-to-an-enum",
        ),
        pytest.param(
            [
                (
                    LAST_METHOD,
                    f"{LAST_METHOD}\n  rpc Later(GetInfoRequest) returns (GetInfoResponse);",
                )
            ],
            id="a-method-is-added",
        ),
        pytest.param(
            [("string version = 2;\n}", "string version = 2 [deprecated = true];\n}")],
            id="a-field-is-deprecated",
        ),
    ],
)
def test_compatible_changes_pass(changed, changes):
    assert changed(*changes) == []


def test_a_removed_message_is_refused_with_all_that_used_it(changed):
    broken = changed(
        (CAPACITY_RANGE, ""),
        ("message CapacityRange {", "message Range {"),
    )
    assert any("(MESSAGE_NO_DELETE)" in line for line in broken)


def test_a_removed_enum_is_refused(changed):
    broken = changed(
        ("TaintEffect effect = 3;", "Effect effect = 3;"),
        ("enum TaintEffect {", "enum Effect {"),
    )
    assert any("(ENUM_NO_DELETE)" in line for line in broken)


def test_the_baseline_has_all_of_the_contract():
    assert read_baseline() == described(SOURCES, comments=False)


def test_a_baseline_is_read_as_it_was_written(tmp_path):
    contract = described(SOURCES, comments=False)
    write_baseline(contract, tmp_path / "baseline.txtpb")
    assert read_baseline(tmp_path / "baseline.txtpb") == contract
    assert (tmp_path / "baseline.txtpb").read_text() == BASELINE.read_text()
