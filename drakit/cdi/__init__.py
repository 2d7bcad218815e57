"""
CDI specs (Container Device Interface): how a container runtime is told what a device consists of.

:mod:`.names` has the rules of names, :mod:`.spec` makes a spec of edits, :mod:`.version` finds the
lowest version that it needs, :mod:`.directory` keeps the files. Everything but the directory is
pure; which claims get a file, and when it goes, is the node plugin's decision.

It must not know claims, drivers, Kubernetes, or a container runtime's configuration.
"""

from __future__ import annotations

from drakit.cdi.directory import DamagedSpecError, SpecDirectory
from drakit.cdi.names import InvalidNameError, qualified_name, transient_file_name
from drakit.cdi.spec import InvalidEditsError, Spec, build_spec
from drakit.cdi.version import required_version

__all__ = (
    "DamagedSpecError",
    "InvalidEditsError",
    "InvalidNameError",
    "Spec",
    "SpecDirectory",
    "build_spec",
    "qualified_name",
    "required_version",
    "transient_file_name",
)
