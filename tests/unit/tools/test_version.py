"""One version: the files that state it agree with pyproject.toml, and one command changes them."""

from __future__ import annotations

import pytest
import yaml

from tests.unit.docs.listings import ROOT
from tools.release.version import PLACES, Version, current, rewritten
from tools.site.versions import version_of

IDS = [f"{place.files}-{number}" for number, place in enumerate(PLACES)]


@pytest.mark.parametrize("place", PLACES, ids=IDS)
def test_each_file_states_the_version_of_the_project(place):
    stated = [(path, text) for path, text in rewritten(place, current())]
    assert [path for path, text in stated if path.read_text() != text] == []


@pytest.mark.parametrize("place", PLACES, ids=IDS)
def test_a_new_version_changes_each_file(place):
    later = Version(python="7.8.9")
    for path, text in rewritten(place, later):
        assert text != path.read_text(), path
        assert place.form(later) in text


@pytest.mark.parametrize(
    ("python", "semantic", "go_tag", "site"),
    [
        ("0.2.0.dev0", "0.2.0-dev.0", "proto/go/v0.2.0-dev.0", "dev"),
        ("0.2.0", "0.2.0", "proto/go/v0.2.0", "0.2"),
        ("0.2.11", "0.2.11", "proto/go/v0.2.11", "0.2"),
    ],
)
def test_formats_of_a_version(python, semantic, go_tag, site):
    version = Version(python=python)
    assert (version.semantic, version.go_tag, version.site) == (semantic, go_tag, site)


def test_a_release_links_to_the_folder_that_its_tag_publishes():
    assert version_of(Version(python="0.2.1").tag) == Version(python="0.2.1").site
    # Without a tag, which is how main is published.
    assert version_of("") == Version(python="0.2.1.dev0").site


def test_the_helper_of_the_chart_has_the_folder_of_the_version():
    helper = (ROOT / "charts/drakit/templates/_helpers.tpl").read_text()
    assert f"https://drakit.github.io/drakit/{current().site}/{{{{ . }}}}" in helper
    chart = yaml.safe_load((ROOT / "charts/drakit/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (current().semantic, current().python)
