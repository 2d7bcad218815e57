"""The copy of policies on the node: written policies are read back, and damage loses only the
copy."""

from __future__ import annotations

import json
import stat

import pytest

from drakit_nodeplugin.host.policies import StoredPolicy, read_policies, write_policies

HALL = StoredPolicy(
    name="hall", uid="uid-1", created="2026-01-01T00:00:00Z", generation=3, spec={"lamps": 2}
)
PORCH = StoredPolicy(name="porch", uid="uid-2", created="", generation=1, spec=None)


def test_written_policies_are_read_back_and_only_root_can_read_them(tmp_path):
    path = tmp_path / "policies.json"
    assert read_policies(path) is None
    write_policies(path, [])
    assert read_policies(path) == []
    write_policies(path, [PORCH, HALL])
    assert read_policies(path) == [HALL, PORCH]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["policies.json"]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda text: text[: len(text) // 2], id="truncated"),
        pytest.param(lambda _: "", id="empty"),
        pytest.param(lambda _: "[]", id="another-type"),
        pytest.param(lambda text: text.replace('"lamps":2', '"lamps":9'), id="a-changed-value"),
        pytest.param(lambda text: text.replace("created", "creates"), id="a-missing-key"),
    ],
)
def test_a_damaged_file_is_quarantined(tmp_path, damage):
    path = tmp_path / "policies.json"
    write_policies(path, [HALL])
    path.write_text(damage(path.read_text()))
    assert read_policies(path) is None
    assert [each.name for each in tmp_path.iterdir()] == ["policies.json.damaged"]
    write_policies(path, [HALL])
    assert read_policies(path) == [HALL]


def test_the_file_of_another_version_is_neither_used_nor_moved(tmp_path):
    path = tmp_path / "policies.json"
    write_policies(path, [HALL])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    assert read_policies(path) is None
    assert path.exists()
