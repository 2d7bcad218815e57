"""The program with the helpers of several releases answers as the program of each release."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from e2e.images.cel import combined_programs
from e2e.images.context import RELEASED
from e2e.images.go import cel_program

pytestmark = pytest.mark.skipif(not shutil.which("go"), reason="needs Go")

EXACTLY = {"deviceClassName": "c", "allocationMode": "ExactCount", "count": 1}
REQUEST = {"name": "r", "exactly": EXACTLY}
QUESTIONS: list[dict[str, Any]] = [
    {"release": {}},
    {
        "select": {
            "expressions": [
                'device.driver == "a.test"',
                "device.unknown",
                'device.attributes["a.test"].size.isGreaterThan(semver("1.0.0"))',
                'device.attributes["a.test"].names.includes("x")',
                'device.capacity["a.test"].memory.compareTo(quantity("1Gi")) >= 0',
                "device.allowMultipleAllocations == true",
            ],
            "devices": [
                {"driver": "a.test", "attributes": {"size": {"version": "2.0.0"}}},
                {"driver": "b.test", "capacity": {"a.test/memory": {"value": "2Gi"}}},
            ],
        }
    },
    {"reads": {"expressions": ['device.attributes["a.test"].size == 1', "device"]}},
    {
        "verdict": {
            "nodes": [{"metadata": {"name": "n"}}],
            "classes": [{"metadata": {"name": "c"}}],
            "claims": [
                {
                    "metadata": {"name": "p", "namespace": "d", "uid": "u"},
                    "spec": {"devices": {"requests": [REQUEST]}},
                }
            ],
            "slices": [
                {
                    "metadata": {"name": "s"},
                    "spec": {
                        "driver": "a.test",
                        "nodeName": "n",
                        "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
                        "devices": [{"name": "gpu-0"}],
                    },
                }
            ],
            "gates": {"DRAAdminAccess": True, "DRAPrioritizedList": True},
        }
    },
]


def answers(program: Path) -> list[Any]:
    done = subprocess.run(
        [program],
        input="".join(f"{json.dumps(each)}\n" for each in QUESTIONS),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("minor", RELEASED)
def test_each_name_of_the_program_is_a_release(minor):
    found = answers(combined_programs(RELEASED) / f"drakit-cel-{minor}")
    assert found == answers(cel_program(minor))
    release, *_, verdict = found
    assert release["kubernetes"].startswith(f"{minor}.")
    assert verdict["verdicts"][0]["outcome"] == "allocated"


def test_the_program_has_at_most_two_thirds_of_the_size_of_its_parts():
    combined = (combined_programs(RELEASED) / f"drakit-cel-{RELEASED[-1]}").stat().st_size
    assert combined < 2 / 3 * sum(cel_program(minor).stat().st_size for minor in RELEASED)
