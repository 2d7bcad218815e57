"""``drakit cdi lint``: files and directories, for people and programs."""

from __future__ import annotations

import json

import pytest

from drakit_cli.main import main

GOOD = {
    "cdiVersion": "0.3.0",
    "kind": "camera.example.com/claim",
    "devices": [{"name": "cam-0", "containerEdits": {"env": ["CAM=0"]}}],
}
BAD = GOOD | {"kind": "camera"}


@pytest.fixture
def lint(tmp_path, capsys):
    def run(*arguments, **files):
        for name, spec in files.items():
            path = tmp_path / name.replace("__", "/").replace("_json", ".json")
            path.parent.mkdir(exist_ok=True)
            path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
        code = main(["cdi", "lint", *(a.format(tmp_path) for a in arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_good_file_and_a_good_directory(lint):
    done = (0, "no problems found\n", "")
    assert lint("{}/a.json", a_json=GOOD) == done
    assert lint("{}") == done


@pytest.mark.parametrize("path", ["{}/a.json", "{}"], ids=["file", "directory"])
def test_a_bad_file_is_named(lint, tmp_path, path):
    code, out, _ = lint(path, a_json=BAD)
    assert code == 1
    assert out.startswith(f"error: {tmp_path}/a.json: kind ")


def test_a_file_that_is_not_a_spec_is_reported(lint, tmp_path):
    code, out, _ = lint("{}/a.json", a_json="no JSON {")
    assert code == 1
    assert out.startswith(f"error: {tmp_path}/a.json: ")


def test_directories_are_read_together(lint):
    twice = {"a__one_json": GOOD, "a__two_json": GOOD}
    code, out, _ = lint("{}/a", **twice)
    assert code == 1
    assert "camera.example.com/claim=cam-0" in out


def test_json_for_programs(lint, tmp_path):
    code, out, _ = lint("{}/a.json", "--json", a_json=BAD)
    problem = json.loads(out)["problems"][0]
    assert code == 1
    assert problem["file"] == f"{tmp_path}/a.json"
    assert problem["path"] == "kind"
    assert problem["severity"] == "error"


def test_a_path_that_is_not_there_is_wrong_use(lint, tmp_path):
    assert lint("{}/none") == (2, "", f"error: {tmp_path}/none does not exist\n")


def test_a_warning_is_no_failure(lint):
    code, out, _ = lint("{}/a.json", a_json=GOOD | {"cdiVersion": "0.6.0"})
    assert code == 0
    assert out.startswith("warning: ")
