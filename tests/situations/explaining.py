"""
The explanations of an object by the operator's own program, and by ``kubectl drakit explain``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from drakit_explain.cel.allocator import Allocator
from drakit_explain.cel.helper import Helper
from drakit_explain.evidence import NO_EVENTS, Events
from drakit_explain.kinds import DRIVERS, KINDS, MAINTENANCES, PODS, POLICIES, RULES, Kind
from drakit_explain.loads import Loads, load_of_pod
from drakit_explain.pending import Explainer, Explanation
from drakit_explain.selectors import bring_up_to_date
from drakit_explain.world import World
from tests.situations.api import Api, Body, RefusedError

Command = Callable[[str, str], tuple[int, Body]]
"""Runs ``kubectl drakit explain`` for a namespace and a target. Returns the exit code and the JSON
output."""

_KINDS = [each for each in KINDS if each not in (DRIVERS, MAINTENANCES, POLICIES)]


class Explaining:
    """Explains pods with the operator's own program. For threads."""

    def __init__(self, api: Api, helper: Helper, *, program: Path, command: Command) -> None:
        self._api = api
        self._helper = helper
        self._program = program
        self._one = threading.Lock()
        self.command = command

    def explain(
        self, namespace: str, name: str, *, settled: bool = False, events: Events = NO_EVENTS
    ) -> Explanation:
        """Explain a pod by the objects that the API server has now."""
        lists = {kind: self._list(kind) for kind in _KINDS}
        with self._one:
            world = World()
            for kind, bodies in lists.items():
                for body in bodies:
                    world.apply(kind.project(body, "v1"))
            world.loads = Loads()
            for body in lists[PODS]:
                if "nodeName" in body["spec"]:
                    world.loads.apply(load_of_pod(body))
            pod = world.pod(namespace, name)
            assert pod is not None, f"pod {namespace}/{name} does not exist"
            explainer = Explainer(world)
            expressions = explainer.expressions(pod)
            slices = list(world.slices())  # including unused ones, which an explanation names
            bring_up_to_date(world.selectors, self._helper, expressions, slices)
            with closing(Allocator(lambda _: self._program)) as allocator:
                found = explainer.explain_now(pod, allocator.answer, settled=settled, events=events)
                remedy = found.remedy
            return replace(found, find_remedy=lambda: remedy)

    def _list(self, kind: Kind) -> list[Body]:
        """The objects of a kind; none if the cluster does not have the kind."""
        if kind is RULES and self._api.taint_rules_path() is None:
            return []
        try:
            return self._api.list(kind.plural)
        except RefusedError as error:
            if error.code == 404:
                return []
            raise
