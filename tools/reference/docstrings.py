"""
The docstrings of attributes: the string literal below an assignment, which Python discards.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from types import ModuleType


@cache
def of_module(module: ModuleType) -> dict[str, str]:
    """
    Return the docstrings of a module's attributes, and of its classes' attributes as
    ``Class.name``.

    The attributes of a class are those of its body and those that ``__init__`` assigns.
    """
    tree = ast.parse(inspect.getsource(module))
    found = _of_body(tree.body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            texts = _of_body(node.body)
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    texts |= _of_body(method.body)
            found |= {f"{node.name}.{name}": text for name, text in texts.items()}
    return found


def of_attribute(owner: type, name: str) -> str:
    """Return the docstring of a class's attribute, which may be inherited. Empty if there is
    none."""
    for each in owner.__mro__:
        module = sys.modules.get(each.__module__)
        if module is None or not getattr(module, "__file__", None):
            continue
        if text := of_module(module).get(f"{each.__name__}.{name}"):
            return text
    return ""


def own_names(owner: type) -> list[str]:
    """Return the public attributes of a class that have docstrings, in order."""
    texts = of_module(sys.modules[owner.__module__])
    names = (name.partition(".") for name in texts)
    return [name for cls, _, name in names if cls == owner.__name__ and name[:1] not in ("_", "")]


def _of_body(body: list[ast.stmt]) -> dict[str, str]:
    found: dict[str, str] = {}
    for node, following in pairwise(body):
        match node, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name))
                | ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
            case _:
                pass
    return found
