"""
Checks the English of docstrings and comments: `python -m tools.english FOLDER ...`.

Each rule rejects a wording that native readers stumble over, and names a replacement. Quotations
and code in backticks are exempt. The rules are few and narrow: they do not replace a reader.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GENERATED = ("_pb2.py", "_pb2_grpc.py")


class Passage(NamedTuple):
    """A docstring, or comments on consecutive lines."""

    line: int
    text: str
    is_docstring: bool = False


class Rule(NamedTuple):
    pattern: re.Pattern[str]
    advice: str
    docstrings_only: bool = False


def _rule(pattern: str, advice: str, *, docstrings_only: bool = False) -> Rule:
    return Rule(re.compile(pattern), advice, docstrings_only)


_SENTENCE = r"(?:\A|(?<=[.!?] )|(?<=\n\n))"
"""The start of a sentence."""

_NOUN = r"(?!longer\b|more than\b|less than\b|better\b|worse\b|different\b|doubt\b|matter\b)[a-z]"
"""The start of a noun phrase after "is no"."""

RULES = (
    _rule(r"\b[Mm]ust not know\b", 'write "Does not depend on ..."'),
    _rule(
        _SENTENCE
        + r"(?:Of (?!course\b|[^.,:;]{1,60}, )|Also (?:after|before|if|in|for|of|when|with)\b"
        r"|As far\b|Else\b|Not (?!\w+ed\b|all\b|every\b|each\b|many\b|only\b|thread-safe\b))",
        'start with a subject or an imperative: "Don\'t retry at once, because ..."',
    ),
    _rule(r"\AIts?\b", "name the thing once, before a pronoun refers to it", docstrings_only=True),
    _rule(
        r"(?i:\b(?:return|yield|read|write|keep|remove|remember|forget|give)s? what\b(?! to\b))"
        r"|\AWhat\b(?!.*\?)|\A(?:Returns?|Yields?) why\b|\bReturn when\b",
        'name the thing: "Return the remembered state of an object", "the reason why", "the time"',
    ),
    _rule(
        r"\A(?:Why|Since when|Until when)\b(?!.*\?)|\AWhen\b[^,.]*(?:\.|, (?:in|on)\b)",
        'name the thing: "The reason why ...", "The time at which ..."',
        docstrings_only=True,
    ),
    _rule(
        r"\b(?:length|size|time) limit of\b|\AThe limit of\b",
        'write "the maximum number of", "the maximum length of" or "the time limit for"',
    ),
    _rule(
        r", by (?:(?:its|their|the) )?(?:\w+ )?(?:names?|U?IDs?|paths?|index|keys?)\b",
        'write "keyed by" for a mapping, and "sorted by" for a list',
        docstrings_only=True,
    ),
    _rule(r"\b(?:tak(?:e|es|ing)|lasts?) long\b", 'write "take a long time"'),
    _rule(r"\b[Rr]eplace\b[^.;:]{1,60} by\b", 'write "replace ... with"'),
    _rule(r"\bon a bug\b", 'write "if ... has a bug"'),
    _rule(r"\bmissing in (?:(?:an?|the) (?!meantime\b)|its?\b|both\b)", 'write "missing from"'),
    _rule(r"\b[Cc]hanges? of\b(?! (?:\w+ )?(?:kind|owner|heart)\b)", 'write "a change to the ..."'),
    _rule(r"\b[Rr]easons? for which\b", 'write "the reason why"'),
    _rule(r"\bin the form for\b", 'write "as the kubelet expects it", "as users write it"'),
    _rule(
        rf"(?<!here )(?<!here's )\b(?:is|are|was|were) no {_NOUN}",
        'write "is not a ...", or "there is no ..."',
    ),
    _rule(r"\b(?:has|have|had) none\b", 'write "does not have a ..."'),
    _rule(r"\b(?:count(?:s|ed)? as|counts for)\b", 'write "is treated as", "is" or "applies to"'),
    _rule(
        r"(?<!stand)(?<!stand-)\balone\b",
        'write "only" before the noun, or "by itself"',
    ),
    _rule(r"\b[Bb]eside\b", 'write "next to", "alongside" or "besides"'),
    _rule(r"\bas far as\b", 'write "if", "where", "that" or "to the extent that"'),
    _rule(
        r"\b(?:an|the|The|An|its|Its|whose|one|each|every|same|this|that|first|last|late|of|no|without)"
        r" answers?\b(?! to (?:a|the) question)",
        'write "response" or "result"',
    ),
    _rule(
        r"\b(?:[Aa] text(?! (?:file|block|editor|format|stream|table))|texts)\b",
        'write "string" or "message"',
    ),
    _rule(r"\bof which any\b", 'write "any of which"'),
    _rule(r"\balso if\b", 'write "even if"'),
    _rule(r"\bin the way of\b", 'write "in the style of", or name the likeness'),
    _rule(r"\b(?:is|are|was|were|be|been) told\b", 'write "is notified" or "gets"'),
    _rule(r"\b(?:anew|so long as|for ever)\b", 'write "again", "while" or "forever"'),
    _rule(
        r"(?i)\b(?:cancell(?:ed|ing)|label(?:led|ling)|signall(?:ed|ing)|modell(?:ed|ing)|travell\w+"
        r"|(?:col|hon|fav|behavi|neighb)our\w*|whilst|licence|catalogue|centre|analys(?:e|ed|ing)"
        r"|\w+(?:al|ial|mmar|gn|an|or|im)is(?:e[sd]?|ing|ation))\b(?<!otherwise)(?<!premise)(?<!promise)"
        r"(?<!promised)(?<!promises)(?<!promising)(?<!precise)(?<!exercise)(?<!compromise)",
        "use American spelling",
    ),
)

_MISPLACED = re.compile(r"\S +:(?:param \w+|raises \w+|returns?):| :param$", re.MULTILINE)
"""A field that a line break would have to precede."""

_EXEMPT = re.compile(
    r":param \w+:|:\w+:`[^`]*`|``[^`]*``|`[^`]*`|\"[^\"\n]*\"|^ {2,}\S.*$|\b\w+[_.]\w[\w.()]*"
    r"|\b(?i:leav(?:e|es|ing)|left|let) [^.:;]{0,60}?\balone\b",
    re.MULTILINE,
)
"""Code, quotations, indented lines, and "leave alone"."""


def passages(source: str) -> Iterator[Passage]:
    """Yield the docstrings and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield Passage(node.lineno, inspect.cleandoc(text), is_docstring=True)
            case _:
                pass
    block: list[tuple[int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        (line, column), text = token.start, token.string.lstrip("#").strip()
        if block and (line, column) != (block[-1][0] + 1, block[-1][1]):
            yield _comment(block)
            block = []
        block.append((line, column, text))
    if block:
        yield _comment(block)


def _comment(block: list[tuple[int, int, str]]) -> Passage:
    return Passage(block[0][0], "\n".join(text for _, _, text in block))


def problems(passage: Passage) -> Iterator[str]:
    """Yield a sentence for each rule that a passage breaks."""
    if passage.is_docstring and (found := _MISPLACED.search(passage.text)):
        yield f'"{found.group().strip()}": start each field on a line of its own'
    text = _EXEMPT.sub("X", passage.text)
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    for rule in RULES:
        if rule.docstrings_only and not passage.is_docstring:
            continue
        if found := rule.pattern.search(text):
            yield f'"{found.group().strip()}": {rule.advice}'


def main(folders: list[str]) -> int:
    failed = False
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.py")):
        if path.name.endswith(GENERATED):
            continue
        for passage in passages(path.read_text()):
            for problem in problems(passage):
                print(f"{path}:{passage.line}: {problem}", file=sys.stderr)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
