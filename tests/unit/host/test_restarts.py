"""A process of the node plugin reads the state of the previous one."""

from __future__ import annotations

import pytest

from drakit_nodeplugin.host.restarts import FAILED, KILLED, STOPPED, ProcessNote


def note(tmp_path, *, pod: str = "pod-1", boot: str = "boot-1") -> ProcessNote:
    return ProcessNote(tmp_path / "home/process.json", instance_uid=pod, boot_id=boot)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(None, STOPPED, id="asked-to-stop"),
        pytest.param(KeyError("x"), f"{FAILED}: 'x'", id="an-error"),
        pytest.param(
            ExceptionGroup("parts", [ExceptionGroup("slices", [KeyError("x")])]),
            f"{FAILED}: 'x'",
            id="an-error-of-a-part",
        ),
    ],
)
def test_a_restarted_process_knows_why_the_one_before_ended(tmp_path, error, reason):
    first = note(tmp_path)
    assert first.begin() is None
    first.end(error)
    assert note(tmp_path).begin() == reason
    assert note(tmp_path).begin() == KILLED, "it has noted nothing since"


@pytest.mark.parametrize("other", [{"pod": "pod-2"}, {"boot": "boot-2"}], ids=["pod", "boot"])
def test_a_process_of_another_pod_or_boot_was_not_restarted(tmp_path, other):
    note(tmp_path).begin()
    assert note(tmp_path, **other).begin() is None


@pytest.mark.parametrize("content", [b"", b"[]", b"{}"])
def test_a_malformed_note_is_replaced(tmp_path, content):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/process.json").write_bytes(content)
    assert note(tmp_path).begin() is None
    assert note(tmp_path).begin() == KILLED
