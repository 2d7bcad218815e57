"""
CDI specs (Container Device Interface): they describe devices to container runtimes.

Writing: :mod:`.spec` makes a spec of edits, :mod:`.version` finds the lowest version that it needs,
:mod:`.text` has its form in a file, :mod:`.directory` keeps the files. Reading: :mod:`.lint` finds
what is wrong with specs and directories, :mod:`.reading` what runtimes make of them. Both go by the
rules of :mod:`.fields` and :mod:`.names`. Which claims get a file, and when it goes, is the node
plugin's decision.

It must not know claims, drivers, Kubernetes, or a container runtime's configuration.
"""

from __future__ import annotations

from drakit.cdi.directory import DamagedSpecError, SpecDirectory
from drakit.cdi.lint import lint_directories, lint_spec
from drakit.cdi.names import InvalidNameError, qualified_name, transient_file_name
from drakit.cdi.problems import Problem
from drakit.cdi.spec import InvalidEditsError, Spec, build_spec
from drakit.cdi.text import dump_spec
from drakit.cdi.version import required_version

__all__ = (
    "DamagedSpecError",
    "InvalidEditsError",
    "InvalidNameError",
    "Problem",
    "Spec",
    "SpecDirectory",
    "build_spec",
    "dump_spec",
    "lint_directories",
    "lint_spec",
    "qualified_name",
    "required_version",
    "transient_file_name",
)
