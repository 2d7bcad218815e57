"""
`python -m tests.oracle.gates` writes `gates.json`: Kubernetes' feature gates and their defaults.

A unit test compares them with the page about them, without Kubernetes' sources.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from e2e.cluster.local import binaries

NEWEST = binaries.minors()[-1]
"""A release knows the defaults of earlier ones."""

GATES = Path(__file__).with_name("gates.json")

# Without those that need another --min-compatibility-version than the default one.
_STEP = re.compile(
    r'MustParse\("([\d.]+)"\), Default: (\w+), PreRelease: featuregate\.(\w+)(?!.*MinCompat)'
)


def main() -> None:
    sources = binaries.module_folder(binaries.module_file(NEWEST), "k8s.io/kubernetes")
    text = (sources / "pkg" / "features" / "kube_features.go").read_text()
    gates = {
        name: [[since, default == "true", stage] for since, default, stage in _STEP.findall(body)]
        for name, body in re.findall(r"^\t(\w+): \{\n(.*?)^\t\}", text, re.M | re.S)
        if re.search("DRA|DynamicResource|ResourceHealth", name)
    }
    content = {"kubernetes": binaries.kubernetes_version(NEWEST), "gates": gates}
    GATES.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
