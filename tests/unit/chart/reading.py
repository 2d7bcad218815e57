"""Finding things in a rendered chart, and evaluating its admission policies."""

from __future__ import annotations

from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings


def the(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The object of a kind and name."""
    (found,) = [
        body for body in objects if body["kind"] == kind and body["metadata"]["name"] == name
    ]
    return found


def pod_spec(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The spec of a workload's pods."""
    return the(objects, kind, name)["spec"]["template"]["spec"]


def written(objects: list[dict[str, Any]], tmp_path, component: str):
    """The configuration file of a component, as its container has it."""
    data = the(objects, "ConfigMap", f"drakit-{component}")["data"]
    file = tmp_path / f"{component}.yaml"
    file.write_text(data[file.name])
    return file


def evaluate(expression: str, **variables: Any) -> Any:
    """The value of an expression with some variables."""
    environment = cel.NewEnv(variables=dict.fromkeys(variables, cel.Type.DYN))
    return environment.compile(expression).eval(data=variables).plain_value()


class AdmissionPolicy:
    """A ValidatingAdmissionPolicy, evaluated as the API server does."""

    def __init__(self, objects: list[dict[str, Any]], name: str, *, node: str = "node-1") -> None:
        self._spec = the(objects, "ValidatingAdmissionPolicy", name)["spec"]
        self._user = {"extra": {"authentication.kubernetes.io/node-name": [node]}}
        names = ("object", "oldObject", "request", "variables", "params", "namespaceObject")
        self._environment = cel.NewEnv(
            variables=dict.fromkeys(names, cel.Type.DYN),
            extensions=[ext_optional.ExtOptional(), ext_strings.ExtStrings()],
        )

    def refusal(
        self,
        old: dict[str, Any] | None,
        new: dict[str, Any] | None,
        *,
        params: dict[str, Any] | None = None,
        namespace: dict[str, Any] | None = None,
    ) -> tuple[str, str]:
        """
        Return the reason and the sentence of the first refusal; empty if there is none.

        :param params: one parameter; the conditions of the policy on it are evaluated.
        """
        operation = "CREATE" if old is None else "DELETE" if new is None else "UPDATE"
        request = {"operation": operation, "userInfo": self._user}
        if namespace is not None:
            request["namespace"] = namespace["metadata"]["name"]
        data = {"object": new, "oldObject": old, "request": request, "variables": {}}
        data |= {"params": params, "namespaceObject": namespace}
        if params is not None and not all(
            self._evaluate(each["expression"], data) for each in self._spec["matchConditions"]
        ):
            return "", ""
        for each in self._spec["validations"]:
            if not self._evaluate(each["expression"], data):
                if text := each.get("messageExpression"):
                    return each["reason"], self._evaluate(text, data)
                return each["reason"], each["message"]
        return "", ""

    def _evaluate(self, expression: str, data: dict[str, Any]) -> Any:
        for variable in self._spec["variables"]:
            name = variable["name"]
            if f"variables.{name}" in expression and name not in data["variables"]:
                data["variables"][name] = self._evaluate(variable["expression"], data)
        return self._environment.compile(expression).eval(data=data).plain_value()
