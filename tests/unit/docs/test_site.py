"""The site: its pages and links, the checks of `make docs`, and the list of published versions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.unit.docs.listings import ROOT
from tools.site.__main__ import version_of
from tools.site.browser import faults_of
from tools.site.html import check_site
from tools.site.links import find_links, replace_links
from tools.site.source import Source, changes, check_links, check_nav
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
    write("docs/index.md", "# Home\n\n[first](start/first.md#a) ![p](pictures/p.svg)\n")
    write("docs/pictures/p.svg", "<svg/>")
    write(
        "docs/start/first.md",
        "# First\n\n[pod](../../examples/pod.yaml) [all](../../examples)\n\n<!-- changes -->\n",
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


def test_each_page_has_one_entry_in_the_nav_and_each_entry_a_page(repository):
    (repository / "docs/other.md").write_text("# Other\n")
    nav = repository / "mkdocs.yml"
    nav.write_text(nav.read_text() + "      - index.md\n")
    assert check_nav(repository) == [
        "mkdocs.yml: the nav has no entry for docs/other.md",
        "mkdocs.yml: docs/start/later.md does not exist",
        "mkdocs.yml: docs/use/later.md does not exist",
        "mkdocs.yml: index.md is listed twice",
    ]


def test_links_in_code_are_no_links():
    text = "\n".join(
        [
            "[a](a.md) `[b](b.md)` [`c](`](c.md)",
            "```yaml",
            "d: [d](d.md)",
            "```",
            "<!-- [e](e.md) -->",
            "~~~~",
            "```",
            "[f](f.md)",
            "~~~~",
            '![g](g.svg "g") <img alt="" src="h.svg">',
            "[i]: i.md",
        ]
    )
    links = [(1, "a.md"), (1, "c.md"), (10, "g.svg"), (10, "h.svg"), (11, "i.md")]
    assert list(find_links(text)) == links
    assert replace_links(text, lambda target: target) == text


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


def test_fragments_are_listed_newest_first_with_links_that_work(repository):
    assert changes(repository) == (
        "\n## Next release\n\n### Features\n\n- Two\n  lines.\n- One. See [the page](index.md).\n"
    )
    Source(repository / "build", repository).write()
    assert (
        "- One. See [the page](../index.md)."
        in (repository / "build/source/start/first.md").read_text()
    )


def test_a_release_without_later_changes_has_no_heading_for_them(repository):
    for file in (repository / "changes").glob("[0-9]*.md"):
        file.unlink()
    assert changes(repository) == ""


def test_every_fragment_of_this_repository_is_listed():
    lines = changes(ROOT)
    for file in (ROOT / "changes").glob("*.*.md"):
        start = file.read_text().removeprefix("- ")[:25]
        assert start in lines, file.name


def test_each_version_of_the_site_has_its_own_address(repository):
    nav = repository / "mkdocs.yml"
    nav.write_text("site_url: https://x.example/y/\n" + nav.read_text())
    for version, line in (("", "site_name:"), ("0.2", "site_url: https://x.example/y/0.2/\n")):
        Source(repository / "build", repository, version=version).write()
        assert (repository / "build/mkdocs.yml").read_text().lstrip().startswith(line)


@pytest.mark.parametrize(
    ("tag", "version"), [(None, "dev"), ("", "dev"), ("v0.2.1", "0.2"), ("v10.20.30", "10.20")]
)
def test_the_tag_of_a_release_is_a_version_of_the_site(tag, version):
    assert version_of(tag) == version


@pytest.mark.parametrize("tag", ["0.2.1", "v0.2", "v0.2.1-rc1"])
def test_another_tag_is_no_version_of_the_site(tag):
    with pytest.raises(SystemExit, match=re.escape(tag)):
        version_of(tag)


def test_a_second_write_follows_the_repository(repository):
    source = Source(repository / "build", repository)
    source.write()
    page = repository / "build/source/index.md"
    before = page.stat().st_mtime_ns
    (repository / "docs/start/first.md").write_text("# First\n")
    source.write()
    assert page.stat().st_mtime_ns == before
    assert not (repository / "build/source/repository").exists()
    nav = (repository / "build/mkdocs.yml").read_text()
    assert "docs_dir: source\nsite_dir: html\n" in nav


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        pytest.param("../../gone.yaml", "does not exist", id="missing-file"),
        pytest.param("../../../../etc/passwd", "outside the repository", id="outside"),
        pytest.param("/examples/pod.yaml", "outside the repository", id="absolute"),
        pytest.param("../pictures", "is a folder", id="folder-of-docs"),
        pytest.param("https://example.com/x", None, id="another-site"),
        pytest.param("#anchor", None, id="anchor"),
    ],
)
def test_a_link_of_a_page_is_checked_with_its_line(repository, link, fault):
    (repository / "docs/start/first.md").write_text(f"# First\n\n[x]({link})\n")
    faults = check_links(repository)
    if fault is None:
        assert faults == []
    else:
        (found,) = faults
        assert found.startswith("docs/start/first.md:3: ")
        assert fault in found


@pytest.mark.parametrize("file", ["README.md", "changes/3.fix.md", "examples/README.md"])
def test_links_of_files_that_the_site_shows_are_checked(repository, file):
    (repository / file).write_text("[x](gone.yaml)\n")
    assert check_links(repository) == [f"{file}:1: gone.yaml does not exist"]


@pytest.mark.parametrize(
    ("html", "foreign"),
    [
        pytest.param('<a href="https://example.com">out</a>', False, id="link-to-another-site"),
        pytest.param('<link rel="canonical" href="https://example.com">', False, id="canonical"),
        pytest.param('<img src="p.svg">', False, id="own-image"),
        pytest.param("<style>a{b:url(data:x)}</style>", False, id="data"),
        pytest.param('<img src="https://x.example/p.svg">', True, id="image"),
        pytest.param('<script src="//x.example/p.js"></script>', True, id="script"),
        pytest.param('<link rel="preconnect" href="https://x.example">', True, id="font"),
        pytest.param("<style>a{b:url(https://x.example)}</style>", True, id="style"),
        pytest.param('<p style="b:url(https://x.example)">', True, id="style-of-an-element"),
    ],
)
def test_a_page_loads_nothing_from_another_host(tmp_path, html, foreign):
    (tmp_path / "index.html").write_text(f"<p>\n{html}")
    faults = list(check_site(tmp_path))
    assert bool(faults) == foreign
    assert all(found.startswith("index.html:2: ") for found in faults)


def test_a_stylesheet_loads_nothing_from_another_host(tmp_path):
    (tmp_path / "a.css").write_text('@import "https://x.example/a.css"; b{c:url("data:x")}')
    (fault,) = check_site(tmp_path)
    assert "another host" in fault


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


@pytest.mark.parametrize(
    ("method", "params", "fault"),
    [
        pytest.param(
            "Network.requestWillBeSent",
            {"request": {"url": "https://x.example/font"}},
            "request to another host: https://x.example/font",
            id="another-host",
        ),
        pytest.param(
            "Network.requestWillBeSent",
            {"request": {"url": "http://127.0.0.1:1/a.css"}},
            None,
            id="own-host",
        ),
        pytest.param(
            "Network.requestWillBeSent", {"request": {"url": "data:,x"}}, None, id="no-request"
        ),
        pytest.param(
            "Network.responseReceived",
            {"response": {"status": 404, "url": "http://127.0.0.1:1/x"}},
            "404 for http://127.0.0.1:1/x",
            id="missing",
        ),
        pytest.param(
            "Log.entryAdded",
            {"entry": {"level": "error", "text": "refused"}},
            "console: refused",
            id="console",
        ),
        pytest.param(
            "Runtime.consoleAPICalled", {"type": "log", "args": []}, None, id="console-log"
        ),
    ],
)
def test_what_a_browser_reports_is_a_fault_or_not(method, params, fault):
    found = list(faults_of([{"method": method, "params": params}], "127.0.0.1:1"))
    assert found == ([] if fault is None else [fault])
