"""The site: its pages and links, the checks of `make docs`, and the list of published versions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.docs.listings import ROOT
from tools.site.html import check_site
from tools.site.source import Source, check_links, check_nav
from tools.site.versions import newest, publish

NAV = """\
site_name: drakit
docs_dir: docs
site_dir: build/docs/site
nav:
  - Home: index.md
  - Start:
      - start/first.md
      - start/later.md
  - Use:
      - use/later.md
"""


@pytest.fixture
def repository(tmp_path):
    """A repository with two pages, and files that they link to."""

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("mkdocs.yml", NAV)
    write(
        "docs/index.md", "# Home\n\n[first](start/first.md#a) ![p](pictures/p.svg)\n\n## `Home`\n"
    )
    write("docs/pictures/p.svg", "<svg/>")
    write(
        "docs/start/first.md",
        "# First { #a }\n\n"
        "[pod](../../examples/pod.yaml) [all](../../examples)\n\n<!-- changes -->\n",
    )
    write("examples/pod.yaml", "kind: Pod\n")
    write("examples/README.md", "[how](../docs/index.md) [pod](pod.yaml)\n")
    write("changes/1.feature.md", "- One. See [the page](../docs/index.md).\n")
    write("changes/2.feature.md", "Two\nlines.\n")
    write("changes/README.md", "Not a change.\n")
    return tmp_path


def test_pages_of_the_repository_link_to_files_that_exist():
    assert check_links() == []


def test_every_page_of_the_repository_is_in_the_nav():
    assert check_nav() == []


def test_a_file_outside_docs_becomes_a_page_of_the_site(repository):
    source = repository / "build"
    Source(source, repository).write()
    site = source / "source"
    first = (site / "start/first.md").read_text()
    assert "[pod](../repository/examples/pod.yaml.md)" in first
    assert "[all](../repository/examples/index.md)" in first
    assert "```yaml\nkind: Pod\n```" in (site / "repository/examples/pod.yaml.md").read_text()
    listed = (site / "repository/examples/index.md").read_text()
    assert "[README.md](README.md.md)" in listed
    readme = (site / "repository/examples/README.md.md").read_text()
    assert "[how](../../index.md) [pod](pod.yaml.md)" in readme


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        pytest.param("../../gone.yaml", "does not exist", id="missing-file"),
        pytest.param("../../../../etc/passwd", "outside the repository", id="outside"),
        pytest.param("../pictures", "is a folder", id="folder-of-docs"),
        pytest.param("#first", None, id="anchor"),
        pytest.param("#the-x", "does not have this heading", id="missing-anchor"),
        pytest.param("../index.md#home_1", None, id="anchor-of-the-second-heading"),
        pytest.param("../index.md#home_2", "does not have this heading", id="no-third-heading"),
    ],
)
def test_a_link_of_a_page_is_checked_with_its_line(repository, link, fault):
    text = f"# First\n\n[x]({link})\n\n## A {{ #a }}\n\n```\n# The x\n```\n"
    (repository / "docs/start/first.md").write_text(text)
    faults = check_links(repository)
    if fault is None:
        assert faults == []
    else:
        (found,) = faults
        assert found.startswith("docs/start/first.md:3: ")
        assert fault in found


@pytest.mark.parametrize(
    ("html", "foreign"),
    [
        pytest.param('<a href="https://example.com">out</a>', False, id="link-to-another-site"),
        pytest.param('<img src="https://x.example/p.svg">', True, id="image"),
        pytest.param('<script src="//x.example/p.js"></script>', True, id="script"),
        pytest.param("<style>a{b:url(https://x.example)}</style>", True, id="style"),
    ],
)
def test_a_page_loads_nothing_from_another_host(tmp_path, html, foreign):
    (tmp_path / "index.html").write_text(f"<p>\n{html}")
    faults = list(check_site(tmp_path))
    assert bool(faults) == foreign
    assert all(found.startswith("index.html:2: ") for found in faults)


def test_versions_are_published_side_by_side(tmp_path):
    html, site = tmp_path / "html", tmp_path / "site"
    html.mkdir()
    (html / "index.html").write_text("dev")
    (html / "404.html").write_text("no such page of dev")
    publish(html, site=site, version="dev", aliases=[])
    assert "url=dev/" in (site / "index.html").read_text()

    for version in ("0.9", "0.10"):
        (html / "index.html").write_text(version)
        (html / "404.html").write_text(f"no such page of {version}")
        publish(html, site=site, version=version, aliases=["latest"])
    listed = json.loads((site / "versions.json").read_text())
    assert [(entry["version"], entry["aliases"]) for entry in listed] == [
        ("0.10", ["latest"]),
        ("0.9", []),
        ("dev", []),
    ]
    assert (site / "0.9/index.html").read_text() == "0.9"
    assert (site / "latest/index.html").read_text() == "0.10"
    assert "url=latest/" in (site / "index.html").read_text()
    assert (site / "404.html").read_text() == "no such page of 0.10"
    assert newest(listed, "0.10")
    assert not newest(listed, "0.9")
    with pytest.raises(SystemExit, match=re.escape("../x: a version")):
        publish(html, site=site, version="../x", aliases=[])


def test_no_page_of_the_theme_loads_fonts():
    assert re.search(r"^  font: false$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert "http" not in (ROOT / "requirements/docs.txt").read_text()
    for file in Path(ROOT / "docs/stylesheets").glob("*.css"):
        assert "http" not in file.read_text()
