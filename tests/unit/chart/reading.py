"""Finding things in a rendered chart."""

from __future__ import annotations

from typing import Any


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
