"""
CDI specs (Container Device Interface), which describe devices to container runtimes.

To write a spec, :mod:`.spec` builds it from edits, with the lowest version that it needs, and
:mod:`.directory` serializes it and manages the files. To read specs, :mod:`.text` parses files, and
:mod:`.lint` finds the problems of specs and of directories, which it resolves as runtimes do. Both
use the rules of :mod:`.fields` and :mod:`.checks`. The node plugin decides which claims have a
file, and when to remove it.

Does not depend on claims, drivers, Kubernetes, or a container runtime's configuration.
"""

from __future__ import annotations

from drakit_formats.cdi.checks import InvalidNameError, Problem, transient_file_name
from drakit_formats.cdi.directory import DamagedSpecError, SpecDirectory, dump_spec
from drakit_formats.cdi.lint import lint_directories, lint_spec
from drakit_formats.cdi.spec import InvalidEditsError, build_spec, container_edits

__all__ = (
    "DamagedSpecError",
    "InvalidEditsError",
    "InvalidNameError",
    "Problem",
    "SpecDirectory",
    "build_spec",
    "container_edits",
    "dump_spec",
    "lint_directories",
    "lint_spec",
    "transient_file_name",
)
