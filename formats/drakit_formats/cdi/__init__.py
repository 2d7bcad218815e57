"""
CDI specs (Container Device Interface), which describe devices to container runtimes.

For writing, :mod:`.spec` builds a spec from edits, with the lowest version that it needs, and
:mod:`.directory` serializes it and manages the files. For reading, :mod:`.text` parses files, and
:mod:`.lint` finds problems in specs and directories, with the same precedence between files as in
runtimes. Writing and reading use the same rules, from :mod:`.fields` and :mod:`.checks`. The node
plugin decides which claims have a file, and when to remove it.

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
