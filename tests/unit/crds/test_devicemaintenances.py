"""The definition of DeviceMaintenance rejects invalid objects, and allows the operator's writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from cel_expr_python import cel

from drakit_explain.maintenance import MAX_DEVICES, MAX_MESSAGE
from drakit_operator.maintenance import LISTED

FILE = Path("charts/drakit/crds/devicemaintenances.yaml")


def schema() -> dict[str, Any]:
    (version,) = yaml.safe_load(FILE.read_text(encoding="utf-8"))["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


SPEC = schema()["properties"]["spec"]
CAM = {"driver": "d", "device": "cam"}
START, END = "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"


def problems(spec: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
    """Return the errors of the schema and its rules."""
    found = [each.message for each in jsonschema.Draft202012Validator(SPEC).iter_errors(spec)]
    if found:
        return found
    names = dict.fromkeys(("self", "oldSelf"), cel.Type.DYN)
    environment = cel.NewEnv(variables=names)
    parts = [(SPEC, spec, old)]
    parts += [
        (SPEC["properties"][name], spec[name], old and old.get(name))
        for name in ("devices", "window")
        if name in spec
    ]
    for of, new, before in parts:
        for each in of.get("x-kubernetes-validations", ()):
            if "oldSelf" in each["rule"] and before is None:
                continue
            data = {"self": new, "oldSelf": before}
            if not environment.compile(each["rule"]).eval(data=data).plain_value():
                found.append(each["message"])
    return found


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param({"devices": CAM, "mode": "Cordon"}, "", id="cordon"),
        pytest.param({"devices": CAM, "mode": "Drain", "timeLimitSeconds": 60}, "", id="drain"),
        pytest.param({"devices": {}, "mode": "Cordon"}, "non-empty", id="empty-selection"),
        pytest.param({"devices": {"device": ""}, "mode": "Cordon"}, "non-empty", id="empty-name"),
        pytest.param({"mode": "Cordon"}, "'devices' is a required", id="no-selection"),
        pytest.param({"devices": CAM}, "'mode' is a required", id="no-mode"),
        pytest.param({"devices": CAM, "mode": "Evict"}, "is not one of", id="unknown-mode"),
        pytest.param(
            {"devices": CAM, "mode": "Cordon", "timeLimitSeconds": 60}, "needs mode", id="limit"
        ),
        pytest.param(
            {"devices": CAM, "mode": "Drain", "timeLimitSeconds": 0}, "minimum", id="no-time"
        ),
        pytest.param({"devices": CAM, "mode": "Drain", "window": {"end": END}}, "", id="end"),
        pytest.param(
            {"devices": CAM, "mode": "Drain", "window": {"start": START, "end": END}},
            *("",),
            id="window",
        ),
        pytest.param(
            {"devices": CAM, "mode": "Drain", "window": {"start": END, "end": START}},
            *("must end after it starts",),
            id="window-that-ends-first",
        ),
    ],
)
def test_what_the_api_server_refuses(spec, words):
    found = problems(spec)
    assert words in "; ".join(found)
    assert bool(found) is bool(words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "Drain"}, ""),
        ({"window": {"end": END}}, ""),
        ({"devices": {"driver": "d"}}, "the selection cannot change"),
    ],
)
def test_a_selection_cannot_grow(change, words):
    old = {"devices": CAM, "mode": "Cordon"}
    found = problems(old | change, old)
    assert words in "; ".join(found)
    assert bool(found) is bool(words)


def test_the_status_has_room_for_what_the_operator_writes():
    status = schema()["properties"]["status"]["properties"]
    assert status["devices"]["maxItems"] == MAX_DEVICES
    assert status["blockers"]["maxItems"] == LISTED
    message = status["blockers"]["items"]["properties"]["message"]
    assert message["maxLength"] == MAX_MESSAGE
    assert status["kopf"]["x-kubernetes-preserve-unknown-fields"]
