"""The check of the English in docstrings and comments."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tools.english import Passage, main, passages, problems


@pytest.mark.parametrize(
    "text",
    [
        "It must not know claims.",
        "Not at once: the server restarts.",
        "Retry. Also after a failure: the source is down.",
        "Else a power cut leaves an empty file.",
        "Of two with one name the first is kept.",
        "Return what is remembered of an object.",
        "What both daemons share.",
        "Return why a node is not usable.",
        "Find the pods. Return when more is due.",
        "The length limit of a message.",
        "The limit of concurrent connections.",
        "A reset can take long.",
        "Replace the devices by those of an inventory.",
        "Continue even on a bug in the plugin.",
        "An object that is missing in the list.",
        "The reason for which the stream ends.",
        "Set at the next change of any device.",
        "Return the devices in the form for the kubelet.",
        "The age of a key is no sign of a hang.",
        "The holder, if the Lease has none.",
        "An empty user counts as false.",
        "An OCI runtime goes by the options alone.",
        "The runtime gets them beside the names of ours.",
        "The claim, as far as a node needs it.",
        "Raise if the answer is too large.",
        "Return whether a text is a label.",
        "Not for threads.",
        "Devices, of which any one fits.",
        "Record it also if nobody asks.",
        "Octal in the way of YAML 1.1.",
        "The manager is told of each change.",
        "The claim is prepared anew.",
        "The call was cancelled.",
        "The color is normalised.",
    ],
)
def test_an_odd_wording_is_refused(text):
    assert len(list(problems(Passage(1, text)))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Read a file.\n\n:param path: the file. :param size: in bytes.",
        "Read a file.\n\n:param path: the file. :raises OSError: it is missing.",
        "Read a file.\n\n:param path: the file. :param\nsize: in bytes.",
    ],
)
def test_each_field_has_a_line(text):
    (problem,) = problems(Passage(1, text, is_docstring=True))
    assert "a line of its own" in problem


@pytest.mark.parametrize(
    "text",
    [
        "Does not depend on claims.",
        "Not all drivers publish health. Of course, they may.",
        "There is no reason to retry, and there are no other callers.",
        "The pod is no longer there. It is gone.",
        "Leave the file alone: a stand-alone kubelet reads it.",
        'Parse a text file, or "a text", or `cancelled()`, or asyncio.cancelled.',
        "The work that must be done otherwise is a promise of precise rules.",
        "Return the prepared claims. The server answers within a second.",
        "Example::\n\n    beside = answer alone",
        "When a driver stops, its devices remain. Returns when the server ends the watch.",
        "The time limit for a call. Fields are replaced by their defaults.",
        "Pods are selected by name, and devices are sorted by name.",
    ],
)
def test_a_usual_wording_is_accepted(text):
    assert list(problems(Passage(1, text, is_docstring=True))) == []


@pytest.mark.parametrize(("is_docstring", "count"), [(True, 1), (False, 0)])
@pytest.mark.parametrize(
    "text",
    [
        "Its own problems.",
        "Why the driver is stopped.",
        "When the driver stopped, in seconds.",
        "Return the claims, by UID.",
    ],
)
def test_a_docstring_names_what_it_describes(text, is_docstring, count):
    assert len(list(problems(Passage(1, text, is_docstring)))) == count


def test_docstrings_and_comments_are_found_where_they_stand():
    source = dedent(
        '''\
        """Module."""

        LIMIT = 1  # after code
        """Attribute."""


        def f():
            """
            Function.

                code
            """
            # two
            # lines
            text = "# not a comment"
        '''
    )
    assert sorted(passages(source)) == [
        Passage(1, "Module.", True),
        Passage(3, "after code"),
        Passage(4, "Attribute.", True),
        Passage(8, "Function.\n\n    code", True),
        Passage(13, "two\nlines"),
    ]


def test_each_module_of_the_folders_is_checked(tmp_path, capsys):
    for name in ("fine/a.py", "odd/b.py", "odd/deep/c.py", "odd/d_pb2.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1  # it must not know y\n" if "odd" in name else "")
    assert main([str(tmp_path / "fine")]) == 0
    assert main([str(tmp_path / "fine"), str(tmp_path / "odd")]) == 1
    problem = '"must not know": write "Does not depend on ..."'
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}/odd/b.py:1: {problem}",
        f"{tmp_path}/odd/deep/c.py:1: {problem}",
    ]
