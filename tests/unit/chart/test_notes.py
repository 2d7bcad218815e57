"""The notes that `helm install` and `helm upgrade` print."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.unit.chart.conftest import CHART, IMAGE, Helm
from tests.unit.cli.projects import write

Notes = Callable[..., str]


def with_notes_as_object(chart: Path) -> Path:
    """Change a copy of a chart: `helm template` leaves out the notes."""
    templates = chart / "templates"
    text = (templates / "NOTES.txt").read_text()
    (templates / "NOTES.txt").unlink()
    (templates / "_notes.tpl").write_text(f'{{{{- define "notes" -}}}}{text}{{{{- end -}}}}')
    (templates / "notes.yaml").write_text('notes: {{ include "notes" . | toJson }}\n')
    return chart


@pytest.fixture
def notes(helm: Helm, tmp_path: Path) -> Notes:
    """Render the notes of drakit's chart."""
    chart = with_notes_as_object(Path(shutil.copytree(CHART, tmp_path / "drakit")))

    def rendered(*arguments: str) -> str:
        values = {"hostdev": {"policies": {"fuse": {"enabled": True}}}}
        shown = ("--set", IMAGE, "--show-only", "templates/notes.yaml")
        done = helm("template", "drakit", str(chart), *shown, *arguments, values=values)
        assert done.returncode == 0, done.stderr
        return yaml.safe_load(done.stdout)["notes"]

    return rendered


@pytest.mark.parametrize("arguments", [["--container"], ["--language", "go"]])
def test_the_notes_of_a_new_project_name_the_entry_that_drakits_release_needs(
    helm, tmp_path, arguments
):
    project = write(tmp_path / "lamps", *arguments)
    chart = with_notes_as_object(project / "chart")
    shown = ("--show-only", "templates/notes.yaml")
    done = helm("template", "lamps", str(chart), *shown, values={})
    assert done.returncode == 0, done.stderr
    text = yaml.safe_load(done.stdout)["notes"]
    entry = yaml.safe_load(text[text.index("backends:\n") :].partition("\n\n")[0])
    assert entry == yaml.safe_load((project / "drakit-values.yaml").read_text())
    assert entry["backends"]["allowed"]["lamps"]["driver"] == "lamps.example.com"


def test_an_install_shows_a_pod_with_the_image_of_the_pages(notes):
    text = notes()
    assert text.startswith("drakit ")
    assert "image: busybox:1.37\n" in text
    assert "Kubernetes 1.34 or newer" in text


def test_the_pod_of_the_notes_uses_the_class_that_its_policy_names(notes):
    assert "{deviceClassName: fuse.drakit.dev}" in notes()
    named = notes("--set", "hostdev.policies.fuse.deviceClass.name=fuse.example.com")
    assert "{deviceClassName: fuse.example.com}" in named


def test_an_install_names_the_test_if_the_values_have_a_class_for_it(notes):
    assert "helm test drakit -n default" in notes()
    assert "helm test" not in notes("--set", "hostdev.policies.fuse.enabled=false")


def test_an_install_says_that_maintenances_outlive_the_release(notes):
    command = "kubectl get devicemaintenances"
    assert command not in notes()
    assert command in notes("--set", "maintenance.enabled=true")


def test_an_upgrade_shows_only_how_to_verify_it(notes):
    text = notes("--is-upgrade")
    assert "rollout status daemonset/drakit-nodeplugin" in text
    assert len(text.strip().splitlines()) <= 5


@pytest.mark.parametrize(
    ("section", "entries"),
    [
        pytest.param("backends", '{"allowed": {"gpu": {"driver": "gpu.test"}}}', id="backends"),
        pytest.param(
            "devicePlugins",
            '{"plugins": {"gpu": {"resources": ["a.test/b"]}}}',
            id="device-plugins",
        ),
        pytest.param("hostdev", '{"policies": {"fuse": {"enabled": true}}}', id="policies"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--is-upgrade"]], ids=["install", "upgrade"])
def test_entries_without_their_switch_are_not_silent(notes, section, entries, options):
    def warned(enabled: bool) -> bool:
        switch = f"{section}.enabled={str(enabled).lower()}"
        # Something must run.
        rest = ("--set", "simulated.enabled=true", "--set", switch)
        return f"because {section}.enabled is false" in notes(
            *options, "--set-json", f"{section}={entries}", *rest
        )

    assert warned(enabled=False)
    assert not warned(enabled=True)
