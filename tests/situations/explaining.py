"""
What drakit says of an object: by the operator's own program, and by ``kubectl drakit explain``.

Does not depend on scenes or situations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from drakit_explain.cel.allocator import Allocator
from drakit_explain.cel.helper import Helper
from drakit_explain.loads import Loads, load_of_pod
from drakit_explain.pending import Explainer, Explanation
from drakit_explain.projection import (
    project_claim,
    project_class,
    project_namespace,
    project_node,
    project_pod,
    project_quota,
    project_slice,
    project_taint_rule,
    project_template,
)
from drakit_explain.selectors import bring_up_to_date
from drakit_explain.world import World
from tests.situations.api import Api, Body

Command = Callable[[str, str], tuple[int, Body]]
"""Runs ``kubectl drakit explain`` for a namespace and a target; returns the exit code and the
answer for programs."""

_PROJECTIONS: dict[str, Callable[[Body], Any]] = {
    "namespaces": project_namespace,
    "nodes": project_node,
    "pods": project_pod,
    "resourcequotas": project_quota,
    "resourceclaims": project_claim,
    "resourceclaimtemplates": project_template,
    "resourceslices": project_slice,
    "deviceclasses": project_class,
    "devicetaintrules": project_taint_rule,
}


class Explaining:
    """Explains pods with the operator's own program. For threads."""

    def __init__(self, api: Api, helper: Helper, *, program: Path, command: Command) -> None:
        self._api = api
        self._helper = helper
        self._program = program
        self._one = threading.Lock()
        self.command = command

    def explain(self, namespace: str, name: str, *, settled: bool = False) -> Explanation:
        """Explain a pod by the objects that the API server has now."""
        lists = {
            plural: self._api.list(plural)
            for plural in _PROJECTIONS
            if plural != "devicetaintrules" or self._api.taint_rules_path()
        }
        with self._one:
            world = World()
            for plural, bodies in lists.items():
                for body in bodies:
                    world.apply(_PROJECTIONS[plural](body))
            world.loads = Loads()
            for body in lists["pods"]:
                if "nodeName" in body["spec"]:
                    world.loads.apply(load_of_pod(body))
            pod = world.pod(namespace, name)
            assert pod is not None, f"pod {namespace}/{name} does not exist"
            explainer = Explainer(world)
            expressions = explainer.expressions(pod)
            index = world.selectors
            bring_up_to_date(
                index, self._helper, expressions, [each.slice for each in world.reachable()]
            )
            with closing(Allocator(lambda _: self._program)) as allocator:
                found = explainer.explain_now(pod, allocator.answer, settled=settled)
                remedy = found.remedy
            return replace(found, find_remedy=lambda: remedy)
