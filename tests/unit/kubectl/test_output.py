"""How answers look on a terminal, and elsewhere."""

from __future__ import annotations

import pytest

from drakit_cli.kubectl.output import Output


class Terminal:
    """A stream that is a terminal, or not."""

    def __init__(self, *, tty: bool) -> None:
        self.text = ""
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty

    def write(self, text: str) -> None:
        self.text += text


@pytest.mark.parametrize(
    ("tty", "environ", "colored"),
    [
        pytest.param(True, {}, True, id="a-terminal"),
        pytest.param(False, {}, False, id="a-pipe"),
        pytest.param(True, {"NO_COLOR": "1"}, False, id="no-color-wanted"),
        pytest.param(True, {"TERM": "dumb"}, False, id="a-dumb-terminal"),
    ],
)
def test_color_only_on_a_terminal(monkeypatch, tty, environ, colored):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stream = Terminal(tty=tty)
    Output(stream=stream).line("bad news", color="bad")  # pyright: ignore[reportArgumentType]
    assert ("\x1b[31m" in stream.text) is colored


@pytest.fixture
def narrow(monkeypatch):
    """Make a terminal of 30 columns."""
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("NO_COLOR", "1")


SENTENCE = "a sentence with words, and a-name-that-is-longer-than-the-terminal"


def test_lines_are_wrapped_between_words_on_a_terminal(narrow):
    stream = Terminal(tty=True)
    Output(stream=stream).line(SENTENCE, indent=2)  # pyright: ignore[reportArgumentType]
    assert stream.text.splitlines() == [
        "  a sentence with words, and",
        "    a-name-that-is-longer-than-the-terminal",
    ]


def test_lines_of_a_list_are_cut_to_the_terminal(narrow):
    stream = Terminal(tty=True)
    rows = [["lab", SENTENCE]]
    Output(stream=stream).table(("A", "B"), rows, cut=True)  # pyright: ignore[reportArgumentType]
    assert stream.text.splitlines() == ["A    B", f"lab  {SENTENCE[:24]}…"]


@pytest.mark.parametrize("cut", [True, False])
def test_elsewhere_lines_are_whole(narrow, cut):
    stream = Terminal(tty=False)
    shown = Output(stream=stream)  # pyright: ignore[reportArgumentType]
    shown.line(SENTENCE)
    shown.table(("A",), [[SENTENCE]], cut=cut)
    assert stream.text.splitlines() == [SENTENCE, "A", SENTENCE]
