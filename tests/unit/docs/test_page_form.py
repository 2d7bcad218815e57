"""Pages for users have a form that can be run, and their output is compared."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.pages.__main__ import listing
from e2e.pages.helm import arguments_of
from e2e.pages.output import difference
from e2e.pages.page import Action, Needs, PageError, is_tested, parse, user_pages
from e2e.pages.run import common_values
from e2e.pages.shell import Shell, only_reads
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
        pytest.param("'''yaml\na: [\n'''", "not YAML", id="yaml-that-is-none"),
        pytest.param("'''yaml title=\"a.yaml\"\na: 1\n'''", "no later", id="file-without-use"),
        pytest.param("'''yaml title=\"../a.yaml\"\na: 1\n'''", "not a file", id="file-outside"),
        pytest.param("'''text title=\"Output\"\na\n'''", "follows a bash", id="output-of-nothing"),
        pytest.param("<!-- not run: -->\n'''bash\nls\n'''", "its reason", id="no-reason"),
        pytest.param("<!-- not run: no -->\n'''bash\nls\n'''", "its reason", id="short-reason"),
        pytest.param("<!-- not run: for no block at all -->\n", "no block", id="comment-alone"),
        pytest.param("<!-- run: -->\n", "is empty", id="empty-hidden-command"),
        pytest.param("<!-- run: ls\n", "no end", id="comment-without-end"),
        pytest.param("'''bash\nls\n", "no end", id="block-without-end"),
        pytest.param("- list\n\n      kubectl get pods\n", "outside of", id="indented-command"),
    ],
)
def test_a_page_in_another_form_is_refused(parsed, text, problem):
    with pytest.raises(PageError, match=problem):
        parsed(text)


@pytest.mark.parametrize(
    "matter",
    [
        pytest.param("---\ndescription: x\n---\n", id="no-test"),
        pytest.param("---\ntest: {needs: much}\n---\n", id="unknown-need"),
        pytest.param("---\ntest: {needs: nothing, more: 1}\n---\n", id="unknown-key"),
        pytest.param("---\ntest: {needs: nothing, programs: [x]}\n---\n", id="unknown-program"),
    ],
)
def test_a_page_without_its_needs_is_refused(parsed, matter):
    with pytest.raises(PageError, match=r"page\.md:1: "):
        parsed("", matter=matter)


# ------------------------------------------------------------ output


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        pytest.param("a  b\n", "  a b  \n", id="spaces"),
        pytest.param("pod-1 10.0.0.7", "pod-12 192.168.1.250", id="numbers"),
        pytest.param("vm-kvm-x7k2p", "vm-kvm-zzz9b", id="generated-name"),
        pytest.param(
            "web-7d4b9c6f5-x2x9z 1/1", "web-54bcfd9756-qqqqq 1/1", id="pod-of-a-deployment"
        ),
        pytest.param(
            "w-586899d98-n52lx-dev-h7sm2", "w-586899d98-qqqqq-dev-zzzzz", id="claim-of-it"
        ),
        pytest.param("00000-a-node-1-938291eb", "00000-a-node-1-0a0b0c0d", id="slice"),
        pytest.param("x 3m12s", "x 5s", id="age"),
        pytest.param("5s (x2 over 9s) Warning", "1m3s Warning", id="event-that-came-once"),
        pytest.param(
            "uid: 0a1b2c3d-0000-4000-8000-0123456789ab",
            "uid: ffffffff-ffff-ffff-ffff-ffffffffffff",
            id="uid",
        ),
        pytest.param("a ... z", "a b c z", id="gap-in-a-line"),
        pytest.param("a\n...\nz", "a\nb\nc\nz", id="gap-of-lines"),
        pytest.param("a\n...", "a", id="gap-of-nothing"),
        pytest.param("a\n\nb", "a\nb\n", id="empty-lines"),
        pytest.param("cost: 1.5* (x)", "cost: 2.5* (x)", id="special-characters"),
    ],
)
def test_output_like_that_of_the_page(shown, printed):
    assert difference(shown, printed) is None


@pytest.mark.parametrize(
    ("shown", "printed", "reason"),
    [
        pytest.param("a\nb", "a\nc", "the page shows   b\nbut this came    c", id="other-line"),
        pytest.param("a", "a\nb", "shows 1 lines, and 2", id="more-lines"),
        pytest.param("a\n...\nz", "a\nb", "shows 3 lines, and 2", id="missing-end"),
        pytest.param("x Running", "x Pending", "but this came    x Pending", id="other-word"),
        pytest.param("x 5s", "x soon", "but this came    x soon", id="no-age"),
    ],
)
def test_other_output(shown, printed, reason):
    assert reason in (difference(shown, printed) or "")


# ------------------------------------------------------------ the shell


@pytest.fixture
def shell(tmp_path):
    (tmp_path / "work").mkdir()
    shell = Shell(tmp_path / "work", env={"PATH": "/usr/bin:/bin"}, scratch=tmp_path)
    yield shell
    shell.close()


def test_a_session_keeps_variables_and_shows_both_streams(shell):
    first = shell.run("name=abc\necho one; echo two >&2\n", timeout_seconds=5)
    assert (first.code, first.output) == (0, "one\ntwo\n")
    assert shell.run("echo $name; cat", timeout_seconds=5).output == "abc\n"
    assert shell.run("printf x", timeout_seconds=5).output == "x"


def test_a_failure_ends_the_session_even_with_a_process_in_the_background(shell):
    ran = shell.run("sleep 60 &\necho before\nfalse | true\necho after\n", timeout_seconds=5)
    assert (ran.code, ran.output, ran.failed) == (1, "before\n", "true")
    assert shell.run("echo more", timeout_seconds=5).code != 0


def test_commands_that_run_apart_leave_the_session_alone(shell):
    ran = shell.run("name=abc\necho x\nfalse\necho y", timeout_seconds=5, apart=True)
    assert (ran.code, ran.output) == (1, "x\n")
    assert shell.run("echo ${name:-none}", timeout_seconds=5).output == "none\n"


def test_commands_that_do_not_end_are_stopped(shell):
    assert shell.run("sleep 60", timeout_seconds=0.3).code is None


@pytest.mark.parametrize(
    ("commands", "reads"),
    [
        ("kubectl get pods\n", True),
        ("# look\nkubectl -n a describe pod x \\\n  | grep Events\n", True),
        ("kubectl get pods\nkubectl delete pod x\n", False),
        ("NODE=$(kubectl get nodes -o name)\n", False),
        ("kubectl wait --for=condition=Ready pod/x\n", False),
        ("", False),
    ],
)
def test_commands_that_only_read_can_be_repeated(commands, reads):
    assert only_reads(commands) is reads


# ------------------------------------------------------------ helm


def added(command: str) -> str:
    return " ".join(arguments_of(command.split(), values=["/v/1.yaml"], images=["image.tag=x"]))


def test_an_install_of_the_chart_gets_the_values_of_the_cluster(tmp_path):
    assert added("install drakit charts/drakit -n a --set image.repository=b/drakit") == (
        "install --values=/v/1.yaml drakit charts/drakit -n a --set image.repository=b/drakit "
        "--set-string image.tag=x"
    )
    for other in ("uninstall drakit -n a", "list -A", "install x charts/other"):
        assert added(other) == other


def test_only_an_image_that_a_page_names_and_does_not_load_is_replaced(tmp_path):
    loaded, pulled, none = (tmp_path / name for name in ("loaded.yaml", "pulled.yaml", "none.yaml"))
    loaded.write_text("image: {repository: localhost/lamps}")
    pulled.write_text("image: {repository: registry.example.com/drakit}")
    none.write_text("image: {tag: dev}")
    for named in (f"-f {pulled}", f"-f {pulled} -f {none}"):
        assert "image.tag=x" in added(f"upgrade drakit charts/drakit {named}")
    for other in (
        f"-f {loaded}",
        "--set image.repository=localhost/lamps",
        f"-f {none}",
        "--reset-then-reuse-values",
    ):
        assert "image.tag=x" not in added(f"upgrade lamps charts/drakit {other}")


def test_a_page_gets_no_image_from_the_values_of_the_cluster():
    assert "image" not in common_values()


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


def test_the_program_that_stands_for_helm_runs_without_the_repository_in_its_path(tmp_path):
    (tmp_path / "values").mkdir()
    (tmp_path / "images").write_text("image.tag=x")
    program = ROOT / "e2e" / "pages" / "helm.py"
    done = subprocess.run(
        [sys.executable, "-P", program, "uninstall", "drakit"],
        env={
            "PATH": "/usr/bin:/bin",
            "DRAKIT_PAGE": str(tmp_path),
            "DRAKIT_PAGE_HELM": "/bin/echo",
        },
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    assert done.stdout == "uninstall drakit\n"
    assert Path(tmp_path, "changed").exists()
