"""
CDI specs (Container Device Interface): they describe devices to container runtimes.

Writing: :mod:`.spec` builds a spec from edits, of the lowest version that it needs,
:mod:`.directory` serializes it and keeps the files. Reading: :mod:`.text` parses files, and
:mod:`.lint` finds problems of specs, and of directories, which it resolves as runtimes do. Both use
the rules of :mod:`.fields` and :mod:`.checks`. The node plugin decides which claims have a file,
and when it is removed.

It must not know claims, drivers, Kubernetes, or a container runtime's configuration.
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
