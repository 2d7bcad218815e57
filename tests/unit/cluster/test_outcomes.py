"""The page about releases and runtimes: its rows, and the reasons of failures."""

import pytest

from e2e.outcomes import PAGE, OutcomesError, differing, keep, page, read, results

XML = """<testsuites><testsuite name="pytest">
<testcase classname="e2e.test_a" name="test_one" time="1"/>
<testcase classname="e2e.test_a" name="test_two[x]"><failure message="no">trace</failure></testcase>
<testcase classname="e2e.pages.test_pages" name="test_page[a]"><error message="no"/></testcase>
<testcase classname="e2e.test_b" name="test_new">
<skipped message="Kubernetes 1.36 does not know DRANew"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.xml").write_text(XML)
    stored = tmp_path / "results"
    keep("1.36", read(tmp_path / "run.xml"), stored)
    passed = ("test_a::test_one", "test_a::test_two[x]", "pages.test_pages::test_page[a]")
    keep("1.37", {**dict.fromkeys(passed, "passed"), "test_b::test_new": "passed"}, stored)
    keep("crun", {"test_a::test_one": "passed", "test_b::test_never": "no device"}, stored)
    return stored


REASONS = {("1.36", r"test_a::.*"): "a bug", ("1.36", r"pages.*"): "other words"}


def test_the_page_has_a_row_for_each_test_that_does_not_pass_everywhere(folder):
    text = page(results(folder), REASONS)
    assert "| 1.36 | 1 | 2 | 1 |\n| 1.37 | 4 | 0 | 0 |\n| crun | 1 | 0 | 1 |" in text
    assert "| `test_a::test_two[x]` | failed: a bug | passed | not run |" in text
    new = "skipped: Kubernetes 1.36 does not know DRANew"
    assert f"| `test_b::test_new` | {new} | passed | not run |" in text
    assert "test_one" not in text
    assert "test_never" not in text, "it is skipped wherever it runs"


def test_a_failure_needs_a_reason(folder):
    with pytest.raises(OutcomesError, match=r"test_page\[a\] failed on 1\.36: add the reason"):
        page(results(folder), {})


def test_a_later_run_of_some_tests_keeps_the_results_of_the_others(folder):
    keep("1.36", {"test_a::test_two[x]": "passed"}, folder)
    found = results(folder)
    assert found["1.36"]["test_a::test_one"] == "passed"
    assert "test_a::test_two[x]" not in differing(found)


def test_the_page_of_the_site_has_the_stored_results():
    assert PAGE.read_text() == page(results())
