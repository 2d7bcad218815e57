"""Pages for users have a form that can be run, and their output is compared."""

from __future__ import annotations

import re

import pytest

from e2e.pages.__main__ import listing
from e2e.pages.output import difference
from e2e.pages.page import Action, Needs, PageError, is_tested, parse, user_pages
from tests.unit.docs.listings import ROOT

MATTER = "---\ndescription: A page.\ntest:\n  needs: installed\n---\n"

COMMANDS = re.compile(r"^ *```(bash|yaml)", re.M)

TESTED = [pytest.param(p, id=str(p.relative_to(ROOT))) for p in user_pages() if is_tested(p)]


@pytest.fixture
def parsed(tmp_path):
    """Parse a page's text; code blocks in it have ''' for their fences."""

    def parse_text(text: str, matter: str = MATTER):
        path = tmp_path / "page.md"
        path.write_text(matter + text.replace("'''", "```"))
        return parse(path)

    return parse_text


# ------------------------------------------------------------ the pages of the site


@pytest.mark.parametrize("path", TESTED)
def test_a_page_for_users_is_in_the_form_that_runs(path):
    assert parse(path).steps or parse(path).not_run or not COMMANDS.search(path.read_text())


def test_a_page_for_users_with_commands_or_manifests_says_what_it_needs():
    silent = {path for path in user_pages() if not is_tested(path)}
    assert not [path for path in silent if COMMANDS.search(path.read_text())]


def test_every_block_that_is_not_run_is_listed_with_its_reason():
    pages = [parse(path) for path in user_pages() if is_tested(path)]
    not_run = [
        f"{page.path.relative_to(ROOT)}:{one.line}: " for page in pages for one in page.not_run
    ]
    listed = listing()
    for start in not_run:
        (line,) = [line for line in listed if line.startswith(start)]
        reason = line.removeprefix(start).partition(": ")[2]
        assert len(reason.split()) >= 3, f"{line}: name what the block needs"


# ------------------------------------------------------------ parsing


def test_a_page_is_its_blocks_in_order(parsed):
    page = parsed(
        """
# Title

=== "YAML"

    '''yaml title="pod.yaml"
    apiVersion: v1
    spec:
      x: 1
    '''

'''bash
kubectl apply -f pod.yaml
'''

'''text title="Output"
pod/a created
'''

<!-- run: echo hidden -->

<!-- run:
one
two
-->

'''yaml
apiVersion: v1
kind: Pod
'''

<!-- fails -->
'''bash
false
'''

'''bash title="On the node"
ls /dev
'''

<!-- not run: it needs a registry of yours -->
'''bash
docker push x
'''
"""
    )
    assert page.needs is Needs.INSTALLED
    assert page.nodes == 1
    steps = [(step.action, step.text, step.hidden, step.fails) for step in page.steps]
    assert steps == [
        (Action.SAVE, "apiVersion: v1\nspec:\n  x: 1\n", False, False),
        (Action.RUN, "kubectl apply -f pod.yaml\n", False, False),
        (Action.RUN, "echo hidden\n", True, False),
        (Action.RUN, "one\ntwo\n", True, False),
        (Action.DRY_RUN, "apiVersion: v1\nkind: Pod\n", False, False),
        (Action.RUN, "false\n", False, True),
        (Action.RUN_ON_NODE, "ls /dev\n", False, False),
    ]
    assert page.steps[0].file == "pod.yaml"
    assert [step.line for step in page.steps[:2]] == [12, 18]
    assert page.steps[1].output == "pod/a created\n"
    assert [(one.language, one.reason) for one in page.not_run] == [
        ("bash", "it needs a registry of yours")
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("'''console\n$ ls\n'''", "write ```bash", id="another-name-for-bash"),
        pytest.param("'''yaml\na: 1\n'''", "needs a title", id="yaml-that-is-no-manifest"),
        pytest.param("'''yaml title=\"a.yaml\"\na: 1\n'''", "no later", id="file-without-use"),
        pytest.param("'''text title=\"Output\"\na\n'''", "follows a bash", id="output-of-nothing"),
        pytest.param("<!-- not run: -->\n'''bash\nls\n'''", "its reason", id="no-reason"),
        pytest.param("- list\n\n      kubectl get pods\n", "outside of", id="indented-command"),
    ],
)
def test_a_page_in_another_form_is_refused(parsed, text, problem):
    with pytest.raises(PageError, match=problem):
        parsed(text)


# ------------------------------------------------------------ output


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        pytest.param("pod-1 10.0.0.7", "pod-12 192.168.1.250", id="numbers"),
        pytest.param("vm-kvm-x7k2p", "vm-kvm-zzz9b", id="generated-name"),
        pytest.param(
            "web-7d4b9c6f5-x2x9z 1/1", "web-54bcfd9756-qqqqq 1/1", id="pod-of-a-deployment"
        ),
        pytest.param("00000-a-node-1-938291eb", "00000-a-node-1-0a0b0c0d", id="slice"),
        pytest.param("x 3m12s", "x 5s", id="age"),
        pytest.param(
            "uid: 0a1b2c3d-0000-4000-8000-0123456789ab",
            "uid: ffffffff-ffff-ffff-ffff-ffffffffffff",
            id="uid",
        ),
        pytest.param("a ... z", "a b c z", id="gap-in-a-line"),
        pytest.param("a\n...\nz", "a\nb\nc\nz", id="gap-of-lines"),
    ],
)
def test_output_like_that_of_the_page(shown, printed):
    assert difference(shown, printed) is None


@pytest.mark.parametrize(
    ("shown", "printed", "reason"),
    [
        pytest.param("a\nb", "a\nc", "the page shows   b\nbut this came    c", id="other-line"),
        pytest.param("a", "a\nb", "shows 1 lines, and 2", id="more-lines"),
        pytest.param("x Running", "x Pending", "but this came    x Pending", id="other-word"),
    ],
)
def test_other_output(shown, printed, reason):
    assert reason in (difference(shown, printed) or "")


CHARTS = re.compile(r"\bhelm (?:install|upgrade|template)\b.*(?:charts/drakit\b|\bCHART\b)")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=str(path.relative_to(ROOT)))
        for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
        if CHARTS.search(path.read_text().replace("\\\n", " "))
    ],
)
def test_each_install_on_a_page_names_images(path):
    text = re.sub(r" *\\\n *", " ", path.read_text())
    files = re.findall(r'```yaml title="([^"]+)"\n(.*?)```', text, re.S)
    with_image = {name for name, content in files if re.search(r"^ *image:", content, re.M)}
    for command in re.findall(r"^ *(helm (?:install|upgrade|template)\b.*)$", text, re.M):
        if "charts/drakit" not in command:
            continue
        named = "image.repository=" in command or "reuse-values" in command
        given = re.findall(r"-f (\S+)", command)
        # A file that is neither on the page nor in a clone is one that a command wrote.
        written = [
            name for name in given if name not in dict(files) and not (ROOT / name).is_file()
        ]
        in_clone = [ROOT / name for name in given if (ROOT / name).is_file()]
        named |= any("\nimage:" in f"\n{file.read_text()}" for file in in_clone)
        assert named or written or with_image & set(given), command
