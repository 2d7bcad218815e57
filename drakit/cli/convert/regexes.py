"""
Regular expressions as globs of paths: exactly, or with the reason why that is not possible.

A repeated character, such as ``[0-9]*``, becomes one glob for each length up to three: device
numbers have no more digits in practice, and ``*`` would also match other names.

Pure: it must not know the tools.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

__all__ = ("Globs", "UnsupportedRegexError", "globs_of", "literal_of")

_MAX_LENGTH = 256
_MAX_GLOBS = 64
_MAX_REPEAT = 3
_CLASSES = {"d": "[0-9]", "w": "[A-Za-z0-9_]"}
_SPECIAL = "*?["


class UnsupportedRegexError(ValueError):
    """No glob has the meaning of the expression."""


@dataclass(frozen=True, slots=True)
class Globs:
    """The globs of an expression."""

    texts: tuple[str, ...]
    is_bounded: bool
    """Whether repetitions were limited."""

    is_open: bool
    """Whether a ``*`` stands for a missing anchor, or for ``.*``."""


def globs_of(regex: str, *, anchored: bool = False) -> Globs:
    """
    Return the globs of an expression; raise UnsupportedRegexError.

    :param anchored: the tool compares the whole text, even without ``^`` and ``$``.
    """
    if len(regex) > _MAX_LENGTH:
        raise UnsupportedRegexError(f"it has more than {_MAX_LENGTH} characters")
    start = regex.startswith("^")
    end = regex.endswith("$") and not regex.endswith("\\$")
    parser = _Parser(regex[start : len(regex) - end])
    texts = parser.alternatives(top=True)
    if parser.has_top_alternatives and not anchored and (start or end):
        # ^a|b$ is ^a or b$.
        raise UnsupportedRegexError("its '^' and '$' apply to one alternative only")
    head = "" if start or anchored else "*"
    tail = "" if end or anchored else "*"
    found = tuple(dict.fromkeys(_joined(head, text, tail) for text in texts))
    return Globs(found, parser.is_bounded, parser.is_open or bool(head or tail))


def literal_of(regex: str) -> str | None:
    """Return the only text that an anchored expression matches; None if there are several."""
    try:
        texts = globs_of(regex, anchored=True).texts
    except UnsupportedRegexError:
        return None
    return texts[0] if len(texts) == 1 and not any(c in texts[0] for c in _SPECIAL) else None


def _joined(*parts: str) -> str:
    text = "".join(parts)
    while "**" in text:
        text = text.replace("**", "*")
    return text


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.is_bounded = False
        self.is_open = False
        self.has_top_alternatives = False

    def alternatives(self, *, top: bool = False) -> list[str]:
        found = self._sequence()
        while self._take("|"):
            self.has_top_alternatives = self.has_top_alternatives or top
            found = _bounded([*found, *self._sequence()])
        if top and self._at < len(self._text):
            raise UnsupportedRegexError("it has a ')' without its '('")
        return found

    def _sequence(self) -> list[str]:
        found = [""]
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            atom = self._atom()
            low, high = self._repeat()
            if atom == ["?"] and (low, high) in ((0, None), (1, None)):
                self.is_open = True
                repeated = ["?*" if low else "*"]
            else:
                if high is None:
                    self.is_bounded = True
                    high = max(low, _MAX_REPEAT)
                repeated = [
                    "".join(parts)
                    for count in range(low, high + 1)
                    for parts in _bounded_product(atom, count)
                ]
            found = _bounded([_joined(a, b) for a in found for b in _bounded(repeated)])
        return found

    def _atom(self) -> list[str]:
        sign = self._next()
        if sign == "(":
            if self._take("?") and not (self._take(":")):
                raise UnsupportedRegexError("it has a '(?' group")
            found = self.alternatives()
            if not self._take(")"):
                raise UnsupportedRegexError("it has a '(' without its ')'")
            return found
        if sign == "[":
            return [self._brackets()]
        if sign == ".":
            return ["?"]
        if sign == "\\":
            letter = self._next()
            if letter in _CLASSES:
                return [_CLASSES[letter]]
            if letter.isalnum():
                raise UnsupportedRegexError(f"it has '\\{letter}'")
            return [f"[{letter}]" if letter in _SPECIAL else letter]
        if sign in "*+?{^$":
            raise UnsupportedRegexError(f"it has a {sign!r} in a place where it is not supported")
        return [sign]

    def _brackets(self) -> str:
        negated = "!" if self._take("^") else ""
        inside = ""
        while not self._take("]"):
            sign = self._next()
            if sign == "[" or (sign == "!" and not inside):
                raise UnsupportedRegexError(f"it has {sign!r} in brackets")
            if sign == "\\":
                sign = self._next()
                if sign == "d":
                    sign = "0-9"
                elif sign.isalnum() or sign in "]-^\\":
                    raise UnsupportedRegexError(f"it has '\\{sign}' in brackets")
            inside += sign
        if not inside or "/" in inside:
            raise UnsupportedRegexError("its brackets are empty, or contain '/'")
        return f"[{negated}{inside}]"

    def _repeat(self) -> tuple[int, int | None]:
        low, high = self._quantity()
        if self._at < len(self._text) and self._text[self._at] in "*+?{":
            raise UnsupportedRegexError("it has two repetitions in a row")
        return low, high

    def _quantity(self) -> tuple[int, int | None]:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        if not self._take("{"):
            return 1, 1
        inside, found, _ = self._text[self._at :].partition("}")
        low, comma, high = inside.partition(",")
        self._at += len(inside) + 1
        digits = low.isascii() and low.isdigit() and len(low) < 3
        if not found or not digits or (high and not (high.isascii() and high.isdigit())):
            raise UnsupportedRegexError("it has a '{' that is no repetition")
        least, most = int(low), None if comma and not high else int((high or low)[:3])
        if least > 8 or (most is not None and not least <= most <= 8):
            raise UnsupportedRegexError("it has a repetition of more than 8")
        return least, most

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise UnsupportedRegexError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, sign: str) -> bool:
        if self._text.startswith(sign, self._at):
            self._at += 1
            return True
        return False


def _bounded(texts: list[str]) -> list[str]:
    if len(texts) > _MAX_GLOBS:
        raise UnsupportedRegexError(f"it needs more than {_MAX_GLOBS} globs")
    return texts


def _bounded_product(atom: list[str], count: int) -> list[tuple[str, ...]]:
    if len(atom) ** count > _MAX_GLOBS:
        raise UnsupportedRegexError(f"it needs more than {_MAX_GLOBS} globs")
    return list(product(atom, repeat=count))
