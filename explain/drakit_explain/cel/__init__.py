"""
Evaluates selectors with the installed evaluator: :mod:`.helper` uses the program of
``operator/cel``, which is Kubernetes' own compiler. Otherwise, :mod:`.library` uses a Python
library.

Does not depend on slices or claims.
"""

from __future__ import annotations

from importlib.util import find_spec

from drakit_explain.cel.helper import Helper, find_helper
from drakit_explain.selectors import Selectors

__all__ = ("NoEvaluatorError", "installed_selectors", "is_installed")


class NoEvaluatorError(Exception):
    """Neither evaluator is installed. The message names the remedy."""


def is_installed() -> bool:
    """Return whether an evaluator is installed, without loading it."""
    return find_helper() is not None or find_spec("cel_expr_python") is not None


def installed_selectors(minor: str = "") -> tuple[Selectors, str]:
    """
    Return the evaluator, and a name for it.

    :param minor: the minor release of the cluster, such as 1.37. Empty if unknown.
    :raises NoEvaluatorError: no evaluator is installed.
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
