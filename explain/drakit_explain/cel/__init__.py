"""
Selectors evaluated, by the evaluator that is installed here: :mod:`.helper` asks the program of
``operator/cel``, Kubernetes' own compiler, else :mod:`.library` uses a Python library.

It must not know slices, claims, or why a selector is evaluated.
"""

from __future__ import annotations

from importlib.util import find_spec

from drakit_explain.cel.helper import Helper, find_helper
from drakit_explain.selectors import Selectors

__all__ = ("NoEvaluatorError", "installed_selectors", "is_installed")


class NoEvaluatorError(Exception):
    """Neither of the two is installed; the text names the remedy."""


def is_installed() -> bool:
    """Return whether one of the two is installed, without loading it."""
    return find_helper() is not None or find_spec("cel_expr_python") is not None


def installed_selectors(minor: str = "") -> tuple[Selectors, str]:
    """
    Return the evaluator, and a name for it.

    :param minor: the minor release of the cluster, such as 1.37; empty if it is unknown.
    :raises NoEvaluatorError: none is installed.
    """
    program = find_helper(minor)
    if program is not None:
        return Helper(program), str(program)
    try:
        from drakit_explain.cel.library import Library
    except ImportError:
        raise NoEvaluatorError(
            "no evaluator of CEL selectors is installed: set DRAKIT_CEL to the program drakit-cel, "
            "or install drakit[kubectl]"
        ) from None
    return Library(), "cel-expr-python"
