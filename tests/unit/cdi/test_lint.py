"""The linter's findings for directories. tests/data/cdi has those for single files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from drakit_formats.cdi import lint_directories, lint_spec
from drakit_formats.cdi.lint import DEFAULT_DIRECTORIES, read_directories

CONFLICTS = Path(__file__).parents[2] / "data" / "cdi" / "conflicts"


def spec(*devices: str, kind: str = "a.test/cam") -> str:
    entries = [{"name": name, "containerEdits": {"env": ["A=b"]}} for name in devices]
    return json.dumps({"cdiVersion": "0.3.0", "kind": kind, "devices": entries})


def said(directory: Path, *subfolders: str) -> list[str]:
    """All problems, with paths below the directory."""
    problems = lint_directories([directory / name for name in subfolders])
    return [f"{p.severity} {p}".replace(f"{directory}/", "") for p in problems]


def test_all_problems_are_reported_in_the_order_of_the_fields():
    problems = lint_spec({"cdiVersion": "0.3.0", "kind": "cam", "devices": [{}, {"name": "-"}]})
    assert [problem.path for problem in problems] == [
        "kind",
        "devices[0].name",
        "devices[0].containerEdits",
        "devices[1].name",
        "devices[1].containerEdits",
    ]


def test_a_field_of_an_odd_name_is_shown_as_text():
    (problem,) = [p for p in lint_spec({"a\nb" * 100: 1}) if "not a field" in p.text]
    assert "\n" not in str(problem)
    assert len(str(problem)) < 200


@pytest.mark.parametrize("value", ["x" * 2**18, "é" * 2**17])
def test_annotations_that_are_too_large_together(value):
    device = {"name": "a", "containerEdits": {"env": ["A=b"]}, "annotations": {"a": value}}
    (problem,) = lint_spec({"cdiVersion": "0.6.0", "kind": "a.test/b", "devices": [device]})
    assert str(problem) == "devices[0].annotations must not have more than 262144 bytes in total"


def test_a_version_is_too_low_for_each_field_that_needs_more():
    edits = {"additionalGids": [1], "netDevices": [{"hostInterfaceName": "a", "name": "b"}]}
    device = {"name": "a", "containerEdits": edits}
    problems = lint_spec({"cdiVersion": "0.6.0", "kind": "a.test/b", "devices": [device]})
    assert [str(problem) for problem in problems] == [
        "cdiVersion is too low: devices[0].containerEdits.additionalGids needs 0.7.0, but this is "
        "0.6.0",
        "cdiVersion is too low: devices[0].containerEdits.netDevices needs 1.1.0, but this is "
        "0.6.0",
    ]


def test_the_directories_are_those_of_the_runtimes():
    assert list(map(str, DEFAULT_DIRECTORIES)) == ["/etc/cdi", "/var/run/cdi"]


def test_only_files_that_runtimes_read_are_linted(tmp_path):
    for name in ("a.json.tmp", ".a.json.0123abcd.drakit", "README.md", "a.JSON"):
        (tmp_path / name).write_text("{")
    (tmp_path / "folder.json").mkdir()
    assert said(tmp_path, ".") == []


def test_a_hidden_file_is_read_by_runtimes_too(tmp_path):
    (tmp_path / ".a.json").write_text("{}")
    assert ".a.json: cdiVersion is missing" in said(tmp_path, ".")[0]


def test_a_file_whose_suffix_runtimes_pass_over(tmp_path):
    (tmp_path / "a.yml").write_text("{}")
    assert said(tmp_path, ".") == ["warning a.yml: is not read by runtimes; rename it to *.yaml"]


def test_what_cannot_be_read_is_a_problem_and_the_rest_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "good.json").write_text(spec("one"))
    found = read_directories([tmp_path], check=lint_spec)
    assert [problem.file.rpartition("/")[2] for problem in found.problems] == [
        "link.json",
        "loop.json",
        "pipe.json",
    ]
    assert list(found.devices) == ["a.test/cam=one"]


def test_a_directory_that_cannot_be_listed_is_a_problem(tmp_path):
    (tmp_path / "etc").write_text("a file")
    (sentence,) = said(tmp_path, "etc")
    assert "etc: cannot be listed, and runtimes do not read the directories after it" in sentence


def test_links_are_followed_as_runtimes_do(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "real").write_text(spec("one"))
    (tmp_path / "etc" / "a.json").symlink_to(tmp_path / "real")
    found = read_directories([tmp_path / "etc"], check=lint_spec)
    assert list(found.devices) == ["a.test/cam=one"]


@pytest.mark.parametrize(
    ("scenario", "devices", "problems"),
    [
        pytest.param(
            "one-device-in-two-files",
            {"left": "run/a.json", "right": "run/b.json"},
            [
                "error run/b.json: devices[0].name conflicts: run/a.json "
                "also defines corpus.test/conflict=cam, so runtimes use neither",
                "error run/a.json: devices[0].name conflicts: run/b.json "
                "also defines corpus.test/conflict=cam, so runtimes use neither",
            ],
            id="of-one-directory-they-lose-it-both",
        ),
        pytest.param(
            "one-device-in-three-files",
            {"left": "run/c.json"},
            [
                "error run/b.json: devices[0].name conflicts: run/a.json",
                "error run/a.json: devices[0].name conflicts: run/b.json",
                "error run/c.json: devices[0].name conflicts: run/a.json",
                "error run/a.json: devices[0].name conflicts: run/c.json",
            ],
            id="of-one-directory-they-lose-it-all-three",
        ),
        pytest.param(
            "the-later-directory-wins",
            {"left": "etc/a.json", "cam": "run/a.json", "right": "run/a.json"},
            ["warning etc/a.json: devices[0].name is overridden by run/a.json"],
            id="of-two-directories-the-later-wins",
        ),
        pytest.param(
            "a-conflict-of-the-earlier-directory-is-not-healed",
            {"left": "run/c.json"},
            [
                "error etc/b.json: devices[0].name conflicts",
                "error etc/a.json: devices[0].name conflicts",
                "warning etc/a.json: devices[0].name is overridden by run/c.json",
                "error run/c.json: devices[0].name is ignored: two files of etc also define",
            ],
            id="a-conflict-is-not-healed-by-a-later-directory",
        ),
        pytest.param(
            "a-conflict-of-the-later-directory-takes-the-earlier-one-with-it",
            {"left": "etc/a.json"},
            [
                "warning etc/a.json: devices[0].name is overridden by run/b.json",
                "error run/c.json: devices[0].name conflicts",
                "error run/b.json: devices[0].name conflicts",
            ],
            id="a-conflict-takes-the-hidden-one-with-it",
        ),
        pytest.param(
            "a-file-with-an-error-takes-no-part",
            {"cam": "run/a.json"},
            ["error run/b.json: devices[0].containerEdits.env[0] must have the form"],
            id="a-file-with-an-error-takes-no-part",
        ),
        pytest.param(
            "the-same-name-of-another-kind-is-another-device",
            {"cam": "run/a.json", "cam2": "run/b.json"},
            [],
            id="another-kind-is-another-device",
        ),
    ],
)
def test_who_has_a_device_that_several_files_have(scenario, devices, problems):
    folder = CONFLICTS / scenario
    found = read_directories([folder / "etc", folder / "run"], check=lint_spec)
    assert {
        name.partition("=")[2]: str(file.path.relative_to(folder))
        for name, file in found.devices.items()
    } == devices
    sentences = said(folder, "etc", "run")
    assert len(sentences) == len(problems)
    for sentence, beginning in zip(sentences, problems, strict=True):
        assert sentence.replace(f"{folder}/", "").startswith(beginning)


def test_every_scenario_of_the_corpus_is_shown():
    marks = test_who_has_a_device_that_several_files_have.pytestmark
    assert {param.values[0] for param in marks[0].args[1]} == {p.name for p in CONFLICTS.iterdir()}
