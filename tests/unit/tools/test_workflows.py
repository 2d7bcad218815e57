"""The workflows of CI: pinned actions, and no job with more permissions than it uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.unit.docs.listings import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

WRITES = {
    "docs.yml publish": {"contents"},
    "release.yml attest-files": {"attestations", "id-token"},
    "release.yml chart": {"attestations", "id-token", "packages"},
    "release.yml images": {"attestations", "id-token", "packages"},
    "release.yml packages": {"id-token"},
    "release.yml publish": {"contents"},
    "scan.yml codeql": {"security-events"},
}
"""The jobs that can change something, and what."""


def jobs(workflow: Path) -> dict:
    return yaml.safe_load(workflow.read_text())["jobs"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(workflow):
    used = [
        step["uses"]
        for job in jobs(workflow).values()
        for step in job.get("steps", [])
        if "uses" in step
    ]
    assert used
    assert [action for action in used if not re.search(r"@[0-9a-f]{40}$", action)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_job_states_its_permissions(workflow):
    assert yaml.safe_load(workflow.read_text())["permissions"] == {}
    assert [name for name, job in jobs(workflow).items() if "permissions" not in job] == []


def test_only_these_jobs_can_write():
    found = {
        f"{workflow.name} {name}": {
            key for key, value in job["permissions"].items() if value == "write"
        }
        for workflow in WORKFLOWS
        for name, job in jobs(workflow).items()
    }
    assert {name: scopes for name, scopes in found.items() if scopes} == WRITES


def test_jobs_that_publish_a_release_run_nothing_of_the_repository():
    release = jobs(ROOT / ".github/workflows/release.yml")
    for name in {each.partition(" ")[2] for each in WRITES if each.startswith("release.yml")}:
        used = [step.get("uses", "") for step in release[name]["steps"]]
        assert not [action for action in used if action.startswith(("actions/checkout", "./"))]
        assert not [step for step in release[name]["steps"] if "make " in step.get("run", "")]


def test_the_job_that_publishes_the_site_builds_nothing():
    """Requirements of the build would run with the token."""
    commands = [
        step["run"]
        for step in jobs(ROOT / ".github/workflows/docs.yml")["publish"]["steps"]
        if "run" in step
    ]
    assert commands == ["make docs-publish PUSH=1"]
    recipe = (
        (ROOT / "Makefile").read_text().partition("\ndocs-publish:")[2].partition("\n.PHONY")[0]
    )
    prerequisites, _, lines = recipe.partition("##")
    assert prerequisites.strip() == ""
    assert "pip" not in lines
    assert "$(BIN)" not in lines
    assert "$(DOCS)" not in lines


def test_jobs_that_do_not_push_do_not_keep_the_token_in_the_clone():
    for workflow in WORKFLOWS:
        for name, job in jobs(workflow).items():
            if job["permissions"].get("contents") == "write":
                continue
            for step in job.get("steps", []):
                if step.get("uses", "").startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] is False, (workflow.name, name)
