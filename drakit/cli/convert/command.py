"""
``drakit convert``: reads a file, and prints policies and remarks.

Policies go to standard output. Remarks go to standard error, one line each, with their place in the
input. It must not know the formats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from drakit.cli.convert import akri, generic_device_plugin, smarter_device_manager
from drakit.cli.convert.documents import Document, read_documents
from drakit.cli.convert.result import Converted, Remark, Result
from drakit.cli.errors import UsageError
from drakit.cli.manifests import policies_text
from drakit.cli.tables import visible

__all__ = ("convert",)

_Reader: TypeAlias = Callable[[Document], Iterator[Converted | Remark]]

_READERS: Mapping[str, _Reader] = {
    "akri": akri.read,
    "generic-device-plugin": generic_device_plugin.read,
    "smarter-device-manager": smarter_device_manager.read,
}


def convert(options: argparse.Namespace) -> int:
    """Print the policies; return 1 if a part of the input has no counterpart."""
    file: Path = options.file
    result = Result()
    reader = _READERS[options.tool]
    documents = read_documents(file)
    try:
        for document in documents:
            for item in reader(document):
                result.add(item)
    except UsageError as error:
        raise UsageError(visible(f"{file}: {error}")) from error
    for remark in result.remarks:
        print(visible(f"{file}: {remark}"), file=sys.stderr)
    if not result.policies and not result.remarks:
        raise UsageError(
            f"{file}: has no configuration of {options.tool}; see 'drakit convert {options.tool} "
            "--help' for the files that the command reads"
        )
    if result.policies:
        print(policies_text(result.policies, values=options.output == "values"), end="")
    return 1 if result.is_incomplete else 0
